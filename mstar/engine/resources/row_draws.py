"""From a step's logits to its tokens: `TorchDraws`, the specification, and `KernelDraws` for a device with kernels.

Executor. Rows are chosen by the plan of the step; tables belong to the sampler. Tokens are int32 `[step rows]`, and
`FAILED_TOKEN` where a row's logits had no finite maximum: such a row stays so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from mstar.engine.execution import AllowedTokens
from mstar.engine.host_columns import to_device
from mstar.engine.resources import sampling_columns as column
from mstar.engine.resources.logit_adjust import TokenBiases, TokenCounts, forbidden_tokens
from mstar.engine.resources.logprobs import log_probabilities
from mstar.engine.resources.sampling_plan import SamplingPlan
from mstar.engine.resources.token_choice import ChoiceParams, choose_tokens
from mstar.kernels import ops
from mstar.kernels.sampling import sampling_kernels

if TYPE_CHECKING:
    from mstar.kernels.triton.kernels import SamplingKernels

FAILED_TOKEN = -1
"""In a step's tokens: the row's logits had no finite maximum."""

Fields = Mapping[str, Tensor]
"""Columns of a `RowGroup` on the device, with its `rows`."""


class DrawTables(NamedTuple):
    """By handle: `params` fp32 [handles, 7]. By rows of their own: counts and biases."""

    params: Tensor
    counts: TokenCounts
    biases: TokenBiases


class RowDraws(Protocol):
    """Both write into `tokens`; `logits` fp32 [step rows, vocab] may be overwritten. `capturable`: what `choose`
    launches depends on the number of entries only; one whose row is negative is nobody."""

    capturable: bool

    def largest(self, logits: Tensor, tokens: Tensor) -> None:
        """Each row's largest logit, the lowest index among equals."""
        ...

    def adjust(
        self, logits: Tensor, tokens: Tensor, plan: SamplingPlan, fields: Fields, allowed: AllowedTokens | None
    ) -> None:
        """In place on the rows of `fields` (`SamplingPlan.adjusted`; with `allowed` also `masks`), and their largest
        logits."""
        ...

    def choose(self, logits: Tensor, tokens: Tensor, plan: SamplingPlan, fields: Fields) -> None:
        """Draws of the rows of `fields` (`SamplingPlan.sampled`), whose largest logits are in `tokens`."""
        ...

    def log_probabilities(self, raw: Tensor, rows: Tensor, places: Tensor, tokens: Tensor, num_top: int) -> Tensor:
        """As in `logprobs`, fp32 [step rows, 1 + 2 * num_top]: for the rows `places`, which are `rows` of `raw`."""
        ...

    def write_live(self, tokens: Tensor, places: Tensor, live: Tensor) -> None:
        """Tokens to their `places` in the live column."""
        ...


def row_draws(tables: DrawTables, device: torch.device) -> RowDraws:
    """What the device has."""
    kernels = sampling_kernels(device)
    return TorchDraws(tables) if kernels is None else KernelDraws(tables, kernels)


class TorchDraws:
    """See the module docstring. Without a host read on an accelerator, but sorting whole vocabularies there."""

    capturable = False

    def __init__(self, tables: DrawTables) -> None:
        self._tables = tables

    def largest(self, logits: Tensor, tokens: Tensor) -> None:
        ops.greedy(logits, out=tokens)
        # The largest logit is NaN if any is, and infinite if any is +inf or all are -inf.
        finite = logits.gather(1, tokens.long()[:, None]).squeeze(1).abs_() < torch.inf
        tokens.masked_fill_(~finite, FAILED_TOKEN)

    def adjust(
        self, logits: Tensor, tokens: Tensor, plan: SamplingPlan, fields: Fields, allowed: AllowedTokens | None
    ) -> None:
        rows, tables = fields["rows"], self._tables
        takes_all = rows.shape[0] == logits.shape[0]
        changed = logits if takes_all else logits[rows]
        if allowed is not None:
            forbidden = to_device(forbidden_tokens(allowed.bits, logits.shape[1]), logits.device)
            if allowed.rows.size < changed.shape[0]:
                masks = fields["masks"]
                forbidden = forbidden[masks.clamp(min=0)] & (masks >= 0)[:, None]
            changed.masked_fill_(forbidden, -torch.inf)
        if plan.has_counts:
            params = tables.params[fields["handles"]]
            repetition = params[:, column.REPETITION, None]
            presence, frequency = params[:, column.PRESENCE, None], params[:, column.FREQUENCY, None]
            tables.counts.penalize(changed, fields["counts"], repetition, presence, frequency)
        if plan.has_biases:
            tables.biases.add(changed, fields["biases"], fields["floor"])
        if not takes_all:
            logits.index_copy_(0, rows, changed)
        largest = torch.empty_like(rows, dtype=torch.int32)
        self.largest(changed, largest)
        _replace(tokens, rows, largest)

    def choose(self, logits: Tensor, tokens: Tensor, plan: SamplingPlan, fields: Fields) -> None:
        rows, params = fields["rows"], self._tables.params[fields["handles"]]
        choice = ChoiceParams(
            temperature=params[:, column.TEMPERATURE, None],
            top_k=params[:, column.TOP_K, None],
            top_p=params[:, column.TOP_P, None],
            min_p=params[:, column.MIN_P, None],
            uniform=fields["uniform"][:, None],
        )
        few = logits if plan.sampled.size == logits.shape[0] else logits[rows]
        _replace(tokens, rows, choose_tokens(few, choice, plan.num_candidates, needs_mass=plan.needs_mass).int())

    def log_probabilities(self, raw: Tensor, rows: Tensor, places: Tensor, tokens: Tensor, num_top: int) -> Tensor:
        columns = log_probabilities(raw[rows], tokens[places].long().clamp_(min=0), num_top)
        return columns.new_zeros((tokens.shape[0], columns.shape[1])).index_copy_(0, places, columns)

    def write_live(self, tokens: Tensor, places: Tensor, live: Tensor) -> None:
        live.index_copy_(0, places, tokens.long().clamp_(min=0))


class KernelDraws:
    """See the module docstring. No host read, no sort."""

    capturable = True

    def __init__(self, tables: DrawTables, kernels: SamplingKernels) -> None:
        self._tables = tables
        self._kernels = kernels

    def largest(self, logits: Tensor, tokens: Tensor) -> None:
        self._kernels.largest_tokens(logits, tokens)

    def adjust(
        self, logits: Tensor, tokens: Tensor, plan: SamplingPlan, fields: Fields, allowed: AllowedTokens | None
    ) -> None:
        rows, (params, counts, biases) = fields["rows"], self._tables
        bits = None
        if allowed is not None:
            bits = torch.from_numpy(allowed.bits)
            bits = (bits.pin_memory() if logits.is_cuda else bits).to(logits.device, non_blocking=True)
        if bits is not None or plan.has_counts:
            output, prompt = (counts.output, counts.prompt) if plan.has_counts else (None, None)
            self._kernels.mask_and_penalize(
                logits, rows, fields["handles"], params, fields.get("masks"), bits, fields["counts"], output, prompt
            )
        if plan.has_biases:
            self._kernels.add_biases(
                logits, rows, fields["biases"], biases.ids, biases.values, biases.floor_ids, fields["floor"]
            )
        self._kernels.largest_tokens(logits, tokens, rows)

    def choose(self, logits: Tensor, tokens: Tensor, plan: SamplingPlan, fields: Fields) -> None:
        self._kernels.draw_tokens(
            logits, tokens, fields["rows"], fields["handles"], fields["uniform"], self._tables.params, cuts=plan.cuts
        )

    def log_probabilities(self, raw: Tensor, rows: Tensor, places: Tensor, tokens: Tensor, num_top: int) -> Tensor:
        num_top = min(num_top, raw.shape[1])
        out = raw.new_zeros((tokens.shape[0], 1 + 2 * num_top))
        self._kernels.log_probabilities(raw, rows, places, tokens, num_top, out)
        return out

    def write_live(self, tokens: Tensor, places: Tensor, live: Tensor) -> None:
        self._kernels.write_live(tokens, places, live)


def _replace(tokens: Tensor, rows: Tensor, chosen: Tensor) -> None:
    """Other tokens for `rows`; a row that has failed stays so."""
    tokens.index_copy_(0, rows, torch.where(tokens[rows] < 0, tokens[rows], chosen))
