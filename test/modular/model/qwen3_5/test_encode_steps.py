"""Every block is run once, in order, in steps that keep to the budget."""

from hypothesis import given
from hypothesis import strategies as st

from mstar.model.qwen3_5.encode_steps import blocks_of_step, num_encode_steps


@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 5000))
def test_steps(num_patches: int, depth: int, budget: int) -> None:
    steps = num_encode_steps(num_patches, depth, budget)
    blocks = [blocks_of_step(step, steps, depth) for step in range(steps)]
    assert [index for step in blocks for index in step] == list(range(depth))
    assert all(len(step) == 1 or len(step) * num_patches <= budget for step in blocks) and all(blocks)
    assert not blocks_of_step(steps, steps, depth)
    if depth * num_patches <= budget:
        assert steps == 1
