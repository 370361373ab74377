"""Planning a step is columns: its cost hardly grows with the rows. Measured in CPU time of the thread."""

import time

import numpy as np
import torch
from support.engine_rig import GREEDY, EngineRig, take
from support.tiny_decoder import NODE, VOCAB, TinyDecoder, decoder_spec

from mstar.communication.messages import SamplingParams
from mstar.engine.resources.base import OpenConfig
from mstar.engine.submodule import EngineInputs, NodeOutputs


class NoForward(TinyDecoder):
    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        assert inputs.last is not None
        return {"token": self.head.sampler.sample(torch.zeros(inputs.last.shape[0], VOCAB))}


def planning_us(rows: int, params: SamplingParams) -> float:
    """Least of many for build, admit, plan and advance of a decode step: what others do on the machine only adds."""
    rig = EngineRig({NODE: NoForward()}, max_rows=rows, max_seq_len=256, capacity=rows, debug_poison=False)
    for handle in range(rows):
        rig.open(handle, [1 + handle % 50], params)
    rig.prefill(*range(rows))
    samples = []
    for _ in range(60):
        taken = take("decode", range(rows))
        begin = time.thread_time_ns()
        step, _ = rig.engine.build([taken])
        assert step is not None
        rig.engine.admit(step)
        rig.engine.plan(step)
        samples.append((time.thread_time_ns() - begin) / 1000)
        rig.engine.submit(step)
        rig.engine.finish(step)
    return min(samples)


def test_a_decode_step_is_planned_in_columns():
    greedy = SamplingParams(temperature=0.0, max_tokens=100)
    small, large = planning_us(16, greedy), planning_us(256, greedy)
    assert large < 4 * small, (small, large)  # 16 times the rows


def test_taking_in_a_prompt_that_others_have_computed_is_cheap():
    """600 tokens in pages of 16: keys chained, 37 pages adopted, room promised, opened. 40 us on an idle machine."""
    rig = EngineRig(specs=(decoder_spec(16),), max_seq_len=1024, num_pages={"kv": 200}, capacity=4, debug_poison=False)
    ids = np.arange(600, dtype=np.int32) % VOCAB
    rig.open(0, ids.tolist())
    rig.prefill(0)
    memory, config, samples = rig.engine.memory, OpenConfig(GREEDY, ids, 700), []
    for _ in range(60):
        begin = time.thread_time_ns()
        memory.introduce(1, config)
        assert memory.reserve(1)
        memory.open(1)
        samples.append((time.thread_time_ns() - begin) / 1000)
        assert memory.num_cached_tokens(1) == 592
        memory.close(1)
    assert min(samples) < 100, min(samples)


def test_publishing_a_decode_step_is_columns():
    def publishing_us(rows: int) -> float:
        rig = EngineRig({NODE: NoForward()}, max_rows=rows, max_seq_len=256, capacity=rows, debug_poison=False)
        for handle in range(rows):
            rig.open(handle, [1 + handle % 50] * 9)
        rig.prefill(*range(rows))
        step = rig.arm(take("decode", range(rows)))
        rig.engine.submit(step)
        rig.engine.finish(step)
        samples = []
        for _ in range(60):
            begin = time.thread_time_ns()
            rig.engine.publish(step)
            samples.append((time.thread_time_ns() - begin) / 1000)
        return min(samples)

    small, large = publishing_us(16), publishing_us(256)
    assert large < 4 * small, (small, large)
