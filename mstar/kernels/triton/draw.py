"""A seeded draw per row without sorting: the token that `mstar.engine.resources.token_choice` defines.

Runs on the thread of the forward. Probabilities are whole numbers, ``exp((logit - largest) / temperature)`` in units of
``2**-SHIFT``, so sums are exact in any order and a row's token depends on the row alone. Tokens are ordered by keys,
falling: the logit's bits as an integer that sorts like the number, below them the index counted backwards.

A cut (top-k, top-p) or the draw itself is a place in that order where a count or a sum is reached. Two passes over the
vocabulary find it: one sums the weights in bins of the logit's distance from the largest, which tells the bin of the
place and what lies above; another lists the tokens of that bin, and the place is searched in the list by halving. Where
the list does not fit (thousands of nearly equal logits) the whole row is searched instead, which is slow and right.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_BINS = tl.constexpr(4096)
_PER_UNIT = tl.constexpr(132.0)
"""Bins per unit of distance: what lies past the last bin has no weight."""
_LIST = tl.constexpr(4096)
_INDEX_BITS, _INDEX_MASK = tl.constexpr(22), tl.constexpr((1 << 22) - 1)
_MOST_SHIFT = 44
_SLOTS = tl.constexpr(16)
"""Whole numbers of each row, by name below."""
_LEAST, _TARGET, _KEPT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SIZE, _ABOVE, _FIRST, _LAST = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
"""Of the listed bins, and what is above them: for the cut and, four further, for the draw."""
_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Columns of the table: those of `mstar.engine.resources.sampling_columns`."""


@triton.jit
def key_of(x, columns):
    x = tl.where(x == 0.0, 0.0, x)  # -0 equals 0
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000
    return (order << _INDEX_BITS) | (columns ^ _INDEX_MASK).to(tl.int64)


@triton.jit
def logit_of(key):
    order = (key >> _INDEX_BITS) - 0x80000000
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _share(x, largest, temperature):
    """Distance from the largest logit, in temperatures, and the probability as a part of the largest one's."""
    distance = tl.math.div_rn(largest - x, temperature)
    return distance, tl.exp(-distance)


@triton.jit
def _weight(share, SHIFT: tl.constexpr):
    return (share * 2.0**SHIFT).to(tl.int64)


@triton.jit
def _bin(distance):
    return tl.minimum(distance * _PER_UNIT, _BINS - 1.0).to(tl.int32)


@triton.jit
def _token_of(tokens, row):
    """The row's largest logit; negative for a row that has failed, and where there is no row."""
    return tl.load(tokens + row, mask=row >= 0, other=-1)


@triton.jit
def _sum_kernel(
    logits, tokens, rows, handles, table, numbers, masses, counts, vocab, stride, table_stride, span,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weight in each bin, and for a top-k the number of tokens; the sum of all weights that min-p keeps."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    token = _token_of(tokens, row)
    if token >= 0:
        params = table + tl.load(handles + entry) * table_stride
        temperature, min_p, top_k = tl.load(params + _TEMPERATURE), tl.load(params + _MIN_P), tl.load(params + _TOP_K)
        largest = tl.load(logits + row * stride + token)
        begin = tl.program_id(1) * span
        least = tl.zeros([BLOCK], tl.int64)
        for start in range(begin, tl.minimum(begin + span, vocab), BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
            distance, share = _share(x, largest, temperature)
            weight = _weight(share, SHIFT)
            least += tl.where(share >= min_p, weight, 0)
            at = entry * _BINS + _bin(distance)
            tl.atomic_add(masses + at, weight, mask=weight > 0, sem="relaxed")
            if top_k > 0:
                tl.atomic_add(counts + at, tl.full([BLOCK], 1, tl.int32), mask=weight > 0, sem="relaxed")
        tl.atomic_add(numbers + entry * _SLOTS + _LEAST, tl.sum(least, 0), sem="relaxed")


@triton.jit
def _cut_kernel(tokens, rows, handles, table, numbers, masses, counts, table_stride):
    """The bins to be listed for the row's top-k or top-p cut. Without either there are none."""
    entry = tl.program_id(0).to(tl.int64)
    if _token_of(tokens, tl.load(rows + entry)) >= 0:
        own = numbers + entry * _SLOTS
        params = table + tl.load(handles + entry) * table_stride
        top_k, top_p = tl.load(params + _TOP_K).to(tl.int64), tl.load(params + _TOP_P)
        bins = entry * _BINS + tl.arange(0, _BINS)
        mass = tl.load(masses + bins)
        if top_k > 0:  # all of them, since a top-p counts from the first
            found = tl.load(counts + bins).to(tl.int64)
            number = tl.minimum(top_k, tl.sum(found, 0))
            tl.store(own + _KEPT, number)
            tl.store(own + _LAST, tl.sum((tl.cumsum(found, 0) < number).to(tl.int64), 0))
        elif top_p < 1:
            _bin_of(own, mass, _part_of(tl.sum(mass, 0), top_p))
        else:
            tl.store(own + _FIRST, 1)


@triton.jit
def _bin_of(own, mass, target):
    """Choose the bin in which the sum of weights reaches `target`, and note what lies above."""
    below = tl.cumsum(mass, 0) < target
    place = tl.sum(below.to(tl.int64), 0)
    tl.store(own + _FIRST, place)
    tl.store(own + _LAST, place)
    tl.store(own + _ABOVE, tl.sum(tl.where(below, mass, 0), 0))


@triton.jit
def _part_of(total, part):
    """The smallest whole number that is at least so much of `total`."""
    return tl.ceil(total.to(tl.float64) * part.to(tl.float64)).to(tl.int64)


@triton.jit
def _list_kernel(
    logits, tokens, rows, handles, table, numbers, keys, vocab, stride, table_stride, span,
    WHICH: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the keys of the chosen bins' tokens, in any order."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    token = _token_of(tokens, row)
    own = numbers + entry * _SLOTS + WHICH
    first, last = tl.load(own + _FIRST).to(tl.int32), tl.load(own + _LAST).to(tl.int32)
    if (token >= 0) & (first <= last):
        temperature = tl.load(table + tl.load(handles + entry) * table_stride + _TEMPERATURE)
        largest = tl.load(logits + row * stride + token)
        begin = tl.program_id(1) * span
        for start in range(begin, tl.minimum(begin + span, vocab), BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
            distance, share = _share(x, largest, temperature)
            at = _bin(distance)
            inside = (at >= first) & (at <= last) & (_weight(share, SHIFT) > 0)
            place = tl.atomic_add(
                own + _SIZE + tl.zeros_like(columns), tl.full([BLOCK], 1, tl.int64), mask=inside, sem="relaxed"
            )
            tl.store(keys + entry * _LIST + place, key_of(x, columns), mask=inside & (place < _LIST))


@triton.jit
def _sums_of_row(place, row_logits, vocab, largest, temperature, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Number and weight of the row's tokens with keys from `place` up."""
    number = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + columns, mask=columns < vocab, other=float("-inf"))
        _distance, share = _share(x, largest, temperature)
        weight = _weight(share, SHIFT)
        inside = (key_of(x, columns) >= place) & (weight > 0)
        number += inside.to(tl.int64)
        mass += tl.where(inside, weight, 0)
    return tl.sum(number, 0), tl.sum(mass, 0)


@triton.jit
def _place(
    target, above, BY_COUNT: tl.constexpr, keys, weights, listed, row_logits, vocab, largest, temperature,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest key such that the tokens from it up number or weigh at least `target`; and their weight."""
    low = tl.full([], 0, tl.int64)
    high = (tl.full([], 1, tl.int64) << (32 + _INDEX_BITS)) - 1
    if listed:
        low = tl.min(tl.where(keys >= 0, keys, high), 0)
        high = tl.max(keys, 0)
    while low < high:
        middle = low + (high - low + 1) // 2
        if listed:
            inside = keys >= middle
            if BY_COUNT:
                reached = tl.sum(inside.to(tl.int64), 0)
            else:
                reached = above + tl.sum(tl.where(inside, weights, 0), 0)
        else:
            number, mass = _sums_of_row(middle, row_logits, vocab, largest, temperature, SHIFT, BLOCK)
            if BY_COUNT:
                reached = number
            else:
                reached = mass
        enough = reached >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    if listed:
        mass = above + tl.sum(tl.where(keys >= low, weights, 0), 0)
    else:
        _number, mass = _sums_of_row(low, row_logits, vocab, largest, temperature, SHIFT, BLOCK)
    return low, mass


@triton.jit
def _kept_kernel(
    logits, tokens, rows, handles, uniforms, table, numbers, masses, keys, vocab, stride, table_stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the cuts keep; the sum at which the token is drawn, and its bin."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    token = _token_of(tokens, row)
    if token >= 0:
        own = numbers + entry * _SLOTS
        params = table + tl.load(handles + entry) * table_stride
        temperature, top_p = tl.load(params + _TEMPERATURE), tl.load(params + _TOP_P)
        top_k = tl.load(params + _TOP_K).to(tl.int64)
        largest = tl.load(logits + row * stride + token)
        row_logits = logits + row * stride
        mass = tl.load(masses + entry * _BINS + tl.arange(0, _BINS))
        size, above = tl.load(own + _SIZE), tl.load(own + _ABOVE)
        kept = tl.sum(mass, 0)
        if (top_k > 0) | (top_p < 1):
            at = tl.arange(0, _LIST)
            listed_keys = tl.load(keys + entry * _LIST + at, mask=at < size, other=-1)
            _distance, share = _share(logit_of(listed_keys), largest, temperature)
            weights = tl.where(at < size, _weight(share, SHIFT), 0)
            listed = size <= _LIST
            if top_k > 0:
                number = tl.load(own + _KEPT)
                _lowest, kept = _place(
                    number, above, True, listed_keys, weights, listed, row_logits, vocab, largest, temperature,
                    SHIFT, BLOCK,
                )  # fmt: skip
            if top_p < 1:
                target = _part_of(kept, top_p)
                _border, cut = _place(
                    target, above, False, listed_keys, weights, listed, row_logits, vocab, largest, temperature,
                    SHIFT, BLOCK,
                )  # fmt: skip
                kept = tl.minimum(kept, cut)
        one = tl.full([], 1, tl.int64) << SHIFT
        kept = tl.maximum(tl.minimum(kept, tl.load(own + _LEAST)), one)
        uniform = tl.load(uniforms + entry)
        place = tl.floor(uniform.to(tl.float64) * kept.to(tl.float64)).to(tl.int64) + 1
        tl.store(own + _TARGET, place)
        _bin_of(own + 4, mass, place)


@triton.jit
def _token_kernel(
    logits, tokens, rows, handles, table, numbers, keys, vocab, stride, table_stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at which the sum is reached."""
    entry = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + entry)
    token = _token_of(tokens, row)
    if token >= 0:
        own = numbers + entry * _SLOTS
        temperature = tl.load(table + tl.load(handles + entry) * table_stride + _TEMPERATURE)
        row_logits = logits + row * stride
        largest = tl.load(row_logits + token)
        target, size, above = tl.load(own + _TARGET), tl.load(own + _SIZE + 4), tl.load(own + _ABOVE + 4)
        at = tl.arange(0, _LIST)
        listed_keys = tl.load(keys + entry * _LIST + at, mask=at < size, other=-1)
        _distance, share = _share(logit_of(listed_keys), largest, temperature)
        weights = tl.where(at < size, _weight(share, SHIFT), 0)
        key, _mass = _place(
            target, above, False, listed_keys, weights, size <= _LIST, row_logits, vocab, largest, temperature,
            SHIFT, BLOCK,
        )  # fmt: skip
        drawn = (key & _INDEX_MASK) ^ _INDEX_MASK
        tl.store(tokens + row, drawn.to(tl.int32))


def draw_tokens(
    logits: Tensor, tokens: Tensor, rows: Tensor, handles: Tensor, uniforms: Tensor, table: Tensor, *, cuts: bool
) -> None:
    """Replace ``tokens`` int32 ``[step rows]`` of ``rows`` int64 ``[n]`` by draws from ``logits`` fp32
    ``[step rows, vocab]``. They hold the index of each row's largest logit, or a negative number: such a row is left
    as it is, and a negative entry of ``rows`` is nobody. ``uniforms`` fp32 ``[n]``. ``handles`` int64 ``[n]``: rows of
    ``table`` fp32 ``[.., columns]``, which holds temperature, top-k, top-p and min-p first. ``cuts``: some row has a
    top-k or a top-p.
    """
    num_rows, vocab = rows.shape[0], logits.shape[1]
    if vocab > _INDEX_MASK.value:
        raise ValueError(f"a draw is from {_INDEX_MASK.value} tokens at most, not {vocab}")
    device, num_bins = logits.device, _BINS.value
    words = torch.zeros(num_rows * (_SLOTS.value + num_bins + num_bins // 2), dtype=torch.int64, device=device)
    numbers, masses, counts = words.split([num_rows * each for each in (_SLOTS.value, num_bins, num_bins // 2)])
    counts = counts.view(torch.int32)
    keys = torch.empty((num_rows, _LIST.value), dtype=torch.int64, device=device)
    span = _BLOCK * (1 if num_rows <= 8 else 4)
    grid, each = (num_rows, triton.cdiv(vocab, span)), (num_rows,)
    sizes = {"SHIFT": min(_MOST_SHIFT, 62 - (vocab - 1).bit_length()), "BLOCK": _BLOCK, "num_warps": 8}
    shape = (vocab, logits.stride(0), table.stride(0))
    own = (logits, tokens, rows, handles)
    _sum_kernel[grid](*own, table, numbers, masses, counts, *shape, span, **sizes)
    if cuts:
        _cut_kernel[each](tokens, rows, handles, table, numbers, masses, counts, table.stride(0), num_warps=8)
        _list_kernel[grid](*own, table, numbers, keys, *shape, span, WHICH=0, **sizes)
    _kept_kernel[each](*own, uniforms, table, numbers, masses, keys, *shape, **sizes)
    _list_kernel[grid](*own, table, numbers, keys, *shape, span, WHICH=4, **sizes)
    _token_kernel[each](*own, table, numbers, keys, *shape, **sizes)
