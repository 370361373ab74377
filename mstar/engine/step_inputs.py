"""Tensor inputs of a step: found in the store on the loop thread, assembled on the executor when they are read.

The store belongs to the loop thread, so `find_inputs` takes views out of it as the step is planned; stacking is device
work and waits until then. A node that reads only its tokens costs nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from mstar.communication.tensor_store import TensorStore
from mstar.engine.execution import StepPart
from mstar.graph.protocol import LIVE_COLUMN, NO_TENSOR, TakenRows

T = TypeVar("T")
Shape = tuple[int, ...]
Row = Tensor | list[Tensor] | None


@dataclass(frozen=True, slots=True)
class RowsInput:
    """One input over the rows of a step. `stacked`: all rows in one view. Otherwise `rows[i]` is row i's tensor,
    tensors still to be stacked into it, or None (absent); `live[i]` says that its value is the live column. `listed`:
    each row has a list of values (a stream chunk), so the first dimension is the row's own."""

    stacked: Tensor | None
    rows: Sequence[Row]
    live: Sequence[bool]
    listed: bool = False

    @property
    def uniform(self) -> bool:
        """Every row has one tensor of the same shape, or every row is live."""
        if self.listed:
            return False
        if self.stacked is not None or all(self.live):
            return True
        if any(self.live) or not all(isinstance(row, Tensor) for row in self.rows):
            return False
        return len({row.shape for row in self.rows if isinstance(row, Tensor)}) == 1

    @property
    def is_live(self) -> bool:
        """No row has a tensor: its value is the live column, or absent."""
        return self.stacked is None and not self.listed and all(row is None for row in self.rows)

    def narrow(self, rows: slice) -> RowsInput:
        """The input of some of the rows, which may be uniform although all of them are not."""
        if self.stacked is not None:
            return RowsInput(self.stacked[rows], (), (), self.listed)
        return RowsInput(None, self.rows[rows], self.live[rows], self.listed)

    def row_kind(self) -> tuple[torch.Size, torch.dtype]:
        """Row shape and dtype of a uniform input."""
        if self.stacked is not None:
            return self.stacked.shape[1:], self.stacked.dtype
        first = self.rows[0]
        return (first.shape, first.dtype) if isinstance(first, Tensor) else (torch.Size(()), torch.int64)

    def shapes(self, num_rows: int) -> list[Shape | None]:
        """Shape of each row's value, None where it is absent."""
        if self.stacked is not None:
            return [tuple(self.stacked.shape[1:])] * num_rows
        return [() if live else _shape(row) for row, live in zip(self.rows, self.live, strict=True)]


Found = Mapping[str, RowsInput]


def find_inputs(parts: Sequence[StepPart], store: TensorStore, restoring: np.ndarray | None = None) -> Found:
    """The inputs of all rows of a step, by name. `restoring` bool [rows of the step]: rows that read none now. Loop
    thread."""
    if restoring is not None:
        parts = [
            part._replace(taken=_without_inputs(part.taken, restoring[part.begin : part.end].tolist()))
            for part in parts
        ]
    if len(parts) == 1:
        taken = parts[0].taken
        found = {name: _single(ids, store) for name, ids in taken.ids.items()}
        found.update((name, _lists(lists, store)) for name, lists in taken.lists.items())
        return {name: value for name, value in found.items() if value is not None}
    pieces = [(part, find_inputs((part,), store)) for part in parts]
    names = dict.fromkeys(name for _, found in pieces for name in found)
    joined: dict[str, RowsInput] = {}
    for name in names:
        rows: list[Row] = []
        live: list[bool] = []
        for part, found in pieces:
            num_rows = part.end - part.begin
            piece = found.get(name)
            if piece is None:
                rows += [None] * num_rows
                live += [False] * num_rows
            else:
                rows += list(piece.stacked.unbind()) if piece.stacked is not None else piece.rows
                live += piece.live if piece.stacked is None else [False] * num_rows
        joined[name] = RowsInput(None, rows, live, any(name in part.taken.lists for part, _ in pieces))
    return joined


def row_shapes(found: Found, num_rows: int) -> list[dict[str, Shape]]:
    """What `can_batch` decides on: shapes by input name, one mapping per row; absent inputs are left out."""
    columns = {name: value.shapes(num_rows) for name, value in found.items()}
    return [
        {name: shape for name, column in columns.items() if (shape := column[row]) is not None}
        for row in range(num_rows)
    ]


def stacked_inputs(found: Found, live: Callable[[], Tensor]) -> Lazy[Tensor]:
    """`EngineInputs.tensors`. `live` gives the rows' live tokens, int64 [rows]."""

    def make(value: RowsInput) -> Callable[[], Tensor]:
        if (stacked := value.stacked) is not None:
            return lambda: stacked
        if value.live[0]:
            return live
        return lambda: torch.stack([row for row in value.rows if isinstance(row, Tensor)])

    return Lazy({name: make(value) for name, value in found.items() if value.uniform})


def ragged_inputs(found: Found, live: Callable[[], Tensor]) -> Lazy[Sequence[Tensor]]:
    """`EngineInputs.ragged`."""

    def make(value: RowsInput) -> Callable[[], Sequence[Tensor]]:
        return lambda: [
            live()[index] if is_live else _tensor(row)
            for index, (row, is_live) in enumerate(zip(value.rows, value.live, strict=True))
        ]

    return Lazy({name: make(value) for name, value in found.items() if not value.uniform})


class Lazy(Mapping[str, T], Generic[T]):
    """Values by name, made once when first read."""

    def __init__(self, makers: Mapping[str, Callable[[], T]]) -> None:
        self._makers = makers
        self._made: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _without_inputs(taken: TakenRows, hidden: Sequence[bool]) -> TakenRows:
    """`taken` as if the hidden rows had no inputs."""
    if all(hidden):
        return taken._replace(ids={}, lists={})
    ids = {
        name: [NO_TENSOR if hide else value for value, hide in zip(column, hidden, strict=True)]
        for name, column in taken.ids.items()
    }
    lists = {
        name: [() if hide else values for values, hide in zip(column, hidden, strict=True)]
        for name, column in taken.lists.items()
    }
    return taken._replace(ids=ids, lists=lists)


def _single(ids: Sequence[int], store: TensorStore) -> RowsInput | None:
    """An input with one value per row; None when no row has it."""
    if ids.count(LIVE_COLUMN) == len(ids):
        return RowsInput(None, [None] * len(ids), [True] * len(ids))
    present = [value for value in ids if value > 0]
    if not present:
        return None
    if len(present) == len(ids):
        view = store.run(ids)
        if view is not None:
            return RowsInput(view, (), ())
    tensors = iter(store.gather_list(present))
    return RowsInput(
        None, [next(tensors) if value > 0 else None for value in ids], [value == LIVE_COLUMN for value in ids]
    )


def _lists(lists: Sequence[Sequence[int]], store: TensorStore) -> RowsInput:
    """An input with a list of values per row."""
    rows: list[Row] = []
    for ids in lists:
        present = [value for value in ids if value != NO_TENSOR]
        view = store.run(present) if present else None
        rows.append(store.gather_list(present) if view is None else view)
    return RowsInput(None, rows, [False] * len(lists), listed=True)


def _tensor(row: Row) -> Tensor:
    if isinstance(row, Tensor):
        return row
    return torch.stack(row) if row else torch.empty(0)


def _shape(row: Row) -> Shape | None:
    if row is None:
        return None
    return tuple(row.shape) if isinstance(row, Tensor) else (len(row), *(row[0].shape if row else ()))
