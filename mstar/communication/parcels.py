"""What one step sends to one peer, and the layout of its tensors in an arena. Loop thread of a worker.

A parcel holds views of stored tensors until they have been copied into the arena; the references in the store are the
transport's to give back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.communication.arena import Reservation, aligned
from mstar.communication.messages import TensorColumns
from mstar.communication.tensor_bytes import as_bytes, dtype_name, dtype_named, of_bytes
from mstar.communication.tensor_store import TensorStore
from mstar.graph.protocol import NO_TENSOR

_STACKED_BYTES = 32 << 10
"""Below this a run of separate tensors is stacked first: one call instead of one per tensor, and torch uses no threads
for so few elements. The loop thread must not run what torch would spread over threads."""
_ABSENT = ""
NO_COLUMNS = TensorColumns("", 0, 0, [], [], [])


class FrameError(ValueError):
    """Columns of a frame contradict each other."""


class Run(NamedTuple):
    """Tensors of equal dtype and shape that lie one after the other: `[num_tensors, *shape]`, or a list."""

    tensors: Tensor | list[Tensor]
    dtype: str
    shape: tuple[int, ...]
    num_tensors: int
    num_bytes: int


@dataclass(slots=True)
class Values:
    """Parallel columns of values for one peer: value i belongs to request `rids[i]` and consists of `counts[i]`
    tensors. `places` are slots (edges) or streams, `tags` the walks that shall consume stream items (no edges)."""

    rids: list[str]
    places: list[int]
    tags: list[int]
    counts: list[int]
    ids: list[int]
    runs: list[Run] = field(default_factory=list)
    num_bytes: int = 0

    def lay_out(self, store: TensorStore) -> None:
        """Looks the tensors up and fixes their order in the arena."""
        self.runs = _runs(np.asarray(self.ids, np.int64), store)
        self.num_bytes = sum(aligned(run.num_bytes) for run in self.runs)

    def stored_ids(self) -> list[int]:
        return [tensor_id for tensor_id in self.ids if tensor_id != NO_TENSOR]

    def halves(self) -> tuple[Values, Values]:
        """The first and the second half of the values, not laid out. At least two values."""
        middle = len(self.rids) // 2
        cut = sum(self.counts[:middle])
        return (
            self._part(slice(None, middle), slice(None, cut)),
            self._part(slice(middle, None), slice(cut, None)),
        )

    def _part(self, rows: slice, ids: slice) -> Values:
        return Values(self.rids[rows], self.places[rows], self.tags[rows], self.counts[rows], self.ids[ids])

    def write(self, reservation: Reservation | None) -> TensorColumns:
        """Copies the tensors into the arena; None where they take no bytes."""
        if reservation is not None:
            offset = 0
            for run in self.runs:
                _copy(run, reservation.data[offset : offset + run.num_bytes])
                offset += aligned(run.num_bytes)
        return TensorColumns(
            arena="" if reservation is None else reservation.segment,
            ticket=0 if reservation is None else reservation.ticket,
            offset=0 if reservation is None else reservation.offset,
            dtypes=[run.dtype for run in self.runs],
            shapes=[run.shape for run in self.runs],
            counts=[run.num_tensors for run in self.runs],
        )


@dataclass(slots=True)
class Parcel:
    """What one multipart message to a peer carries, beside acknowledgements."""

    peer: int
    edges: Values | None = None
    items: Values | None = None
    end_rids: list[str] = field(default_factory=list)
    end_edges: list[int] = field(default_factory=list)
    end_totals: list[int] = field(default_factory=list)

    def values(self) -> list[Values]:
        return [values for values in (self.edges, self.items) if values is not None]


class Layout(NamedTuple):
    """Runs of a frame as the receiver sees them; `num_bytes` in the arena."""

    dtypes: list[torch.dtype | None]
    num_tensors: int
    num_bytes: int


def layout_of(columns: TensorColumns) -> Layout:
    """
    Raises:
        FrameError: columns of unequal length, an unknown dtype, or a size that is none.
    """
    if not len(columns.dtypes) == len(columns.shapes) == len(columns.counts):
        raise FrameError("columns of tensors have unequal lengths")
    num_bytes = 0
    dtypes: list[torch.dtype | None] = []
    for name, shape, count in zip(columns.dtypes, columns.shapes, columns.counts, strict=True):
        if count < 0 or min(shape, default=0) < 0:
            raise FrameError(f"{count} tensors of shape {shape}")
        if name == _ABSENT:
            dtypes.append(None)
            continue
        try:
            dtype = dtype_named(name)
        except ValueError as error:
            raise FrameError(str(error)) from error
        dtypes.append(dtype)
        num_bytes += aligned(count * math.prod(shape) * dtype.itemsize)
    return Layout(dtypes, sum(columns.counts), num_bytes)


def put(columns: TensorColumns, layout: Layout, raw: Tensor, store: TensorStore) -> list[int]:
    """Stores the tensors that lie in uint8 `raw` like in the arena, which stays their memory; returns their ids."""
    ids: list[int] = []
    offset = 0
    for dtype, shape, count in zip(layout.dtypes, columns.shapes, columns.counts, strict=True):
        if dtype is None:
            ids += [NO_TENSOR] * count
            continue
        num_bytes = count * math.prod(shape) * dtype.itemsize
        ids += store.put_batch(of_bytes(raw[offset : offset + num_bytes], dtype, (count, *shape))).tolist()
        offset += aligned(num_bytes)
    return ids


def _runs(ids: np.ndarray, store: TensorStore) -> list[Run]:
    if not ids.size:
        return []
    present = ids != NO_TENSOR
    if present.all():
        whole = store.run(ids)
        if whole is not None:
            return [Run(whole, dtype_name(whole.dtype), tuple(whole.shape[1:]), whole.shape[0], whole.nbytes)]
    tensors = iter(store.gather_list(ids[present]))
    rows: Sequence[Tensor | None] = [next(tensors) if there else None for there in present.tolist()]
    runs = []
    for kind, group in groupby(rows, lambda tensor: None if tensor is None else (tensor.dtype, tensor.shape)):
        members = list(group)
        if kind is None:
            runs.append(Run([], _ABSENT, (), len(members), 0))
        else:
            equal: list[Tensor] = members  # pyright: ignore[reportAssignmentType]
            num_bytes = len(equal) * equal[0].nbytes
            runs.append(Run(equal, dtype_name(kind[0]), tuple(kind[1]), len(equal), num_bytes))
    return runs


def _copy(run: Run, into: np.ndarray) -> None:
    if not run.num_bytes:
        return
    if isinstance(run.tensors, Tensor):
        np.copyto(into, as_bytes(run.tensors))
    elif run.num_bytes <= _STACKED_BYTES:
        np.copyto(into, as_bytes(torch.stack(run.tensors)))
    else:
        size = run.num_bytes // run.num_tensors
        for i, tensor in enumerate(run.tensors):
            np.copyto(into[i * size : (i + 1) * size], as_bytes(tensor))
