"""Caches that were taken away and are computed again from token ids: nothing but the cache may change by it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunked_nodes import GatheringDecoder
from support.engine_rig import EngineRig, portion, take
from support.tiny_decoder import NODE, TinyDecoder
from support.undisturbed import LONG, NUM_TOKENS, PARAMS, TEXTS, Logprobs, assert_undisturbed, note_logprobs

from mstar.communication.messages import SamplingParams
from mstar.engine.execution import Portion, Step
from mstar.engine.submodule import EngineInputs, NodeOutputs
from mstar.graph.protocol import TakenRows

SAMPLED = SamplingParams(temperature=0.9, seed=3, frequency_penalty=0.5, max_tokens=24)


def take_away(rig: EngineRig, handle: int) -> None:
    """The row's pages are gone, and it may compute them again."""
    length = int(rig.kv.lengths[handle])
    assert rig.engine.memory.preempt(handle, "kv") == "recompute"
    assert rig.kv.lengths[handle] == 0
    assert rig.engine.memory.resume(handle)
    if length < rig.engine._rows.num_prompt[handle]:
        rig.kv.targets[handle] = length  # nobody does so in the middle of a prompt, but the engine would
    assert rig.kv.targets[handle] == length


def decoding(*texts: list[int]) -> EngineRig:
    rig = EngineRig(prefix_cache=False)
    for handle, text in enumerate(texts):
        rig.open(handle, text)
    rig.generate(range(len(texts)), 4)
    return rig


def test_a_row_that_decodes_gets_its_cache_back():
    rig = decoding(LONG[2:10])
    take_away(rig, 0)
    rows = np.array([0])
    draws, live = int(rig.sampler.columns.num_draws[0]), int(rig.sampler.live[0])
    for left in (11, 6, 1):  # eight of the prompt, three drawn; the fourth is not in the cache yet
        assert rig.engine.restoring(NODE, rows.tolist()) == {0}
        assert rig.engine.pending_tokens(NODE, "decode", rows).tolist() == [left]
        step = rig.chunk("decode", {0: 5})
        assert step.unfinished is not None and step.unfinished.tolist() == [True]
        assert rig.engine.check_stop(step) == []
        ids = step.outputs.ids["hidden"]
        assert ids is not None and ids.tolist() == [0] and rig.store.num_live == 0
    assert not rig.engine.restoring(NODE, rows.tolist())
    assert rig.engine.pending_tokens(NODE, "decode", rows).tolist() == [1]
    assert (int(rig.sampler.columns.num_draws[0]), int(rig.sampler.live[0])) == (draws, live)
    for _ in range(4):
        rig.decode(0)
    assert rig.out[0] == rig.decoder.reference_greedy(LONG[2:10], 8)
    rig.close_all()


class Watching(TinyDecoder):
    """Notes the walk of each forward and what inputs its rows have."""

    def __init__(self) -> None:
        super().__init__()
        self.walks: list[str] = []
        self.media: list[object] = []

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        self.walks.append(graph_walk)
        if "media" in inputs.ragged:
            self.media.append([tuple(rows.shape) for rows in inputs.ragged["media"]])
        else:
            self.media.append(tuple(inputs.tensors["media"].shape) if "media" in inputs.tensors else None)
        return super().forward_batched(graph_walk, inputs)


@pytest.mark.parametrize("apart", [False, True])
def test_restored_rows_share_a_step_with_all_others(apart: bool):
    """With rows that decode, in their part or behind it, and with chunks of prompts."""
    node = Watching()
    rig = EngineRig({NODE: node}, prefix_cache=False)
    for handle in range(4):
        rig.open(handle, LONG[handle : handle + 8])
    rig.generate([0, 1, 2], 4)
    take_away(rig, 1)
    take_away(rig, 2)
    node.walks.clear()
    limits = np.array([9, 3, 9], np.int32)
    if apart:
        parts = [take("decode", [0]), portion("decode", {1: 3, 2: 9}), portion("prefill", {3: 5})]
    else:
        parts = [Portion(take("decode", [0, 1, 2]), limits), portion("prefill", {3: 5})]
    step = rig.run(*parts)
    assert node.walks == ["prefill"]
    assert step.spans.tolist() == [1, 3, 9, 5]
    assert step.unfinished is not None and step.unfinished.tolist() == [False, True, True, True]
    step = rig.run(take("decode", [0, 1, 2]))
    assert node.walks[-1] == "prefill" and step.spans.tolist() == [1, 8, 2]
    rig.prefill(3)
    rig.decode(2, 0, 1, 3)
    assert node.walks[-1] == "decode"
    for handle, count in ((0, 7), (1, 5), (2, 5), (3, 2)):
        assert rig.out[handle] == rig.decoder.reference_greedy(LONG[handle : handle + 8], count)
    rig.close_all()


def test_restored_rows_read_no_inputs():
    node = Watching()
    rig = EngineRig({NODE: node}, prefix_cache=False)
    for handle in range(3):
        rig.open(handle, LONG[handle : handle + 8])
    media = [rig.store.put(torch.ones(2, 3)) for _ in range(3)]
    rig.run(Portion(take("prefill", [0, 1, 2], media=media), np.full(3, 5, np.int32)))
    assert node.media[-1] == (3, 2, 3)
    take_away(rig, 1)
    rig.run(Portion(take("prefill", [0, 1, 2], media=media), np.full(3, 2, np.int32)))
    assert node.media[-1] == [(2, 3), (0,), (2, 3)]
    rig.run(Portion(take("prefill", [1], media=media[:1]), np.full(1, 2, np.int32)))
    assert node.media[-1] is None
    rig.run(take("prefill", [1], media=media[:1]))
    rig.run(take("prefill", [0, 1, 2], media=media))
    assert node.media[-1] == (3, 2, 3)
    for handle in range(3):
        assert rig.out[handle] == rig.decoder.reference_greedy(LONG[handle : handle + 8], 1)


def test_lists_of_restored_rows_are_empty():
    node = Watching()
    rig = EngineRig({NODE: node}, prefix_cache=False)
    for handle in range(2):
        rig.open(handle, LONG[handle : handle + 8])
    rig.generate([0, 1], 2)
    take_away(rig, 1)
    chunk = [rig.store.put(torch.ones(3)) for _ in range(2)]
    taken = take("decode", [0, 1])._replace(lists={"media": [chunk, chunk]})
    rig.run(taken)
    assert node.media[-1] == [(2, 3), (0,)]


@pytest.mark.parametrize("restored", [False, True])
def test_a_prompt_taken_away_in_its_middle_is_given_out_once(restored: bool):
    """Outputs that grow do not have what was computed again twice."""
    rig = EngineRig({NODE: GatheringDecoder()}, prefix_cache=False)
    rig.open(0, LONG)
    rig.chunk("prefill", {0: 4})
    rig.chunk("prefill", {0: 7})
    if restored:
        take_away(rig, 0)
        rig.chunk("prefill", {0: 6})
        rig.chunk("prefill", {0: 6})
        assert rig.kv.lengths[0] == 11
    else:
        assert rig.engine.memory.preempt(0, "kv") == "recompute"
        assert rig.engine.memory.resume(0)
        rig.chunk("prefill", {0: 5})
        rig.chunk("prefill", {0: 5})
        assert rig.kv.lengths[0] == 10
    rig.chunk("prefill", {0: 4})
    step = rig.arm(portion("prefill", {0: 30}))
    rig.engine.submit(step)
    rig.engine.finish(step)
    states = step.outputs.ids["states"]
    assert states is not None
    assert torch.equal(rig.store.get(int(states[0])), rig.decoder.embedding[torch.tensor(LONG)])
    assert step.host("token").tolist() == rig.decoder.reference_greedy(LONG, 1)


def test_a_forward_that_fails_takes_the_restored_rows_with_it():
    rig = decoding(LONG[:9], LONG[1:8])
    take_away(rig, 0)
    rig.decoder.fail = [ValueError("again")]
    assert rig.run(take("decode", [0, 1])).failed.keys() == {0, 1}
    rig.close_all()


def test_memory_that_runs_out_is_tried_again_in_halves():
    rig = decoding(LONG[:9], LONG[1:8], LONG[2:10])
    take_away(rig, 0)
    take_away(rig, 2)
    rig.decoder.fail = [MemoryError()]
    rig.decoder.batch_sizes.clear()
    rig.run(take("decode", [0, 1, 2]))
    assert rig.decoder.batch_sizes == [3, 2, 1]
    rig.decode(0, 1, 2)
    for handle, (begin, end, count) in enumerate(((0, 9, 5), (1, 8, 6), (2, 10, 5))):
        assert rig.out[handle] == rig.decoder.reference_greedy(LONG[begin:end], count)


def test_a_restoring_step_that_is_given_up_leaves_the_row_as_it_was():
    rig = decoding(LONG[2:10])
    take_away(rig, 0)
    rig.engine.abandon(rig.arm(portion("decode", {0: 5})))
    assert rig.engine.pending_tokens(NODE, "decode", np.array([0])).tolist() == [11]
    first = rig.arm(portion("decode", {0: 5}))
    rig.engine.submit(first)
    ahead = rig.arm(take("decode", [0]))  # planned while the chunk before is unfinished
    rig.engine.submit(ahead)
    own = rig.arm(take("decode", [0]))
    assert own.unfinished is None
    rig.end(first)
    rig.engine.submit(own)
    rig.end(ahead)
    rig.end(own)
    assert rig.out[0] == rig.decoder.reference_greedy(LONG[2:10], 5)
    rig.close_all()


def test_handles_used_again_know_only_their_own_tokens():
    rig = decoding(LONG[:9])
    rig.close_all()
    rig.open(0, LONG[3:8])
    rig.out[0] = []
    rig.generate([0], 3)
    take_away(rig, 0)
    rig.run(take("decode", [0]))
    rig.decode(0)
    assert rig.out[0] == rig.decoder.reference_greedy(LONG[3:8], 4)


RIGS: list[EngineRig] = []
"""One rig for all examples, as long as none fails: a new one takes longer than an example."""


@settings(max_examples=30)
@given(data=st.data())
def test_caches_taken_away_at_any_time_change_nothing(data: st.DataObject):
    """Rows of all kinds of sampling: prompts in chunks, caches taken away between any two steps, restored in any cuts
    beside rows that decode, steps planned ahead and steps given up."""
    cases = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4))
    rig = RIGS.pop() if RIGS else EngineRig(capture_sizes=(2, 4), prefix_cache=False)
    logprobs: dict[int, Logprobs] = {handle: [] for handle in range(len(cases))}
    for handle, (text, params) in enumerate(cases):
        rig.open(handle, TEXTS[text], PARAMS[params])
    drawn = [0] * len(cases)
    cur: Step | None = None
    for _ in range(200):
        running = [handle for handle, count in enumerate(drawn) if count < NUM_TOKENS]
        if not running:
            break
        if cur is not None and data.draw(st.booleans()):
            note_logprobs(rig.end(cur), logprobs)
            cur = None
        flying = set() if cur is None else set(cur.handles.tolist())
        idle = [handle for handle in running if handle not in flying and rig.kv.lengths[handle]]
        if idle and data.draw(st.integers(0, 3)) == 0:
            victim = data.draw(st.sampled_from(idle))
            if rig.engine.memory.reclaimable(victim, "kv"):
                rig.engine.memory.preempt(victim, "kv")
                assert rig.engine.memory.resume(victim)
        chosen = data.draw(st.lists(st.sampled_from(running), unique=True, min_size=1))
        parts: list[TakenRows | Portion] = []
        for walk, rows in (
            ("decode", [h for h in chosen if drawn[h]]),
            ("prefill", [h for h in chosen if not drawn[h]]),
        ):
            if rows:
                parts.append(portion(walk, {handle: data.draw(st.integers(1, 12)) for handle in rows}))
        step = rig.arm(*parts)
        if data.draw(st.booleans()):
            rig.engine.abandon(step)
            step = rig.arm(*parts)
        rig.engine.submit(step)
        if cur is not None:
            note_logprobs(rig.end(cur), logprobs)
        cur = step
        for row, handle in enumerate(step.handles.tolist()):
            drawn[handle] += step.unfinished is None or not step.unfinished[row]
    if cur is not None:
        note_logprobs(rig.end(cur), logprobs)
    if min(drawn) == NUM_TOKENS:
        assert_undisturbed(rig, cases, logprobs)
    rig.close_all()
    rig.out.clear()
    RIGS.append(rig)


def test_a_restored_row_equals_one_that_was_left_alone():
    outputs = []
    for disturbed in (False, True):
        rig = EngineRig()  # with pages of its own prompt to find again
        rig.open(0, LONG, SAMPLED)
        rig.generate([0], 6)
        if disturbed:
            assert rig.engine.memory.preempt(0, "kv") == "recompute"
            assert rig.engine.memory.resume(0)
            assert rig.kv.lengths[0] == 20  # five pages of the prompt were still there
            rig.run(take("decode", [0]))
        for _ in range(8):
            rig.decode(0)
        outputs.append(rig.out[0])
    assert outputs[0] == outputs[1]
