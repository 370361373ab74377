"""Every patch goes through every block once, in order, in steps that keep to the budget."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.model.qwen3_5.config import VisionConfig
from mstar.model.qwen3_5.encode_steps import Blocks, EncodePlan, Part

TOWER = VisionConfig(5, 48, 96, 3, 3, 16, 2, 2, 64, 8, "gelu_pytorch_tanh", 1e4)
media = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)), max_size=4)


def attention_before(grids) -> np.ndarray:
    """Multiplications of patches with others in one block, of all patches before each, in units of those with the
    weights of a block of the usual shape, 12 hidden² for each; one of attention counts as three."""
    lengths = [4 * h * w for t, h, w in grids for _ in range(t)]
    seen = np.repeat(lengths, lengths) if lengths else np.zeros(0)
    return np.concatenate([[0.0], np.cumsum(3 * 2 * seen * TOWER.hidden_size)]) / (12 * TOWER.hidden_size**2)


@settings(max_examples=80, deadline=None)
@given(media, st.integers(1, 12), st.sampled_from([1, 30, 300, 2000, 50_000]))
def test_everything_is_computed_once_and_in_order(grids, depth: int, budget: int) -> None:
    plan = EncodePlan(grids, replace(TOWER, depth=depth), budget)
    work = [plan.work(step) for step in range(plan.num_steps)]
    patches = sum(4 * t * h * w for t, h, w in grids)
    assert plan.num_patches == patches
    if not plan.divided:
        assert [block for one in work for block in one.blocks] == list(range(depth))
        return
    seen = Counter()
    for part in work:
        assert isinstance(part, Part)
        # What is before it in its block, and all blocks before, is there.
        assert part.begin == seen[part.block, part.kind] < part.end <= patches
        assert part.kind == "embed" or seen[0, "embed"] == patches
        assert part.kind != "attend" or seen[part.block, "project"] == patches
        assert part.block == 0 or seen[part.block - 1, "attend"] == patches
        assert part.kind not in ("embed", "merge") or part.begin % 4 == part.end % 4 == 0, "whole tokens"
        seen[part.block, part.kind] = part.end
    blocks = {(block, kind): patches for block in range(depth) for kind in ("project", "attend")}
    assert seen == {(0, "embed"): patches, **blocks, (depth, "merge"): patches}


@settings(max_examples=80, deadline=None)
@given(media, st.sampled_from([10, 30, 300, 2000, 50_000]))
def test_no_step_costs_more_than_its_budget_by_more_than_a_patch(grids, budget: int) -> None:
    plan = EncodePlan(grids, TOWER, budget)
    attention = attention_before(grids)
    for step in range(plan.num_steps):
        match plan.work(step):
            case Blocks(blocks):
                spent = len(blocks) * (attention[-1] + plan.num_patches)
                assert spent <= budget + 1e-6
            case Part(kind="project" | "merge", begin=begin, end=end):
                spent = (end - begin) / 4
            case Part(kind="embed", begin=begin, end=end):
                spent = 0.4 * (end - begin)
            case Part(kind="attend", begin=begin, end=end):
                spent = attention[end] - attention[begin] + 0.75 * (end - begin)
        dearest = 1 + 3 * max((4 * h * w for _, h, w in grids), default=0) / (6 * TOWER.hidden_size)
        assert spent <= budget + dearest


@settings(max_examples=80, deadline=None)
@given(media, media, st.sampled_from([1, 30, 300, 2000, 50_000]))
def test_more_media_take_no_fewer_steps(some, more, budget: int) -> None:
    """So the number of steps for all media bounds that for those which are not cached."""
    assert EncodePlan(some, TOWER, budget).num_steps <= EncodePlan(some + more, TOWER, budget).num_steps


def test_small_media_go_through_the_tower_in_one_step() -> None:
    assert EncodePlan([(1, 8, 8)], TOWER, 100_000).num_steps == 1
    assert EncodePlan([], TOWER, 1).num_steps == 1
    assert EncodePlan([(1, 8, 8)], replace(TOWER, hidden_size=10_000), 300).work(0) == Blocks(range(1))
