"""Prompts computed in chunks: whatever the cuts, everything is as if they had been computed at once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chunked_nodes import GatheringDecoder, TintedDecoder
from support.engine_rig import EngineRig, portion, take
from support.tiny_decoder import NODE, TinyDecoder
from support.undisturbed import LONG, NUM_TOKENS, PARAMS, TEXTS, Logprobs, assert_undisturbed, note_logprobs

from mstar.communication.messages import SamplingParams
from mstar.communication.tensor_store import TensorStore
from mstar.engine.chunking import NOT_CHUNKED, ChunkingPolicy
from mstar.engine.engine import Engine
from mstar.engine.engine_config import EngineConfig
from mstar.engine.execution import Portion, Step
from mstar.engine.spec import NodeResourceSpec, PagedKVSpec, SamplerSpec
from mstar.engine.step import Rows, SamplerStep, SubmoduleStep
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeOutputs, NodeSubmodule, RowColumns
from mstar.graph.protocol import TakenRows
from mstar.platforms.executor import InlineExecutor, ThreadedExecutor

ANY_TOKEN = tuple(range(61))


def test_a_prompt_in_three_chunks():
    rig = EngineRig()
    rig.open(0, LONG)
    draws, rows = rig.sampler.columns.num_draws, np.array([0])
    for limit, length in ((9, 9), (10, 19)):
        step = rig.chunk("prefill", {0: limit})
        assert step.unfinished is not None and step.unfinished.tolist() == [True]
        assert step.spans.tolist() == [limit]
        assert rig.engine.lengths(NODE, rows).tolist() == [length]
        assert rig.engine.pending_tokens(NODE, "prefill", rows).tolist() == [23 - length]
        assert draws[0] == 0 and rig.out[0] == []
    step = rig.chunk("prefill", {0: 10})
    assert step.unfinished is None and step.spans.tolist() == [4]
    assert draws[0] == 1
    for _ in range(5):
        rig.decode(0)
    assert rig.out[0] == rig.decoder.reference_greedy(LONG, 6)
    rig.close_all()


RIGS: list[EngineRig] = []
"""One rig for all examples, as long as none fails: a new one takes longer than an example."""


@settings(max_examples=30)
@given(data=st.data())
def test_any_cuts_give_what_the_whole_prompt_gives(data: st.DataObject):
    """Rows of all kinds of sampling, chunks of any size, some beside rows that decode, some steps planned and given
    up, some planned while the step before is unfinished."""
    cases = data.draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4))
    rig = RIGS.pop() if RIGS else EngineRig(capture_sizes=(2, 4), prefix_cache=False)
    logprobs: dict[int, Logprobs] = {handle: [] for handle in range(len(cases))}
    for handle, (prompt, params) in enumerate(cases):
        rig.open(handle, TEXTS[prompt], PARAMS[params])
    drawn = [0] * len(cases)
    cur: Step | None = None
    while min(drawn) < NUM_TOKENS:
        live = [handle for handle, count in enumerate(drawn) if 0 < count < NUM_TOKENS]
        begun = [handle for handle, count in enumerate(drawn) if not count]
        decode = data.draw(st.lists(st.sampled_from(live), unique=True)) if live else []
        chunk = data.draw(st.lists(st.sampled_from(begun), unique=True)) if begun else []
        parts: list[TakenRows | Portion] = [take("decode", decode)] if decode else []
        if chunk:
            parts.append(portion("prefill", {handle: data.draw(st.integers(1, 12)) for handle in chunk}))
        if not parts:
            parts = [take("decode", live)] if live else [portion("prefill", dict.fromkeys(begun, 4))]
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
        if data.draw(st.booleans()):
            note_logprobs(rig.end(cur), logprobs)
            cur = None
    if cur is not None:
        note_logprobs(rig.end(cur), logprobs)
    assert_undisturbed(rig, cases, logprobs)
    rig.close_all()
    rig.out.clear()
    RIGS.append(rig)


def test_a_row_counts_its_chunks_as_nothing():
    """Penalties would see a token that a chunk's garbage logits drew."""
    rig = EngineRig()
    rig.open(0, LONG, SamplingParams(temperature=0.0, frequency_penalty=0.8, max_tokens=24))
    rig.chunk("prefill", {0: 7})
    row = rig.sampler._count_rows.of[0]
    assert row and rig.sampler._counts.output[row].sum() == 0
    live = rig.sampler.live.clone()
    rig.chunk("prefill", {0: 7})
    assert torch.equal(rig.sampler.live[:-1], live[:-1])  # the last is the sink's
    rig.chunk("prefill", {0: 30})
    assert rig.sampler._counts.output[row].sum() == 1


def test_rows_end_and_go_on_in_one_step():
    rig = EngineRig()
    for handle in range(3):
        rig.open(handle, LONG[handle:])
    rig.chunk("prefill", {0: 4})
    rig.open(3, TEXTS[3])
    rig.prefill(3)
    step = rig.run(take("decode", [3]), portion("prefill", {0: 50, 1: 6}), Portion(take("prefill", [2])))
    assert step.unfinished is not None and step.unfinished.tolist() == [False, False, True, False]
    assert step.spans.tolist() == [1, 19, 6, 21]
    assert [len(rig.out[handle]) for handle in range(4)] == [1, 0, 1, 2]
    rig.run(take("decode", [3, 0, 2]), portion("prefill", {1: 50}))
    for handle in range(3):
        assert rig.out[handle] == rig.decoder.reference_greedy(LONG[handle:], len(rig.out[handle]))
    rig.close_all()


def test_every_row_moves_and_only_chunked_walks_are_cut():
    rig = EngineRig()
    rig.open(0, LONG)
    assert rig.chunk("prefill", {0: 0}).spans.tolist() == [1]
    rig.chunk("prefill", {0: 99})
    step = rig.chunk("decode", {0: 0})
    assert step.unfinished is None and step.spans.tolist() == [1]


class Unsampled(TinyDecoder):
    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        return ChunkingPolicy(chunked=True) if graph_walk == "prefill" else None


def test_without_final_samples_a_prompt_draws_nothing():
    rig = EngineRig({NODE: Unsampled()})
    rig.open(0, LONG, SamplingParams(temperature=0.0, frequency_penalty=0.8, max_tokens=24))
    rig.open(1, [4])
    rig.chunk("prefill", {0: 20})
    step = rig.chunk("prefill", {0: 20, 1: 20})
    assert step.unfinished is None
    assert rig.sampler.columns.num_draws[:2].tolist() == [0, 0]
    assert rig.sampler._counts.output.sum() == 0


def test_a_node_is_told_which_rows_draw(monkeypatch: pytest.MonkeyPatch):
    rig = EngineRig()
    for handle in range(2):
        rig.open(handle, LONG[handle : handle + 8])
    declare, told = rig.decoder.declare_step, []
    monkeypatch.setattr(rig.decoder, "declare_step", lambda *given: told.append(given[2]) or declare(*given))
    rig.chunk("prefill", {0: 5, 1: 9})
    assert told[0].tolist() == [False, True]


class Deaf(TinyDecoder):
    """Declares a draw for every row, whatever it is told."""

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        steps = dict(super().declare_step(graph_walk, rows, kept).steps)
        return SubmoduleStep(steps | {"sampler": SamplerStep()}, rows)


def test_the_engine_sees_to_it_that_unfinished_rows_draw_nothing():
    rig = EngineRig({NODE: Deaf()})
    rig.open(0, LONG)
    rig.open(1, LONG[:3])
    rig.chunk("prefill", {0: 9, 1: 9})
    assert rig.sampler.columns.num_draws[:2].tolist() == [0, 1]


def test_no_stop_is_decided_about_a_row_that_goes_on():
    rig = EngineRig()
    for handle in range(2):
        rig.open(handle, LONG, SamplingParams(temperature=0.0, stop_token_ids=ANY_TOKEN, max_tokens=24))
    rig.open(2, [1])
    rig.prefill(2)
    first = rig.run(portion("prefill", {0: 9}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.decoder, "check_stop", None)  # nothing to ask about
        assert rig.engine.check_stop(first) == []
        assert not first.failed
    mixed = rig.run(take("decode", [2]), portion("prefill", {1: 9, 0: 50}))
    ((part, decision),) = rig.engine.check_stop(mixed)
    assert (part.begin, decision.index.tolist()) == (1, [1])


@pytest.mark.parametrize("stored", [frozenset(), frozenset({"token"})])
def test_outputs_of_unfinished_rows_are_not_kept(stored: frozenset[str]):
    rig = EngineRig(stored_signals={NODE: stored})
    for handle in range(3):
        rig.open(handle, LONG[: 10 + handle])
    step = rig.arm(portion("prefill", {0: 3, 1: 11, 2: 12}))
    rig.engine.submit(step)
    rig.engine.finish(step)
    ids = step.outputs.ids["hidden"]
    assert ids is not None and ids[0] == 0 and (ids[1:] > 0).all()
    assert rig.store.num_live == 2 * (1 + len(stored))
    logits = rig.store.gather(ids[1:]) @ rig.decoder.lm_head
    for row in (1, 2):
        np.testing.assert_allclose(logits[row - 1], rig.decoder.reference_logits(LONG[: 10 + row])[-1], atol=2e-4)
    rig.engine.publish(step, np.array([True, True, False]))
    assert rig.store.num_live == 1 + len(stored)
    rig.chunk("prefill", {0: 3})
    assert rig.store.num_live == 1 + len(stored)


def test_a_prompt_that_will_not_fit_fails_before_its_first_chunk(monkeypatch: pytest.MonkeyPatch):
    rig = EngineRig()
    rig.open(0, LONG)
    monkeypatch.setattr(rig.engine._builder, "_max_seq_len", 22)
    step, _ = rig.engine.build([portion("prefill", {0: 4})])
    assert step is not None and "more than a row can hold" in step.failed[0]


def test_a_failed_chunk_fails_its_rows_alone():
    rig = EngineRig()
    for handle in range(2):
        rig.open(handle, LONG)
    rig.chunk("prefill", {0: 5, 1: 5})
    rig.decoder.fail = [ValueError("mid-prompt")]
    assert rig.chunk("prefill", {0: 5}).failed.keys() == {0}
    rig.engine.memory.close(0)
    rig.chunk("prefill", {1: 50})
    assert rig.out[1] == rig.decoder.reference_greedy(LONG, 1)
    rig.open(0, TEXTS[0])
    rig.prefill(0)
    assert rig.out[0] == rig.decoder.reference_greedy(TEXTS[0], 1)


@pytest.mark.parametrize("threaded", [False, True])
def test_outputs_that_grow_are_joined(threaded: bool):
    """Over chunks planned ahead, given up once, run in halves once; not with what another request left."""
    rig = EngineRig({NODE: GatheringDecoder()}, executor=ThreadedExecutor() if threaded else None)
    rig.open(0, LONG)
    rig.open(1, LONG[4:])
    rig.open(2, LONG[1:9])
    rig.chunk("prefill", {2: 5})
    rig.engine.memory.close(2)  # in mid-prompt
    rig.open(2, LONG[2:10])
    steps = [rig.arm(portion("prefill", {0: 9, 1: 3, 2: 6}))]
    rig.decoder.fail = [MemoryError()]
    rig.engine.submit(steps[0])
    rig.engine.abandon(rig.arm(portion("prefill", {0: 2, 1: 2, 2: 1})))
    found: dict[int, int] = {}
    for limits in ({0: 9, 1: 5, 2: 8}, {0: 9, 1: 20}):
        steps.append(rig.arm(portion("prefill", limits)))
        rig.engine.submit(steps[-1])
        note_states(rig, steps[-2], found)
    note_states(rig, steps[-1], found)
    assert sorted(found) == [0, 1, 2]
    for handle, ids in ((0, LONG), (1, LONG[4:]), (2, LONG[2:10])):
        assert torch.equal(rig.store.get(found[handle]), rig.decoder.embedding[torch.tensor(ids)])
    rig.executor.close()


def note_states(rig: EngineRig, step: Step, found: dict[int, int]) -> None:
    assert step.event is not None and step.event.wait(20)
    rig.engine.finish(step)
    ids = step.outputs.ids["states"]
    assert ids is not None
    pairs = zip(step.handles.tolist(), ids.tolist(), strict=True)
    found.update((handle, tensor_id) for handle, tensor_id in pairs if tensor_id)


def test_pieces_of_requests_that_left_go_with_them():
    rig = EngineRig({NODE: GatheringDecoder()})
    chunks = rig.engine._nodes[NODE].chunk_outputs
    assert chunks is not None
    rig.open(0, LONG)
    rig.open(1, LONG)
    rig.chunk("prefill", {0: 5, 1: 5})
    assert chunks._pieces.keys() == {0, 1}
    rig.engine.memory.close(0)
    rig.chunk("prefill", {1: 50})
    assert not any(pieces for pieces in chunks._pieces.values())


@pytest.mark.parametrize("by_row", [False, True])
def test_columns_beside_the_tokens_are_cut_with_them(by_row: bool):
    whole, cut = EngineRig({NODE: TintedDecoder()}), EngineRig({NODE: TintedDecoder(by_row=by_row)}, capture_sizes=(2,))
    for rig in (whole, cut):
        for handle in range(3):
            rig.open(handle, LONG[handle:])
    whole.generate(range(3), 4)
    cut.chunk("prefill", {0: 4, 1: 9})
    cut.decoder.fail = [MemoryError()]  # in halves
    cut.run(portion("prefill", {0: 1, 1: 30, 2: 2}))
    cut.run(take("decode", [1]), portion("prefill", {0: 30, 2: 30}))
    cut.decode(0, 2)
    cut.decode(0, 1, 2)
    cut.decode(0, 1, 2)
    assert cut.out == whole.out
    plain = EngineRig()
    for handle in range(3):
        plain.open(handle, LONG[handle:])
    plain.generate(range(3), 4)
    assert plain.out != whole.out  # the column matters


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tint": np.zeros(3, np.int32)}, "3 entries of token column 'tint' for 23 tokens"),
        ({"hue": np.zeros(23, np.int32)}, "token column 'hue'"),
    ],
)
def test_columns_that_do_not_fit_fail_the_rows(
    monkeypatch: pytest.MonkeyPatch, columns: Mapping[str, np.ndarray], message: str
):
    rig = EngineRig({NODE: TintedDecoder()})
    rig.open(0, LONG)
    batch = NodeBatch(np.array([23], np.int32), np.array(LONG, np.int32), None, columns)
    monkeypatch.setattr(rig.decoder, "prepare_batch", lambda *_: batch)
    step, _ = rig.engine.build([take("prefill", [0])])
    assert step is not None and message in step.failed[0]


def test_rows_without_token_ids_cannot_join_others(monkeypatch: pytest.MonkeyPatch):
    rig = EngineRig()
    for handle in range(2):
        rig.open(handle, LONG)
    rig.prefill(0)
    prepare = rig.decoder.prepare_batch
    bare = NodeBatch(np.ones(1, np.int32))
    monkeypatch.setattr(
        rig.decoder, "prepare_batch", lambda walk, rows: bare if walk == "decode" else prepare(walk, rows)
    )
    step, _ = rig.engine.build([take("decode", [0]), take("prefill", [1])])
    assert step is not None and step.failed.keys() == {0, 1}
    assert "share a step with rows that have none" in step.failed[0]


class Declaring(NodeSubmodule):
    host_signals = frozenset({"token"})

    def __init__(self, **policies: ChunkingPolicy) -> None:
        super().__init__()
        self.policies = policies

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        return NodeBatch(np.zeros(len(rows.handles), np.int32))

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {}

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        return self.policies.get(graph_walk)


SAMPLER, CACHE = SamplerSpec("s", 8), PagedKVSpec("kv", 1, 2, 8)


@pytest.mark.parametrize(
    ("resources", "policies", "message"),
    [
        ((SAMPLER,), {"a": ChunkingPolicy(chunked=True)}, "walk 'a' of node 'LLM' is chunked.* no cache"),
        ((SAMPLER,), {"a": ChunkingPolicy(reuse_prefix=True)}, "no cache"),
        ((CACHE,), {"a": ChunkingPolicy(chunked=True, keep_final_chunk_samples=True)}, "no sampler"),
        ((CACHE,), {"a": ChunkingPolicy(recomputable=True)}, "no sampler"),
        ((SAMPLER, CACHE, PagedKVSpec("k2", 1, 2, 8)), {"a": ChunkingPolicy(recomputable=True)}, "2 caches"),
        (
            (SAMPLER, CACHE),
            {"a": ChunkingPolicy(recomputable=True), "b": ChunkingPolicy(recomputable=True)},
            "2 recomputable walks: a, b",
        ),
        (
            (SAMPLER, CACHE),
            {"a": ChunkingPolicy(recomputable=True), "c": ChunkingPolicy(batch_with=("b",)), "b": NOT_CHUNKED},
            r"walk 'c' .* shares steps with \['b'\]",
        ),
        ((SAMPLER, CACHE), {"a": ChunkingPolicy(chunked=True, accumulate=frozenset({"token"}))}, "every step"),
    ],
)
def test_policies_that_a_node_cannot_keep_end_start_up(resources: Any, policies: Any, message: str):
    config = EngineConfig(
        max_rows=2, max_seq_len=16, capacity=3, walk_inputs={NODE: dict.fromkeys(policies, frozenset())}
    )
    with pytest.raises(ValueError, match=message):
        Engine(
            {NODE: Declaring(**policies)}, [NodeResourceSpec(NODE, resources)], TensorStore(), InlineExecutor(), config
        )


def test_policies_are_looked_up():
    rig = EngineRig()
    assert rig.engine.policy(NODE, "prefill").chunked
    assert rig.engine.policy(NODE, "decode").batch_with == ("prefill",)
    assert rig.engine.policy(NODE, "other").chunked  # as the decoder answers
    plain = EngineRig({"plain": Declaring()}, (), walk_inputs={})
    assert plain.engine.policy("plain", "walk") is NOT_CHUNKED
    assert plain.engine.lengths("plain", np.arange(2)).tolist() == [0, 0]
    assert plain.engine.pending_tokens("plain", "walk", np.arange(2)).tolist() == [1, 1]
    assert not plain.engine.restoring("plain", [0, 1])
