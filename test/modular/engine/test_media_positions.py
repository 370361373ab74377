"""Positions of prompts with media against transformers, and as they are staged for rows of all kinds at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model, Qwen3_5TextRotaryEmbedding

from mstar.communication.messages import MediaSpan, SamplingParams
from mstar.engine.resources.base import OpenConfig, StepContext
from mstar.engine.resources.media_positions import prompt_positions
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.positions import Positions
from mstar.engine.resources.rotary_tables import frequency_axes, rotary_tables
from mstar.engine.spec import PagedKVSpec, RotarySpec
from mstar.engine.staging import LayoutCache, StagingSlot, StepShape
from mstar.engine.step import PositionStep, Rows

CPU = torch.device("cpu")
SPEC = RotarySpec("rope", "kv", rotary_dim=16, theta=1e4, sections=(3, 3, 2))
IMAGE, VIDEO = 1, 2


class Named:
    """What `get_rope_index` reads of a model."""

    def __init__(self, merge: int) -> None:
        self.config = Qwen3_5Config(vision_config={"spatial_merge_size": merge})
        self.get_vision_position_ids = Qwen3_5Model.get_vision_position_ids.__get__(self)


def reference(kinds: list[int], images: list[tuple], videos: list[tuple], merge: int = 2) -> tuple[np.ndarray, int]:
    """`kinds`: per token; grids in patches. Table [tokens, 3] and delta as transformers has them."""

    def grids(rows: list[tuple]) -> torch.Tensor | None:
        return torch.tensor(rows) if rows else None

    table, delta = Qwen3_5Model.get_rope_index(
        Named(merge), torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]), grids(images), grids(videos)
    )
    return table[:, 0].T.numpy(), int(delta)


def span(start: int, grid: tuple[int, int, int]) -> MediaSpan:
    return MediaSpan(start, int(np.prod(grid)), bytes(16), grid)


pieces = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([IMAGE, VIDEO]), st.integers(1, 6), st.integers(1, 6)), max_size=4
)


@settings(max_examples=60, deadline=None)
@given(pieces, st.integers(1, 12))
def test_tables_and_deltas_are_those_of_transformers(media: list[tuple[int, int, int, int]], tail: int) -> None:
    kinds: list[int] = []
    spans: list[MediaSpan] = []
    grids: dict[int, list[tuple]] = {IMAGE: [], VIDEO: []}
    for text, kind, height, width in media:
        kinds += [0] * text
        spans.append(span(len(kinds), (1, height, width)))
        kinds += [kind] * (height * width)
        grids[kind].append((1, 2 * height, 2 * width))
    kinds += [0] * tail
    table, delta = reference(kinds, grids[IMAGE], grids[VIDEO])
    ours = prompt_positions(len(kinds), spans)
    np.testing.assert_array_equal(ours.table, table)
    assert ours.delta == delta
    assert (ours.table.max(1) <= np.arange(len(kinds))).all()  # the rotary tables reach far enough


def test_a_video_of_several_frame_groups_is_one_item_per_group() -> None:
    """In transformers one grid (3, h, w), whose groups are apart in the prompt."""
    spans, kinds = [], [0, 0]
    for _ in range(3):
        spans.append(span(len(kinds), (1, 2, 3)))
        kinds += [VIDEO] * 6 + [0] * 4
    table, delta = reference(kinds, [], [(3, 4, 6)])
    ours = prompt_positions(len(kinds), spans)
    np.testing.assert_array_equal(ours.table, table)
    assert ours.delta == delta


def test_media_without_a_grid_count_as_text_and_wrong_grids_are_refused() -> None:
    assert prompt_positions(6, [MediaSpan(1, 3, b"x")]).delta == 0
    for wrong in (MediaSpan(0, 5, b"", (1, 2, 3)), MediaSpan(3, 6, b"", (1, 2, 3))):
        with pytest.raises(ValueError, match="does not fit"):
            prompt_positions(8, [wrong])


def test_frequencies_follow_the_axes_of_transformers() -> None:
    config = Qwen3_5TextConfig(
        head_dim=64,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]
        },
    )  # fmt: skip
    positions = torch.tensor([[5], [70], [900]])  # [3, tokens]
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), positions[:, None])
    axes, (ours_cos, ours_sin) = frequency_axes(SPEC, CPU), rotary_tables(SPEC, 1000, CPU)
    assert axes is not None and axes.dtype == torch.int32
    place = positions[axes.long(), 0]
    torch.testing.assert_close(ours_cos[place, torch.arange(8)], cos[0, 0, :8])
    torch.testing.assert_close(ours_sin[place, torch.arange(8)], sin[0, 0, :8])
    with pytest.raises(ValueError, match="add up"):
        frequency_axes(RotarySpec("rope", "kv", 16, 1e4, sections=(3, 3, 3)), CPU)


class Rig:
    """Positions beside a cache whose lengths are set by hand."""

    def __init__(self) -> None:
        self.kv = PagedKV(
            PagedKVSpec("kv", 1, 1, 4, 4), num_pages=4, capacity=6, max_seq_len=60, dtype=torch.float32, device=CPU
        )
        self.positions = Positions(SPEC, self.kv, max_seq_len=60, device=CPU)
        self.layouts = LayoutCache(self.positions.staging_fields())

    def open(self, handle: int, num_prompt: int, media: tuple[MediaSpan, ...] = ()) -> None:
        self.positions.introduce(
            handle, OpenConfig(SamplingParams(), np.zeros(num_prompt, np.int32), num_prompt + 20, media)
        )

    def staged(self, rows: dict[int, tuple[int, int]]) -> np.ndarray:
        """`rows`: length and span by handle."""
        for handle, (length, _) in rows.items():
            self.kv.lengths[handle] = length
        own = Rows(np.array(list(rows)), np.array([span for _, span in rows.values()], np.int32))
        shape = StepShape(len(rows), own.num_tokens, 1)
        views = StagingSlot(pinned=False).views(self.layouts.layout(shape))
        self.positions.plan(PositionStep(), StepContext(own, own.num_tokens, own.single, views, shape))
        return views["rope.positions"]


def test_rows_in_and_behind_their_prompts_share_a_step() -> None:
    rig = Rig()
    media = (span(2, (1, 2, 3)),)
    rig.open(0, 12, media)
    rig.open(1, 12, media)
    rig.open(2, 5)
    table = prompt_positions(12, media)
    # A chunk inside the prompt, one row behind it, and a text row.
    staged = rig.staged({0: (1, 4), 1: (14, 1), 2: (3, 2)})
    expected = [*table.table[1:5], [14 + table.delta] * 3, [3] * 3, [4] * 3]
    np.testing.assert_array_equal(staged, expected)
    # One token each: the last of the prompt, and decoding.
    staged = rig.staged({0: (11, 1), 1: (12, 1), 2: (7, 1)})
    np.testing.assert_array_equal(staged, [table.table[11], [12 + table.delta] * 3, [7] * 3])


def test_a_handle_that_is_given_again_knows_nothing_of_its_last_request() -> None:
    rig = Rig()
    rig.open(0, 12, (span(2, (1, 2, 3)),))
    rig.positions.close(0)
    rig.open(0, 12)
    np.testing.assert_array_equal(rig.staged({0: (0, 12)}), np.repeat(np.arange(12)[:, None], 3, 1))
