"""Triton's attention over pages against the formula, and the bits of a token in any batch."""

from collections.abc import Callable, Sequence

import pytest
import torch
from support import kernel_oracles as oracle
from support.triton_device import DEVICE, DTYPES, ON_DEVICE, put
from torch import Tensor

from mstar.kernels.triton.attention_decode import attend_tokens
from mstar.kernels.triton.attention_prefill import attend_rows

Attend = Callable[..., Tensor]
NAN = float("nan")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
kernels = pytest.mark.parametrize("attend", [attend_tokens, attend_rows], ids=["tokens", "rows"])
HEADS = [(9, 3, 64), (2, 2, 16), (8, 1, 80), (8, 2, 256), (16, 8, 128), (3, 3, 33)]


class Cache:
    """Rows of keys and values scattered over pages in random order. What no row owns is NaN, unused table entries are
    page numbers that do not exist."""

    def __init__(self, kv_lens: Sequence[int], kv_heads: int, dim: int, page_size: int, dtype: torch.dtype) -> None:
        counts = [-(-length // page_size) for length in kv_lens]
        k_pages = torch.full((sum(counts) + 2, page_size, kv_heads, dim), NAN).to(dtype)
        v_pages = k_pages.clone()
        table = torch.full((len(kv_lens), max([1, *counts]) + 1), 1 << 20, dtype=torch.int32)
        self.rows: list[tuple[Tensor, Tensor]] = []
        numbers = torch.randperm(sum(counts)) + 1
        taken = 0
        for row, (length, count) in enumerate(zip(kv_lens, counts, strict=True)):
            k, v = torch.randn(2, length, kv_heads, dim).to(dtype)
            pages = numbers[taken : taken + count]
            taken += count
            table[row, :count] = pages
            places = torch.arange(length)
            k_pages[pages[places // page_size], places % page_size] = k
            v_pages[pages[places // page_size], places % page_size] = v
            self.rows.append((k, v))
        self.k_pages, self.v_pages, self.table = put(k_pages), put(v_pages), put(table)
        self.kv_lens = put(torch.tensor(kv_lens, dtype=torch.int32))

    def attend(
        self, attend: Attend, q: Tensor, q_lens: Sequence[int], *, causal: bool = True, out: Tensor | None = None
    ) -> Tensor:
        starts = torch.tensor([0, *q_lens]).cumsum(0).int().to(DEVICE)
        out = torch.full(q.shape, 3.0, dtype=q.dtype, device=DEVICE) if out is None else out
        scale = q.shape[2] ** -0.5
        attend(q, self.k_pages, self.v_pages, self.table, self.kv_lens, starts, scale, causal, out)
        return out

    def check(self, q: Tensor, q_lens: Sequence[int], got: Tensor, *, causal: bool = True) -> None:
        start = 0
        for (k, v), length in zip(self.rows, q_lens, strict=True):
            row = slice(start, start + length)
            oracle.attention(q[row], k, v, q.shape[2] ** -0.5, causal).check(got[row].cpu())
            start += length


@dtypes
@kernels
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS if ON_DEVICE else HEADS[2:4])
def test_decode_around_borders(attend: Attend, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    kv_lens = [1, 2, 63, 64, 65, 127, 128, 129, 0, 385] if ON_DEVICE else [1, 65, 129, 0, 300]
    cache = Cache(kv_lens, kv_heads, dim, 64, dtype)
    q = torch.randn(len(kv_lens), heads, dim).to(dtype)
    cache.check(q, [1] * len(kv_lens), cache.attend(attend, put(q), [1] * len(kv_lens)))


@dtypes
@kernels
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 128] if ON_DEVICE else [24, 64])
def test_rows_of_any_length_share_a_call(attend: Attend, dtype: torch.dtype, page_size: int, causal: bool) -> None:
    q_lens, kv_lens = [1, 5, 70, 0, 17, 3, 64, 2], [130, 5, 90, 12, 80, 66, 64, 1]
    if not ON_DEVICE:  # more queries than a tile holds, for the kernel that has tiles
        many = 70 if attend is attend_rows else 9
        q_lens, kv_lens = [1, 5, 0, 3, many, 2], [130, 5, 12, 70, 90, 1]
    cache = Cache(kv_lens, 2, 32, page_size, dtype)
    q = torch.randn(sum(q_lens), 6, 32).to(dtype)
    cache.check(q, q_lens, cache.attend(attend, put(q), q_lens, causal=causal), causal=causal)


@dtypes
@kernels
def test_views_of_packed_buffers_and_padding(attend: Attend, dtype: torch.dtype) -> None:
    q_lens, kv_lens = [1, 4, 1], [140, 66, 3]
    cache = Cache(kv_lens, 2, 16, 64, dtype)
    qkv = torch.randn(9, 8 * 16).to(dtype)
    qkv[6:] = NAN  # padding tokens
    packed = torch.full((9, 5 * 16), 3.0, dtype=dtype, device=DEVICE)
    out = packed[:, : 4 * 16].view(9, 4, 16)
    q = qkv[:, : 4 * 16].view(9, 4, 16)
    cache.attend(attend, put(qkv)[:, : 4 * 16].view(9, 4, 16), q_lens, out=out)
    cache.check(q[:6], q_lens, out[:6])
    assert (packed[6:] == 3).all() and (packed[:, 4 * 16 :] == 3).all()


@dtypes
@kernels
def test_long_rows(attend: Attend, dtype: torch.dtype) -> None:
    kv_lens, q_lens = ([511, 40, 1024, 4096, 4097, 9000, 1], [1, 40, 5, 3, 1, 2, 1]) if ON_DEVICE else ([700], [2])
    cache = Cache(kv_lens, 2, 64, 64, dtype)
    q = (torch.randn(sum(q_lens), 4, 64) * 3).to(dtype)
    cache.check(q, q_lens, cache.attend(attend, put(q), q_lens))


@dtypes
@kernels
def test_a_token_has_the_same_bits_in_any_batch(attend: Attend, dtype: torch.dtype) -> None:
    heads, lengths = (8, [385, 64, 201, 1, 700, 33, *[129] * 60]) if ON_DEVICE else (4, [129, 64, 201, 1, 300, 33])
    cache = Cache(lengths, 2, 64, 64, dtype)
    q = put(torch.randn(len(lengths), heads, 64).to(dtype))
    whole = cache.attend(attend, q, [1] * len(lengths))
    again = cache.attend(attend, q, [1] * len(lengths))
    assert torch.equal(whole, again)
    for row in range(6):
        one = Cache([1], 2, 64, 64, dtype)
        one.k_pages, one.v_pages, one.table = cache.k_pages, cache.v_pages, cache.table[row : row + 1]
        one.kv_lens = cache.kv_lens[row : row + 1]
        assert torch.equal(one.attend(attend, q[row : row + 1], [1]), whole[row : row + 1])
