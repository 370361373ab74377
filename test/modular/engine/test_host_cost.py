"""Planning a step is columns: its cost hardly grows with the rows. Measured in CPU time of the thread."""

import time

import torch
from support.engine_rig import EngineRig, take
from support.tiny_decoder import NODE, VOCAB, TinyDecoder

from mstar.communication.messages import SamplingParams
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
