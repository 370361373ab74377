"""Linear attention over a pool of states: what is staged; padding rows and other rows' slots stay untouched."""

import numpy as np
import pytest
import torch

from mstar.engine.layer_handles import GatedDeltaWeights
from mstar.engine.resources.base import StepContext
from mstar.engine.resources.linear_attention import LinearAttention
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.recurrent_state_pool import RecurrentStatePool, StateDtypes
from mstar.engine.spec import LinearAttentionSpec, PagedKVSpec, RecurrentStateSpec, StateBlock
from mstar.engine.staging import StepShape
from mstar.engine.step import LinearAttentionStep, RecurrentStep, Rows
from mstar.kernels import reference_gated_delta

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 1, 2, 4, 3, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
BLOCKS = (
    StateBlock("conv", (KERNEL - 1, CHANNELS)),
    StateBlock("delta", (VALUE_HEADS, KEY_DIM, VALUE_DIM), wide=True),
)
SPEC = LinearAttentionSpec("delta_rule", "state", KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, KERNEL)
CPU = torch.device("cpu")


def make_pool(blocks: tuple[StateBlock, ...] = BLOCKS) -> RecurrentStatePool:
    cache = PagedKV(
        PagedKVSpec("kv", 1, 1, 2, 4), num_pages=9, capacity=4, max_seq_len=32, dtype=torch.float32, device=CPU
    )
    spec = RecurrentStateSpec("state", "kv", 2, blocks)
    return RecurrentStatePool(spec, cache, num_slots=6, dtypes=StateDtypes(torch.float32), device=CPU, poison=True)


def make(pool: RecurrentStatePool, backend: str | None = None, spec: LinearAttentionSpec = SPEC) -> LinearAttention:
    return LinearAttention(spec, pool, backend=backend, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("backend", ["cpu", "torch_ref"])
@pytest.mark.parametrize("num_padding", [0, 2])
def test_a_step_moves_its_rows_states_and_no_others(backend: str, num_padding: int):
    """Rows of handles 2 and 0: the first goes on behind 5 tokens, the second begins, in a slot full of NaN."""
    torch.manual_seed(0)
    pool = make_pool()
    attention = make(pool, backend)
    assert attention.backend.name == backend
    pool.states.live[[0, 2]] = 3, 4
    pool.cache.lengths[[0, 2]] = 0, 5
    known = {name: torch.randn_like(block[1, 4]) for name, block in pool._blocks.items()}
    for name, value in known.items():
        pool._blocks[name][1, 4] = value
    spans = (1, 3) if not num_padding else (1, 1)
    rows = Rows(np.array([2, 0]), np.array(spans, np.int32))
    num_rows, num_tokens = 2 + num_padding, sum(spans) + num_padding
    staging = {
        "state.slots": np.full(num_rows, -1, np.int32),
        "state.has_state": np.zeros(num_rows, np.int32),
        "delta_rule.q_starts": np.zeros(num_rows + 1, np.int32),
    }
    ctx = StepContext(rows, sum(spans), sum(spans) == 2, staging, StepShape(num_rows, num_tokens, 8))
    facts = pool.plan(RecurrentStep(), ctx)
    mixing = attention.plan(LinearAttentionStep(), ctx)
    assert staging["state.slots"].tolist() == [4, 3, -1, -1][:num_rows]
    assert staging["state.has_state"].tolist() == [1, 0, 0, 0][:num_rows]
    assert staging["delta_rule.q_starts"].tolist() == [0, 1, *([2, 3, 4] if num_padding else [4])]
    tensors = {name: torch.from_numpy(value) for name, value in staging.items()}
    pool.begin_forward(facts, tensors)
    attention.begin_forward(mixing, tensors)
    qkv, b, a = (torch.randn(num_tokens, width) for width in (CHANNELS, VALUE_HEADS, VALUE_HEADS))
    weights = GatedDeltaWeights(torch.randn(CHANNELS, KERNEL), torch.rand(VALUE_HEADS), torch.rand(VALUE_HEADS))
    before = {name: block.clone() for name, block in pool._blocks.items()}
    out = attention.layer(1).mix(qkv, b, a, weights)

    states = {name: torch.stack([value, torch.zeros_like(value)]) for name, value in known.items()}
    starts, total = torch.tensor([0, *np.cumsum(spans)], dtype=torch.int32), sum(spans)
    expected = torch.empty(total, VALUE_HEADS * VALUE_DIM)
    reference_gated_delta.gated_delta(
        qkv[:total].clone(), b[:total], a[:total], *weights, states["conv"], states["delta"],
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), starts, KEY_HEADS, expected,
    )  # fmt: skip
    torch.testing.assert_close(out[:total], expected, rtol=1e-5, atol=1e-6)
    for name, block in pool._blocks.items():
        torch.testing.assert_close(block[1, [4, 3]], states[name], rtol=1e-5, atol=1e-6)
        others = torch.ones(block.shape[:2], dtype=torch.bool)
        others[1, [3, 4]] = False
        assert torch.equal(block[others].nan_to_num(7), before[name][others].nan_to_num(7))


def test_the_pool_must_have_the_blocks_of_the_rule():
    with pytest.raises(ValueError, match="'delta_rule' needs the blocks"):
        make(make_pool((BLOCKS[0], StateBlock("delta", (VALUE_HEADS, KEY_DIM, VALUE_DIM)))))
    with pytest.raises(ValueError, match="2 value heads over 3 key heads"):
        make(make_pool(), spec=LinearAttentionSpec("delta_rule", "state", 3, 2, KEY_DIM, VALUE_DIM))
    with pytest.raises(ValueError, match=r"resources.delta_rule.backend: 'fast' is unknown"):
        make(make_pool(), "fast")
    with pytest.raises(LookupError, match="has 2 layers, layer 2 was asked"):
        make(make_pool()).layer(2)
