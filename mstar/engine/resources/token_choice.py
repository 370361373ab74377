"""From logits and one uniform number per row to a token: temperature, top-k, top-p, min-p, inverse CDF.

Pure tensor functions, executor. A row's token depends on its own logits, parameters and number only. Tokens are ordered
by falling logit, equal logits by rising index; every rule keeps a prefix of that order:

- top-k keeps the first k;
- top-p keeps the shortest prefix whose probability, within what top-k kept, reaches p;
- min-p keeps what has at least p times the probability of the first.

The draw takes the first token at which the cumulative probability of the shortest prefix exceeds `uniform`.
Sorting a whole vocabulary is what costs, so a row is first looked at through its `num_candidates` largest logits; where
they provably decide, that is the answer, and only the other rows are looked at whole. Probabilities add up in fp64, so
that both ways give the same token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mstar.engine.resources.binned_draw import draw_token


class ChoiceParams(NamedTuple):
    """Columns fp32 `[rows, 1]`. `top_k` 0: no limit; `top_p` 1 and `min_p` 0: no cut. `uniform` in (0, 1)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


class _Drawn(NamedTuple):
    tokens: Tensor
    """int64 [rows]"""
    decided: Tensor
    """bool [rows]: the candidates were enough"""


def choose_tokens(logits: Tensor, params: ChoiceParams, num_candidates: int, *, needs_mass: bool) -> Tensor:
    """int64 `[rows]` for `logits` fp32 `[rows, vocab]` without NaN and with a finite maximum.

    `needs_mass`: some row has no top-k, so the probability of the whole vocabulary matters. On an accelerator the
    second look would wait for the device; callers there pass `num_candidates = vocab` unless every top-k is smaller.
    """
    vocab = logits.shape[1]
    mass = _whole_mass(logits, params.temperature) if needs_mass else None
    if num_candidates >= vocab:
        values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
        return _draw(values, tokens, mass, params, vocab).tokens
    values, tokens = _candidates(logits, num_candidates)
    drawn = _draw(values, tokens, mass, params, vocab)
    if logits.device.type != "cpu" or bool(drawn.decided.all()):
        return drawn.tokens
    for row in torch.nonzero(~drawn.decided).flatten().tolist():
        if bool(logits[row].amax().isfinite()):
            drawn.tokens[row] = _draw_alone(logits[row], params, row)
    return drawn.tokens


def _draw_alone(logits: Tensor, params: ChoiceParams, row: int) -> int:
    """One row on a CPU, over the whole vocabulary."""
    temperature, top_k, top_p, min_p, uniform = (float(column[row]) for column in params)
    weights = ((logits - logits.amax()) / params.temperature[row]).exp()
    return draw_token(logits.numpy(), weights.numpy(), temperature, int(top_k), top_p, min_p, uniform)


def _whole_mass(logits: Tensor, temperature: Tensor) -> Tensor:
    """fp64 `[rows, 1]`: sum of exp((logit - largest) / temperature)."""
    scaled = logits - logits.amax(-1, keepdim=True)
    return scaled.div_(temperature).exp_().sum(-1, keepdim=True, dtype=torch.float64)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` values and indices of each row in the order of the module docstring, `[rows, count]`."""
    if count < logits.shape[1] and logits.device.type == "cpu":
        values, tokens = _candidates(logits, count + 1)
        if not bool((values[:, -2] == values[:, -1]).any()):
            return values[:, :-1], tokens[:, :-1]
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    return values[:, :count], tokens[:, :count]


def _candidates(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `largest`, but among equal logits at the end of the list `topk` picks any: `_draw` does not trust those."""
    values, tokens = torch.topk(logits, count, dim=-1)
    tokens, order = tokens.sort(dim=-1)
    values = values.gather(-1, order)
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, order)


def _draw(values: Tensor, tokens: Tensor, mass: Tensor | None, params: ChoiceParams, vocab: int) -> _Drawn:
    """Inverse CDF over ordered candidates `values`, `tokens` `[rows, candidates]`."""
    count = values.shape[1]
    weights = ((values - values[:, :1]) / params.temperature).exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    top_k = params.top_k.long()
    num_top_k = torch.where(top_k > 0, top_k, vocab)
    of_top_k = cumulative.gather(1, (num_top_k - 1).clamp_(max=count - 1))
    whole = of_top_k if mass is None else torch.where(top_k > 0, of_top_k, mass)
    # One past the first prefix that reaches top-p; more than `count` when no prefix does.
    num_top_p = (cumulative < params.top_p.double() * whole).sum(-1, keepdim=True) + 1
    num_top_p = torch.where(params.top_p < 1, num_top_p, vocab)
    num_min_p = (weights >= params.min_p).sum(-1, keepdim=True)
    num_min_p = torch.where(num_min_p < count, num_min_p, vocab)
    num_kept = torch.minimum(torch.minimum(num_top_k, num_top_p), num_min_p).clamp_(min=1)
    cut = num_kept <= count
    last = (num_kept - 1).clamp_(max=count - 1)
    of_kept = cumulative.gather(1, last)
    if mass is not None:
        uncut = (params.top_k <= 0) & (params.top_p >= 1) & (params.min_p <= 0)
        of_kept = torch.where(uncut & ~cut, mass, of_kept)
        cut = cut | uncut
    drawn = (cumulative <= params.uniform.double() * of_kept).sum(-1, keepdim=True)
    drawn = torch.minimum(drawn, torch.where(num_kept <= count, last, torch.full_like(last, count)))
    if count == vocab:
        drawn = drawn.clamp_(max=count - 1)
        return _Drawn(tokens.gather(1, drawn).squeeze(1), torch.ones_like(drawn[:, 0], dtype=torch.bool))
    # What decides is above the smallest candidate: nothing outside the list can stand before it.
    border = torch.where(num_kept <= count, last, drawn.clamp(max=count - 1))
    top_p_known = (top_k <= count) | (params.top_p >= 1)
    decided = cut & top_p_known & (drawn < count) & (values.gather(1, border) > values[:, -1:])
    return _Drawn(tokens.gather(1, drawn.clamp_(max=count - 1)).squeeze(1), decided.squeeze(1))
