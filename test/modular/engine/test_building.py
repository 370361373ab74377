"""From taken rows to a step: hooks that answer, decline, raise or answer wrongly; layers that name what is missing."""

from typing import Any

import numpy as np
import pytest
from support.engine_rig import EngineRig, prompts, take
from support.tiny_decoder import NODE, TinyDecoder, decoder_spec
from torch import Tensor, nn

from mstar.communication.tensor_store import TensorStore
from mstar.engine.engine import Engine
from mstar.engine.engine_config import EngineConfig
from mstar.engine.layer_handles import FindLayer
from mstar.engine.memory_plan import plan_memory
from mstar.engine.spec import AttentionSpec, NodeResourceSpec, PagedKVSpec, SamplerSpec
from mstar.engine.step import AttentionStep, Rows, SubmoduleStep
from mstar.engine.submodule import EngineInputs, NodeBatch, NodeInputs, NodeOutputs, NodeSubmodule, RowColumns
from mstar.platforms.executor import InlineExecutor

PROMPTS = prompts(5, seed=2)


class RowByRow(TinyDecoder):
    """The decoder with a hook per row instead of the columnar one."""

    raises: frozenset[int] = frozenset()
    declines: frozenset[int] = frozenset()

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch | None:
        return None

    def prepare_inputs(self, graph_walk: str, rows: RowColumns, index: int) -> NodeInputs | None:
        handle = int(rows.handles[index])
        if handle in self.raises:
            raise KeyError("no such voice")
        if handle in self.declines:
            return None
        if graph_walk == "decode":
            return NodeInputs(1, np.array([-1], np.int32))
        prompt = rows.prompts[index]
        assert prompt is not None
        return NodeInputs(len(prompt), prompt)


def opened(node: TinyDecoder) -> EngineRig:
    rig = EngineRig({NODE: node})
    for handle in range(4):
        rig.open(handle, PROMPTS[handle])
    return rig


def test_row_by_row_equals_columns():
    outputs = []
    for node in (TinyDecoder(), RowByRow()):
        rig = opened(node)
        rig.generate(range(4), 8)
        outputs.append(rig.out)
    assert outputs[0] == outputs[1]


def test_a_row_that_declines_is_named_and_there_is_no_step():
    node = RowByRow()
    rig = opened(node)
    node.declines = frozenset({1, 3})
    assert rig.engine.build([take("prefill", [0, 1, 2, 3])]) == (None, [1, 3])
    rig.prefill(0, 2)
    node.declines = frozenset()
    assert rig.engine.build([take("decode", [0, 2]), take("prefill", [3])])[1] == []


def test_a_row_hook_that_raises_fails_its_row():
    node = RowByRow()
    rig = opened(node)
    node.raises = frozenset({2})
    step, declined = rig.engine.build([take("prefill", [0, 1, 2])])
    assert step is not None and not declined
    assert step.failed == {2: "RowByRow.prepare_inputs of walk 'prefill' raised KeyError: 'no such voice'"}
    assert step.handles.tolist() == [0, 1, 2]  # they go back where they came from
    with pytest.raises(RuntimeError, match="without failed rows"):
        rig.engine.admit(step)
    rig.engine.memory.close(2)
    del rig.out[2]
    rig.prefill(0, 1)
    assert rig.out[0] == rig.decoder.reference_greedy(PROMPTS[0], 1)


@pytest.mark.parametrize("hook", ["prepare_batch", "declare_step"])
def test_a_batch_hook_that_raises_fails_its_rows_and_is_named(monkeypatch: pytest.MonkeyPatch, hook: str):
    rig = opened(TinyDecoder())
    rig.prefill(0)

    def broken(walk: str, *_: Any) -> Any:
        if walk == "prefill":
            raise ZeroDivisionError("oops")
        return original(walk, *_)

    original = getattr(rig.decoder, hook)
    monkeypatch.setattr(rig.decoder, hook, broken)
    step, _ = rig.engine.build([take("decode", [0]), take("prefill", [1, 2])])
    assert step is not None
    failed = {1, 2} if hook == "prepare_batch" else {0, 1, 2}  # one declaration serves both parts
    assert step.failed.keys() == failed
    assert all(f"TinyDecoder.{hook} of walk 'prefill' raised ZeroDivisionError" in why for why in step.failed.values())
    rig.decode(0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (NodeBatch(np.ones(2, np.int32), np.zeros(2, np.int32)), "2 spans"),
        (NodeBatch(np.ones(3, np.int32), np.zeros(2, np.int32)), "2 token ids"),
    ],
)
def test_columns_that_do_not_fit_fail_the_rows(monkeypatch: pytest.MonkeyPatch, batch: NodeBatch, message: str):
    rig = opened(TinyDecoder())
    monkeypatch.setattr(rig.decoder, "prepare_batch", lambda *_: batch)
    step, _ = rig.engine.build([take("prefill", [0, 1, 2])])
    assert step is not None and step.failed.keys() == {0, 1, 2}
    assert message in step.failed[0]


def test_a_row_longer_than_the_table_fails_alone():
    rig = opened(TinyDecoder())
    rig.prefill(0, 1)
    rig.kv.lengths[1] = 64
    step, _ = rig.engine.build([take("decode", [0, 1])])
    assert step is not None
    assert step.failed == {1: "65 tokens are more than a row can hold (64)"}


def test_live_tokens_need_a_sampler():
    class NoSampler(NodeSubmodule):
        def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
            return NodeBatch(np.ones(len(rows.handles), np.int32), np.full(len(rows.handles), -1, np.int32))

        def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
            raise AssertionError

    rig = EngineRig({"plain": NoSampler()}, ())
    step, _ = rig.engine.build([take("walk", [3], "plain")])
    assert step is not None and "has no sampler" in step.failed[3]


class _Layer(nn.Module):
    def __init__(self, key: str, index: int = 0) -> None:
        super().__init__()
        self.key, self.index = key, index

    def bind_resources(self, find: FindLayer) -> None:
        self.handle = find(self.key, self.index)


class _Node(NodeSubmodule):
    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([layer])
        self.step = SubmoduleStep({})

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep | None:
        return self.step

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"x": inputs.iterations}


SIZES: dict[str, Any] = {"max_rows": 2, "max_seq_len": 32, "capacity": 3}


def start(node: NodeSubmodule, *specs: NodeResourceSpec, **config: Any) -> Engine:
    settings = EngineConfig(**{**SIZES, **config})
    return Engine({NODE: node}, specs, TensorStore(), InlineExecutor(), settings)


def test_a_layer_that_names_no_resource_ends_start_up_by_name():
    with pytest.raises(LookupError, match=r"layer 'blocks\.0' of node 'LLM' uses resource 'kv2'.*declared: attn, kv"):
        start(_Node(_Layer("kv2")), decoder_spec())
    with pytest.raises(LookupError, match="2 layers, layer 2"):
        start(_Node(_Layer("attn", 2)), decoder_spec())
    start(_Node(_Layer("attn", 1)), decoder_spec())


def test_declarations_that_do_not_fit_end_start_up():
    node = _Node(_Layer("s"))
    sampler = SamplerSpec("s", 8)
    with pytest.raises(ValueError, match="refers to 'kv'"):
        start(node, NodeResourceSpec(NODE, (sampler, AttentionSpec("a", "kv", 2))))
    with pytest.raises(ValueError, match="3 heads over 2 key-value heads"):
        start(node, NodeResourceSpec(NODE, (sampler, PagedKVSpec("kv", 1, 2, 8), AttentionSpec("a", "kv", 3))))
    with pytest.raises(ValueError, match=r"resources.kv: 1 of its pages and an empty one take 16.00 KiB"):
        start(node, NodeResourceSpec(NODE, (sampler, PagedKVSpec("kv", 1, 2, 8))), resource_bytes=370)
    with pytest.raises(ValueError, match="two ways"):
        start(node, NodeResourceSpec(NODE, (sampler,)), NodeResourceSpec(NODE, (SamplerSpec("s", 9),)))
    with pytest.raises(ValueError, match="'fast' is unknown"):
        start(_Node(_Layer("attn")), decoder_spec(), backends={"attn": "fast"})
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        _ = EngineConfig(max_rows=1, max_seq_len=1, capacity=1, dtype=__import__("torch").float16).precision


def test_a_step_that_touches_what_it_may_not_fails_its_rows():
    node = _Node(_Layer("attn"))
    engine = start(node, decoder_spec())
    for declared, message in (
        (SubmoduleStep({"other": AttentionStep()}), r"touches \['other'\]"),
        (SubmoduleStep({"attn": AttentionStep()}), "touches 'attn' but not 'kv'"),
    ):
        node.step = declared
        step, _ = engine.build([take("walk", [0])])
        assert step is not None
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(step.failed[0])


def test_caches_share_the_memory_by_page_size():
    from support.tiny_decoder import LAYERS

    two = NodeResourceSpec(NODE, (SamplerSpec("s", 8), PagedKVSpec("a", LAYERS, 2, 8, 4), PagedKVSpec("b", 1, 1, 8, 4)))
    big, small = 2 * LAYERS * 4 * 2 * 8 * 4, 2 * 4 * 8 * 4  # bytes of a page
    counts = (8 + 1) * 8 * 5  # of the sampler: an int32 and a bool for each token
    engine = start(_Node(_Layer("s")), two, resource_bytes=counts + 5 * (big + small))
    config = EngineConfig(**SIZES, resource_bytes=counts + 5 * (big + small))
    plan = {row.name: row for row in plan_memory([two], config)}
    assert plan["a"].num_bytes == 5 * big and plan["b"].num_bytes == 5 * small
    assert plan["s"].num_bytes == counts
    assert "16 tokens in 4 pages of 4" in plan["a"].detail  # one more is the sink
    assert engine.memory.most_tokens() == 16


def test_scheduling_facts():
    rig = opened(TinyDecoder())
    rig.decoder.max_rows = 3
    assert rig.engine.max_rows(NODE) == 3
    rig.decoder.max_rows = None
    assert rig.engine.max_rows(NODE) == 8
    assert rig.engine.pending_tokens(NODE, "prefill", np.arange(4)).tolist() == [len(p) for p in PROMPTS[:4]]
    assert rig.engine.lengths(NODE, np.arange(4)).tolist() == [0] * 4
    rig.prefill(0, 1)
    pending = rig.engine.pending_tokens(NODE, "decode", np.arange(4)).tolist()
    assert pending == [1, 1, len(PROMPTS[2]), len(PROMPTS[3])]
    assert rig.engine.lengths(NODE, np.arange(4)).tolist() == [len(PROMPTS[0]), len(PROMPTS[1]), 0, 0]


def test_prompts_are_looked_up_only_when_asked():
    seen: list[Tensor | Any] = []

    class Looking(TinyDecoder):
        def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
            seen.append(rows)
            return super().prepare_batch(graph_walk, rows)

    rig = opened(Looking())
    rig.run(take("prefill", [2, 0]))
    rows = seen[0]
    assert len(rows.prompts) == 2
    assert [list(prompt) for prompt in rows.prompts] == [PROMPTS[2], PROMPTS[0]]
    assert list(rows.prompts[1:][0]) == PROMPTS[0]
    assert rows.num_prompt.tolist() == [len(PROMPTS[2]), len(PROMPTS[0])]
    rig.run(take("decode", [0, 2]))
    assert seen[1].num_draws.tolist() == [1, 1]
    assert seen[1].lengths.tolist() == [len(PROMPTS[0]), len(PROMPTS[2])]
    assert seen[1].live == {"token"}
