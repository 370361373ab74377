"""The tensors that travel between the nodes of one worker, by id, with reference counts.

Owned by the worker's loop thread; no other thread calls it. Ids are what the graph runtime routes; the counts are its
`TensorBooks`. Rows of one step's output share one backing tensor, so that a step costs a few column operations and a
consumer of the same rows gets a view. The store never copies what it is given: who reuses a buffer copies first.

The life of an id: `put_batch` (no references) → `retain` / `release` → `free`. A tensor whose last reference went stays
readable until `free`, because the frames of the step that released it are built afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

_DEAD: Final = -1
"""Reference count of an id that names no tensor."""

Ids = Sequence[int] | np.ndarray


class StoreError(Exception):
    """An id that names no tensor, a release of what nobody holds, a gather of unequal shapes: a bug of the caller."""


class TensorStore:
    """See the module docstring. Ids are positive (`NO_TENSOR` and `LIVE_COLUMN` never are); those of a batch are
    consecutive and given out again once all of them are free."""

    def __init__(self, num_ids: int = 4096, device: torch.device | None = None) -> None:
        """`num_ids`: room at the start; the columns double when it is used up. `device`: where the tensors are kept;
        those that come from elsewhere (clients, other workers) are copied there. None: where they are."""
        self._device = device
        self._refs = np.full(num_ids, _DEAD, np.int32)
        self._batch_of = np.zeros(num_ids, np.int32)
        self._next_id = 1
        self._free_ranges: list[list[int]] = []
        """`[k]`: first ids of free ranges of length 2**k."""
        self._batches: list[Tensor | None] = []
        self._starts = np.zeros(64, np.int64)
        self._num_in_use = np.zeros(64, np.int64)
        self._free_batches: list[int] = []
        self._num_live = 0
        self._num_bytes = 0

    @property
    def num_live(self) -> int:
        """Ids that name a tensor."""
        return self._num_live

    @property
    def num_bytes(self) -> int:
        """Bytes of the backing tensors. One live row keeps its whole batch."""
        return self._num_bytes

    def put_batch(self, tensor: Tensor) -> np.ndarray:
        """Stores `[rows, ...]`; returns int64 `[rows]`, the id of each row. They start without references."""
        rows = tensor.shape[0]
        if rows == 0:
            return np.empty(0, np.int64)
        if self._device is not None:
            tensor = tensor.to(self._device, non_blocking=True)
        start = self._take_range(rows)
        if self._free_batches:
            batch = self._free_batches.pop()
            self._batches[batch] = tensor
        else:
            batch = len(self._batches)
            self._batches.append(tensor)
            if batch >= len(self._starts):
                self._starts = np.concatenate([self._starts, np.zeros_like(self._starts)])
                self._num_in_use = np.concatenate([self._num_in_use, np.zeros_like(self._num_in_use)])
        self._starts[batch] = start
        self._num_in_use[batch] = rows
        self._refs[start : start + rows] = 0
        self._batch_of[start : start + rows] = batch
        self._num_live += rows
        self._num_bytes += tensor.nbytes
        return np.arange(start, start + rows, dtype=np.int64)

    def put(self, tensor: Tensor) -> int:
        """Stores one tensor of any shape under an id of its own."""
        return int(self.put_batch(tensor.unsqueeze(0))[0])

    def retain(self, ids: Ids) -> None:
        """One more reference each; an id listed twice gets two.

        Raises:
            StoreError: an id names no tensor; nothing has changed.
        """
        np.add.at(self._refs, self._live(ids), 1)

    def release(self, ids: Ids) -> list[int]:
        """One reference less each. Returns the ids that have none left, each once; their tensors stay until `free`.

        Raises:
            StoreError: an id names no tensor or has too few references; nothing has changed.
        """
        live = self._live(ids)
        if not live.size:
            return []
        np.subtract.at(self._refs, live, 1)
        left = self._refs[live]
        if np.minimum.reduce(left) < 0:
            np.add.at(self._refs, live, 1)
            raise StoreError(f"released without a reference: ids {sorted(set(live[left < 0].tolist()))}")
        return list(dict.fromkeys(live[left == 0].tolist()))

    def free(self, ids: Ids) -> int:
        """Forgets those of `ids` that have no reference (others are left alone); returns how many that were.

        Raises:
            StoreError: an id names no tensor; nothing has changed.
        """
        live = self._live(ids)
        gone = live[self._refs[live] == 0]
        if not gone.size:
            return 0
        self._refs[gone] = _DEAD
        if gone.size > 1 and (gone[1:] <= gone[:-1]).any():
            gone = np.unique(gone)
        self._num_live -= gone.size
        batches = self._batch_of[gone]
        if (batches == batches[0]).all():
            batches, counts = batches[:1], gone.size
        else:
            batches, counts = np.unique(batches, return_counts=True)
        self._num_in_use[batches] -= counts
        ended = batches[self._num_in_use[batches] == 0]
        for batch, start in zip(ended.tolist(), self._starts[ended].tolist(), strict=True):
            self._drop_batch(batch, start)
        return gone.size

    def num_references(self, tensor_id: int) -> int:
        return int(self._refs[self._live((tensor_id,))[0]])

    def get(self, tensor_id: int) -> Tensor:
        """The row's tensor, a view.

        Raises:
            StoreError: the id names no tensor.
        """
        return self.gather_list((tensor_id,))[0]

    def gather_list(self, ids: Ids) -> list[Tensor]:
        """The tensor of each id, views of any shapes."""
        live = self._live(ids)
        batches = self._batch_of[live]
        rows = (live - self._starts[batches]).tolist()
        return [self._backing(batch)[row] for batch, row in zip(batches.tolist(), rows, strict=True)]

    def run(self, ids: Ids) -> Tensor | None:
        """`[ids, ...]` as a view where the ids are consecutive rows of one batch in their order, else None."""
        live = self._live(ids)
        cuts = self._cuts(live)
        return self._view(live) if live.size and not cuts.size else None

    def gather(self, ids: Ids) -> Tensor:
        """`[ids, ...]`: a view where the ids are consecutive rows of one batch in their order, a copy otherwise.

        Raises:
            StoreError: no ids, an id that names no tensor, or rows of different shape, dtype or device.
        """
        live = self._live(ids)
        if not live.size:
            raise StoreError("gather of no ids has no shape")
        cuts = self._cuts(live)
        if not cuts.size:
            return self._view(live)
        batches = self._batch_of[live]
        if (batches == batches[0]).all():
            backing = self._backing(int(batches[0]))
            rows = torch.from_numpy(live - self._starts[batches])
            return backing.index_select(0, rows.to(backing.device))
        parts = [self._view(part) for part in np.split(live, cuts)]
        kinds = {(part.dtype, part.shape[1:], part.device) for part in parts}
        if len(kinds) > 1:
            raise StoreError(f"gather of unequal rows: {sorted(map(str, kinds))}")
        return torch.cat(parts)

    def _cuts(self, live: np.ndarray) -> np.ndarray:
        """Positions where a new run of consecutive rows of one batch begins, the first one left out."""
        batches = self._batch_of[live]
        return np.flatnonzero((np.diff(live) != 1) | (np.diff(batches) != 0)) + 1

    def _view(self, run: np.ndarray) -> Tensor:
        batch = int(self._batch_of[run[0]])
        row = int(run[0] - self._starts[batch])
        return self._backing(batch)[row : row + run.size]

    def _backing(self, batch: int) -> Tensor:
        tensor = self._batches[batch]
        assert tensor is not None, "a live id names a batch"
        return tensor

    def _live(self, ids: Ids) -> np.ndarray:
        live = np.asarray(ids, dtype=np.int64)
        if not live.size:
            return live
        # Read as unsigned, a negative id is out of range too; id 0 is never alive.
        if np.maximum.reduce(live.view(np.uint64)) >= len(self._refs) or np.minimum.reduce(self._refs[live]) < 0:
            known = [i for i in live.tolist() if 0 < i < len(self._refs) and self._refs[i] >= 0]
            raise StoreError(f"no such tensor: ids {sorted(set(live.tolist()) - set(known))}")
        return live

    def _take_range(self, rows: int) -> int:
        """First of `rows` consecutive ids. Ranges have a power of two of ids, so that freed ones fit again."""
        size_class = (rows - 1).bit_length()
        while len(self._free_ranges) <= size_class:
            self._free_ranges.append([])
        if self._free_ranges[size_class]:
            return self._free_ranges[size_class].pop()
        start = self._next_id
        self._next_id += 1 << size_class
        while self._next_id > len(self._refs):
            self._refs = np.concatenate([self._refs, np.full_like(self._refs, _DEAD)])
            self._batch_of = np.concatenate([self._batch_of, np.zeros_like(self._batch_of)])
        return start

    def _drop_batch(self, batch: int, start: int) -> None:
        tensor = self._backing(batch)
        self._num_bytes -= tensor.nbytes
        self._free_ranges[(tensor.shape[0] - 1).bit_length()].append(start)
        self._batches[batch] = None
        self._free_batches.append(batch)
