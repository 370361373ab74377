"""The attention resource: backends against a dense formula, rotary tables against transformers, choice of a backend."""

import logging
import types

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mstar.engine.resources.attention import Attention
from mstar.engine.resources.attention_backends import AttentionNeed
from mstar.engine.resources.attention_choice import choose_backend
from mstar.engine.resources.base import OpenConfig
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.positions import Positions
from mstar.engine.resources.rotary_tables import inverse_frequencies, rotary_tables
from mstar.engine.spec import AttentionSpec, PagedKVSpec, RopeScaling, RotarySpec
from mstar.engine.staging import DeviceBlock, LayoutCache, StagingSlot, StepShape
from mstar.engine.step import AttentionStep, KVStep, PositionStep, ResourceStep, Rows
from mstar.engine.touched import Touched
from mstar.engine.transaction import Transaction

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, PAGE = 6, 2, 8, 4


class Rig:
    """A cache, attention and positions, stepped by hand."""

    def __init__(
        self,
        backend: str,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        sections: tuple[int, int, int] | None = None,
    ) -> None:
        self.kv = PagedKV(
            PagedKVSpec("kv", 1, KV_HEADS, DIM, PAGE),
            num_pages=40, capacity=6, max_seq_len=60, dtype=dtype, device=CPU, poison=True,
        )  # fmt: skip
        self.attention = Attention(AttentionSpec("attn", "kv", HEADS, scale), self.kv, backend=backend, device=CPU)
        rope = RotarySpec("rope", "kv", rotary_dim=DIM, theta=50.0, sections=sections)
        self.positions = Positions(rope, self.kv, max_seq_len=60, device=CPU)
        self.layouts = LayoutCache([f for r in (self.kv, self.attention, self.positions) for f in r.staging_fields()])
        self.block = DeviceBlock(CPU)

    def run(
        self, spans: dict[int, int], qkv: torch.Tensor, *, causal: bool = True, write: bool = True, rope: bool = False
    ) -> torch.Tensor:
        rows = Rows(np.array(list(spans)), np.array(list(spans.values()), np.int32))
        steps: list[tuple] = [
            (self.kv, KVStep(write=write)),
            (self.attention, AttentionStep(causal=causal)),
            (self.positions, PositionStep()),
        ]
        touched = [Touched(resource, step, rows, rows.num_tokens, rows.single) for resource, step in steps]
        shape = StepShape(len(spans), rows.num_tokens, 16)
        slot, txn = StagingSlot(pinned=False), Transaction()
        views = slot.views(self.layouts.layout(shape))
        for item in touched:
            assert item.resource.admit(item.step, item.context({}, shape), txn).ok
        for item in touched:
            item.facts = item.resource.plan(item.step, item.context(views, shape))
        for item in touched:
            item.resource.advance(item.step, item.context({}, shape), txn)
        txn.commit()
        staged = self.block.upload(slot, self.layouts.layout(shape))
        for item in touched:
            item.resource.begin_forward(item.facts, staged)
        return self.attention.layer(0).attend(qkv, self.positions.layer(0) if rope else None)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> torch.Tensor:
    """[queries, heads * dim]: the last query is the last key's token, in fp64."""
    group = HEADS // KV_HEADS
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if causal:
        ahead = torch.arange(k.shape[0])[None] > torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
        scores = scores.masked_fill(ahead, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


def split(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = qkv.view(qkv.shape[0], -1, DIM)
    return heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :]


@pytest.mark.parametrize("backend", ["torch_ref", "cpu"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_mixed_rows_equal_dense_attention(backend: str, causal: bool, scale: float | None):
    """Prefill, decode and a second chunk in one call, over rows of different lengths and pages in any order."""
    torch.manual_seed(0)
    rig, width = Rig(backend, scale), (HEADS + 2 * KV_HEADS) * DIM
    past: dict[int, list[torch.Tensor]] = {handle: [] for handle in range(6)}
    for spans in ({3: 5, 0: 1, 5: 9}, {5: 1, 3: 1, 1: 7}, {0: 4, 1: 1, 3: 8, 5: 3}, {1: 1, 0: 1}):
        qkv = torch.randn(sum(spans.values()), width)
        given = qkv.clone()
        out, begin = rig.run(spans, qkv, causal=causal), 0
        assert out.shape == (given.shape[0], HEADS * DIM)
        for handle, span in spans.items():
            past[handle].append(given[begin : begin + span])
            _, k, v = split(torch.cat(past[handle]))
            q = split(past[handle][-1])[0]
            expected = dense(q, k, v, causal=causal, scale=DIM**-0.5 if scale is None else scale)
            torch.testing.assert_close(out[begin : begin + span].double(), expected, rtol=1e-4, atol=1e-5)
            begin += span


@pytest.mark.parametrize("backend", ["torch_ref", "cpu"])
def test_a_step_that_only_reads_leaves_the_cache_alone(backend: str):
    torch.manual_seed(1)
    rig, width = Rig(backend), (HEADS + 2 * KV_HEADS) * DIM
    first = torch.randn(6, width)
    rig.run({2: 6}, first.clone())
    pages = rig.kv.layer(0).k.clone()
    read = torch.randn(2, width)
    out = rig.run({2: 2}, read.clone(), causal=False, write=False)
    _, k, v = split(first)
    torch.testing.assert_close(
        out.double(), dense(split(read)[0], k, v, causal=False, scale=DIM**-0.5), rtol=1e-4, atol=1e-5
    )
    assert rig.kv.lengths[2] == 6
    live = rig.kv.stream(2).pages.astype(np.int64)
    assert torch.equal(rig.kv.layer(0).k[live].nan_to_num(), pages[live].nan_to_num())


@pytest.mark.parametrize("backend", ["torch_ref", "cpu"])
def test_rotation_depends_on_the_distance_only(backend: str):
    """Scores after rotation are those of relative positions: shifting a whole row changes nothing."""
    torch.manual_seed(2)
    width = (HEADS + 2 * KV_HEADS) * DIM
    tail = torch.randn(4, width)
    outputs = []
    for shift in (0, 7):
        rig = Rig(backend)
        rig.kv.open(1, OpenConfig(None, None, 30))  # type: ignore[arg-type]
        head = torch.zeros(shift, width)
        if shift:
            rig.run({1: shift}, head, rope=True)
        outputs.append(rig.run({1: 4}, tail.clone(), rope=True))
    # Zero keys and values in front scale each head's output down, and do not turn it.
    a, b = outputs
    cosine = torch.nn.functional.cosine_similarity(a.view(4, HEADS, DIM), b.view(4, HEADS, DIM), dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch_ref", "cpu"])
@pytest.mark.parametrize("sections", [None, (2, 1, 1)])
def test_columns_of_a_wider_projection_serve_as_well(backend: str, dtype: torch.dtype, sections: tuple | None):
    """Queries, keys and values beside the gates of a projection, with partial rotation by one position or by three."""
    torch.manual_seed(3)
    width = (HEADS + 2 * KV_HEADS) * DIM
    alone, beside = (Rig(backend, dtype=dtype, sections=sections) for _ in range(2))
    for rig in (alone, beside):
        for handle in (1, 3):
            rig.positions.open(handle, OpenConfig(None, None, 30))  # type: ignore[arg-type]
    for spans in ({3: 9, 1: 6}, {1: 1, 3: 1}):
        wide = torch.randn(sum(spans.values()), width + HEADS * DIM).to(dtype)
        gates, packed = wide[:, width:].clone(), wide[:, :width].contiguous()
        out = beside.run(spans, wide[:, :width], rope=True)
        assert torch.equal(out, alone.run(spans, packed, rope=True))
        assert torch.equal(wide[:, :width], packed) and torch.equal(wide[:, width:], gates)
    assert (alone.positions.layer(0).axes is None) == (sections is None)


ROPES = [
    (None, {"rope_type": "default"}),
    (RopeScaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    (
        RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
    ),
    (
        RopeScaling("llama3", 8.0, 1.0, 4.0, 32),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "parameters"), ROPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_transformers(scaling: RopeScaling | None, parameters: dict, head_dim: int):
    config = LlamaConfig(
        head_dim=head_dim, hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **parameters},
    )  # fmt: skip
    kind = parameters["rope_type"]
    if kind == "default":
        expected = 1.0 / (500000.0 ** (torch.arange(0, head_dim, 2).float() / head_dim))
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
        assert factor == 1.0
    spec = RotarySpec("rope", "kv", head_dim, 500000.0, scaling)
    assert torch.equal(inverse_frequencies(spec), expected)
    cos, sin = rotary_tables(spec, 300, CPU)
    angles = torch.arange(300).float()[:, None] * expected
    assert torch.equal(cos, angles.cos()) and torch.equal(sin, angles.sin())


NEED = AttentionNeed("cpu", torch.float32, 4, 2, 8, 16)


def test_the_first_backend_that_can_serve_is_chosen_and_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="mstar.engine.resources.backend_choice"):
        assert choose_backend("attn", NEED, None).name == "cpu"
        assert choose_backend("attn", NEED, "torch_ref").name == "torch_ref"
    assert [record.getMessage() for record in caplog.records] == [
        "attention attn: backend cpu", "attention attn: backend torch_ref"
    ]  # fmt: skip
    cuda = AttentionNeed("cuda", torch.float32, 4, 2, 8, 16)
    assert choose_backend("attn", cuda, None).name == "triton"
    with pytest.raises(ValueError, match=r"resources\.attn: no attention backend.*cpu: runs on a CPU, not on cuda"):
        choose_backend("attn", cuda, "cpu")
    with pytest.raises(ValueError, match="known: cpu, flashinfer, torch_ref, triton"):
        choose_backend("attn", NEED, "flash")


def test_resources_take_their_own_kind_of_step():
    assert all(issubclass(step, ResourceStep) for step in (KVStep, AttentionStep, PositionStep))
    assert isinstance(Rig("cpu").attention.layer(0).attend, types.MethodType)
