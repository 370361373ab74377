"""What changes logits before a draw: allowed tokens, penalties for repetition, presence and frequency, bias, the floor
under the length.

Host bookkeeping (which request owns which row of which table) runs on the loop thread; tables live on the device and
are written and read on the executor in step order, so counts are right while the loop plans ahead. Tables exist only
once a request needs them, and grow by doubling. Row 0 of each belongs to nobody.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mstar.engine.host_columns import to_device


class TableRows:
    """Rows of a table, by handle: 0 for a handle without one. Freed rows are used again first."""

    def __init__(self, num_handles: int) -> None:
        self.of = np.zeros(num_handles, np.int64)
        self._free: list[int] = []
        self.num_rows = 1

    def take(self, handle: int) -> int:
        row = self._free.pop() if self._free else self.num_rows
        self.num_rows = max(self.num_rows, row + 1)
        self.of[handle] = row
        return row

    def release(self, handle: int) -> None:
        if self.of[handle]:
            self._free.append(int(self.of[handle]))
            self.of[handle] = 0


def table_rows(num_requests: int) -> int:
    """Rows of a table that has grown to so many requests: a power of two, beside row 0, which is nobody's."""
    return 1 + max(8, 1 << (num_requests - 1).bit_length())


def count_row_bytes(vocab_size: int) -> int:
    """Of a row of `TokenCounts`, which a request with penalties has."""
    return vocab_size * (torch.int32.itemsize + torch.bool.itemsize)


class TokenCounts:
    """How often each token occurred: `output` int32 [rows, vocab] counts drawn tokens, `prompt` bool [rows, vocab]."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.output = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def reset(self, row: int, prompt_ids: np.ndarray) -> None:
        """A request takes `row`; `prompt_ids` int64, inside the vocabulary."""
        if row >= self.output.shape[0]:
            # Memory may run out in between: then the tables stay as they are, of one length.
            output, prompt = _grown(self.output, row), _grown(self.prompt, row)
            self.output, self.prompt = output, prompt
        self.output[row] = 0
        self.prompt[row] = False
        if prompt_ids.size:
            self.prompt[row].index_fill_(0, to_device(prompt_ids, self.prompt.device), True)

    def penalize(self, logits: Tensor, rows: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> None:
        """In place on `logits` fp32 `[n, vocab]`; penalties fp32 `[n, 1]`, `rows` int64 `[n]`.

        Repetition (Keskar et al. 2019, CTRL) looks at prompt and output: it divides positive logits and multiplies
        negative ones. Presence and frequency look at the output only and are subtracted, once and per occurrence.
        """
        counts = self.output[rows]
        occurred = counts > 0
        seen = occurred | self.prompt[rows]
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        torch.where(seen, scaled, logits, out=logits)
        logits -= frequency * counts
        logits -= presence * occurred

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """One more occurrence of `tokens[i]` int64 in each of `rows` (distinct; or 0, which stays as it is)."""
        self.output[rows, tokens] += rows > 0

    @property
    def num_bytes(self) -> int:
        return self.output.nbytes + self.prompt.nbytes


def forbidden_tokens(bits: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool `[n, vocab]`, true for tokens whose bit in `AllowedTokens.bits` int32 `[n, words]` is not set. Host."""
    octets = np.ascontiguousarray(bits).view(np.uint8)
    return np.unpackbits(~octets, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


class TokenBiases:
    """Per row a list of (token, value) added to the logits, and a list of tokens masked below a number of draws.

    `ids` and `floor_ids` int64, `values` fp32, `[rows, width]`. Lists are padded with entries that change nothing
    (value 0; the list's own first token)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.ids = torch.zeros((0, 1), dtype=torch.int64, device=device)
        self.values = torch.zeros((0, 1), dtype=torch.float32, device=device)
        self.floor_ids = torch.zeros((0, 1), dtype=torch.int64, device=device)

    def reset(self, row: int, ids: np.ndarray, values: np.ndarray, floor_ids: np.ndarray) -> None:
        """A request takes `row`. `floor_ids`: tokens that `add` masks while the row is under its floor."""
        if row >= self.ids.shape[0] or ids.size > self.ids.shape[1] or floor_ids.size > self.floor_ids.shape[1]:
            grown_ids, grown_values = _grown(self.ids, row, ids.size), _grown(self.values, row, ids.size)
            grown_floor = _grown(self.floor_ids, row, floor_ids.size)
            # Zeros would mask token 0 of the rows that are here.
            grown_floor[:, self.floor_ids.shape[1] :] = grown_floor[:, :1]
            self.ids, self.values, self.floor_ids = grown_ids, grown_values, grown_floor
        self.ids[row] = 0
        self.values[row] = 0.0
        self.ids[row, : ids.size] = to_device(ids, self._device)
        self.values[row, : ids.size] = to_device(values, self._device)
        self.floor_ids[row] = int(floor_ids[0]) if floor_ids.size else 0
        self.floor_ids[row, : floor_ids.size] = to_device(floor_ids, self._device)

    def add(self, logits: Tensor, rows: Tensor, floor: Tensor) -> None:
        """In place on `logits` fp32 `[n, vocab]`. `floor` fp32 `[n]`: -inf for rows under their floor, else 0."""
        logits.scatter_add_(1, self.ids[rows], self.values[rows])
        masked = self.floor_ids[rows]
        logits.scatter_add_(1, masked, floor[:, None].expand_as(masked))

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.values.nbytes + self.floor_ids.nbytes


def _grown(table: Tensor, row: int, width: int = 0) -> Tensor:
    """`table` with room for `row` and for `width` columns, contents kept, the rest zero."""
    rows, columns = table.shape
    num_rows = rows if row < rows else table_rows(row)
    num_columns = columns if width <= columns else max(width, 2 * columns)
    grown = torch.zeros((num_rows, num_columns), dtype=table.dtype, device=table.device)
    grown[:rows, :columns] = table
    return grown
