"""Attention over pages: decode and prefill in one call, any page size, nothing of the unused memory in the result."""

from collections.abc import Sequence

import pytest
import torch
from support import kernel_oracles as oracle
from torch import Tensor

from mstar.kernels import ops

NAN = float("nan")


class Cache:
    """Rows of keys and values scattered over pages in random order. What no row owns is NaN, unused table entries are
    page numbers that do not exist."""

    def __init__(self, kv_lens: Sequence[int], kv_heads: int, dim: int, page_size: int, dtype: torch.dtype) -> None:
        counts = [-(-length // page_size) for length in kv_lens]
        self.k_pages = torch.full((sum(counts) + 2, page_size, kv_heads, dim), NAN).to(dtype)
        self.v_pages = self.k_pages.clone()
        self.table = torch.full((len(kv_lens), max([1, *counts]) + 1), 1 << 20, dtype=torch.int32)
        self.kv_lens = torch.tensor(kv_lens, dtype=torch.int32)
        self.rows: list[tuple[Tensor, Tensor]] = []
        pages = iter((torch.randperm(sum(counts)) + 1).tolist())
        for row, length in enumerate(kv_lens):
            k, v = torch.randn(2, length, kv_heads, dim).to(dtype)
            self.rows.append((k, v))
            for position in range(length):
                if position % page_size == 0:
                    self.table[row, position // page_size] = next(pages)
                page = self.table[row, position // page_size]
                self.k_pages[page, position % page_size] = k[position]
                self.v_pages[page, position % page_size] = v[position]

    def attend(self, q: Tensor, q_lens: Sequence[int], *, causal: bool = True, out: Tensor | None = None) -> Tensor:
        starts = torch.tensor([0, *q_lens]).cumsum(0).int()
        scale = q.shape[2] ** -0.5
        return ops.paged_attend(
            q, self.k_pages, self.v_pages, self.table, self.kv_lens, starts, scale, out=out, causal=causal
        )

    def check(self, q: Tensor, q_lens: Sequence[int], got: Tensor, *, causal: bool = True) -> None:
        start = 0
        for (k, v), length in zip(self.rows, q_lens, strict=True):
            row = slice(start, start + length)
            oracle.attention(q[row], k, v, q.shape[2] ** -0.5, causal).check(got[row])
            start += length


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (2, 2, 16), (8, 1, 80), (3, 3, 33), (4, 2, 256), (60, 1, 8), (1, 1, 1)]
)
def test_decode_around_page_borders(kernels: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    kv_lens = [1, 2, 63, 64, 65, 127, 128, 129, 0, 200]
    cache = Cache(kv_lens, kv_heads, dim, 64, dtype)
    q = torch.randn(len(kv_lens), heads, dim).to(dtype)
    cache.check(q, [1] * len(kv_lens), cache.attend(q, [1] * len(kv_lens)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 128])
def test_rows_of_any_length_share_a_call(kernels: str, dtype: torch.dtype, page_size: int, causal: bool) -> None:
    q_lens, kv_lens = [1, 5, 70, 0, 17, 3, 64, 2], [130, 5, 90, 12, 80, 66, 64, 1]
    cache = Cache(kv_lens, 2, 32, page_size, dtype)
    q = torch.randn(sum(q_lens), 6, 32).to(dtype)
    cache.check(q, q_lens, cache.attend(q, q_lens, causal=causal), causal=causal)


def test_views_of_packed_buffers_and_padding(kernels: str, dtype: torch.dtype) -> None:
    q_lens, kv_lens = [1, 4, 1], [70, 66, 3]
    cache = Cache(kv_lens, 2, 16, 64, dtype)
    qkv = torch.randn(9, 8 * 16).to(dtype)
    qkv[6:] = NAN  # padding tokens
    q = qkv[:, : 4 * 16].view(9, 4, 16)
    packed = torch.full((9, 5 * 16), 3.0).to(dtype)
    out = packed[:, : 4 * 16].view(9, 4, 16)
    assert cache.attend(q, q_lens, out=out) is out
    cache.check(q[:6], q_lens, out[:6])
    assert (packed[6:] == 3).all() and (packed[:, 4 * 16 :] == 3).all()


def test_large_scores_do_not_overflow(kernels: str, dtype: torch.dtype) -> None:
    cache = Cache([150], 1, 16, 64, dtype)
    q = (torch.randn(1, 1, 16) * 300).to(dtype)
    got = cache.attend(q, [1])
    best = (cache.rows[0][0][:, 0].double() @ q[0, 0].double()).argmax()
    assert torch.allclose(got[0, 0].float(), cache.rows[0][1][best, 0].float(), atol=1e-2)


def test_a_row_has_the_same_bits_in_any_batch_and_however_its_prompt_is_cut(compiled: str, dtype: torch.dtype) -> None:
    lengths = [150, 64, 201, 1, 77, 33]
    cache = Cache(lengths, 3, 64, 64, dtype)
    q = torch.randn(sum(lengths), 9, 64).to(dtype)
    whole = cache.attend(q, lengths)
    start = 0
    for row, length in enumerate(lengths):
        one = Cache([1], 3, 64, 64, dtype)
        one.k_pages, one.v_pages, one.table = cache.k_pages, cache.v_pages, cache.table[row : row + 1]
        for first, last in ((0, length), (0, length // 3), (length // 3, length), *((i, i + 1) for i in range(length))):
            one.kv_lens = torch.tensor([last], dtype=torch.int32)
            part = slice(start + first, start + last)
            if last > first:
                assert torch.equal(one.attend(q[part], [last - first]), whole[part]), (row, first, last)
        start += length


@pytest.mark.parametrize("causal", [True, False])
def test_long_rows(kernels: str, dtype: torch.dtype, causal: bool) -> None:
    """Around the borders of the segments of keys, among short rows, with scores that grow and that fall."""
    kv_lens = [511, 512, 513, 40, 1024, 1030, 2500, 1]
    q_lens = [1, 1, 2, 40, 5, 12, 9, 1]
    cache = Cache(kv_lens, 2, 16, 64, dtype)
    q = (torch.randn(sum(q_lens), 6, 16) * 3).to(dtype)
    cache.check(q, q_lens, cache.attend(q, q_lens, causal=causal), causal=causal)
    one = Cache([1300], 3, 33, 64, dtype)
    q = torch.randn(2, 6, 33).to(dtype)
    one.check(q, [2], one.attend(q, [2], causal=causal), causal=causal)


def test_a_long_row_has_the_same_bits_however_it_is_cut_and_shared_among_threads(
    compiled: str, dtype: torch.dtype
) -> None:
    length = 1100
    cache = Cache([length, 300], 3, 64, 64, dtype)
    q = torch.randn(length + 1, 9, 64).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = cache.attend(q, [length, 1])
        one = Cache([1], 3, 64, 64, dtype)
        one.k_pages, one.v_pages, one.table = cache.k_pages, cache.v_pages, cache.table[:1]
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(cache.attend(q, [length, 1]), whole)
            for first, last in (
                (0, 600),
                (600, length),
                (500, 530),
                (1020, 1028),
                *((i, i + 1) for i in range(508, 516)),
            ):
                one.kv_lens = torch.tensor([last], dtype=torch.int32)
                assert torch.equal(one.attend(q[first:last], [last - first]), whole[first:last]), (count, first, last)
                mixed = torch.cat([q[first:last], q[-1:]])  # beside another row
                cache.kv_lens = torch.tensor([last, 300], dtype=torch.int32)
                expected = torch.cat([whole[first:last], whole[-1:]])
                assert torch.equal(cache.attend(mixed, [last - first, 1]), expected), (count, first, last)
            cache.kv_lens = torch.tensor([length, 300], dtype=torch.int32)
    finally:
        torch.set_num_threads(threads)


def test_a_key_that_is_not_a_number_shows_in_the_queries_that_see_it_alone(compiled: str, dtype: torch.dtype) -> None:
    cache = Cache([1200], 1, 16, 64, dtype)
    q = torch.randn(200, 2, 16).to(dtype)
    cache.k_pages[cache.table[0, 1100 // 64], 1100 % 64] = NAN
    got = cache.attend(q, [200])
    assert torch.isfinite(got[:100]).all() and torch.isnan(got[100:]).all()


def test_impossible_lengths_and_pages_are_refused(compiled: str) -> None:
    q = torch.randn(1, 2, 8)
    for length, page in ((200, 0), (3, 5), (3, -1), (-1, 0)):
        cache = Cache([3], 1, 8, 64, torch.float32)
        cache.kv_lens[0] = length
        if page:
            cache.table[0, 0] = page
        with pytest.raises(IndexError):
            cache.attend(q, [1])
    cache = Cache([3], 1, 8, 64, torch.float32)
    with pytest.raises(ValueError, match="pages"):
        ops.paged_attend(
            q, cache.k_pages[:, :, :, :4], cache.v_pages, cache.table, cache.kv_lens, torch.tensor([0, 1]).int(), 1.0
        )
