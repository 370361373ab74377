"""Attention inside segments against plain softmax, with borders known on the host or in memory only."""

import pytest
import torch

from mstar.kernels.segment_attention import segment_attend

LENGTHS = [(7,), (3, 3, 4), (1, 12, 1, 1), (5, 5, 5)]


@pytest.mark.parametrize("padding", [0, 6])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_items_see_their_own_segment(lengths: tuple[int, ...], padding: int):
    torch.manual_seed(0)
    items = sum(lengths)
    wide = torch.randn(items, 3, 2, 8)
    q, k, v = wide.unbind(1)
    expected = []
    for own in wide.split(lengths):
        scores = torch.einsum("qhd,khd->hqk", own[:, 0], own[:, 1]) / 8**0.5
        expected.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), own[:, 2]))
    starts = torch.tensor([0, *lengths, *[0] * padding], dtype=torch.int32).cumsum(0).int()
    if not padding:
        torch.testing.assert_close(segment_attend(q, k, v, starts, lengths), torch.cat(expected))
    behind = torch.full((padding, 3, 2, 8), float("nan"))
    q, k, v = torch.cat([wide, behind]).unbind(1)
    got = segment_attend(q, k, v, starts, None)
    assert got.shape == (items + padding, 2, 8)
    torch.testing.assert_close(got[:items], torch.cat(expected))
