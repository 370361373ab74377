"""Staging: all host integers of a step in one block, one copy to the device.

A resource declares its fields; `plan` writes numpy views of a host slot on the loop thread; `DeviceBlock.upload` copies
the whole block on the executor and hands out tensors of the same layout. Host slots come from a ring of three, so a
step can be planned while another runs. The device side is always a copy, never a view of host memory that the loop
goes on writing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NUM_SLOTS = 3
_ALIGNMENT = 16
_MAX_CACHED_SHAPES = 128
_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32}


class StepShape(NamedTuple):
    """Padded size of a step: rows, tokens, and pages in the longest row's table."""

    rows: int
    tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class StagingField:
    """One array of the block.

    `per` says what the first dimension counts: rows, tokens, or borders (rows + 1); `width` the second one, if any.
    Rows and tokens past the real ones are filled with `fill`; a border field is written whole by its owner.
    """

    name: str
    dtype: Literal["int32", "int64", "float32"]
    per: Literal["row", "token", "border"]
    fill: float = 0
    width: Callable[[StepShape], int] | None = None

    def shape(self, step: StepShape) -> tuple[int, ...]:
        """Of the field, in a step of this shape."""
        first = {"row": step.rows, "token": step.tokens, "border": step.rows + 1}[self.per]
        return (first,) if self.width is None else (first, self.width(step))


class _Place(NamedTuple):
    field: StagingField
    shape: tuple[int, ...]
    begin: int
    end: int


class StagingLayout(NamedTuple):
    """Where each field lies in the block for one shape, in bytes."""

    shape: StepShape
    places: tuple[_Place, ...]
    num_bytes: int


class LayoutCache:
    """Layouts of one node by shape; decode shapes repeat, prefill shapes pass through."""

    def __init__(self, fields: Sequence[StagingField]) -> None:
        names = [field.name for field in fields]
        if len(set(names)) != len(names):
            raise ValueError(f"staging fields share a name: {sorted(n for n in names if names.count(n) > 1)}")
        self.fields = tuple(fields)
        self._cache: dict[StepShape, StagingLayout] = {}

    def layout(self, shape: StepShape) -> StagingLayout:
        """Of steps of this shape; the same object while it is remembered."""
        found = self._cache.get(shape)
        if found is not None:
            return found
        places: list[_Place] = []
        offset = 0
        for field in self.fields:
            dims = field.shape(shape)
            num_bytes = int(np.prod(dims)) * np.dtype(field.dtype).itemsize
            places.append(_Place(field, dims, offset, offset + num_bytes))
            offset = -(-(offset + num_bytes) // _ALIGNMENT) * _ALIGNMENT
        if len(self._cache) >= _MAX_CACHED_SHAPES:
            self._cache.clear()
        layout = self._cache[shape] = StagingLayout(shape, tuple(places), offset)
        return layout


class _Block:
    """Bytes with cached views per shape."""

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned
        self.data = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: dict[StepShape, dict[str, Any]] = {}

    def _room(self, num_bytes: int) -> None:
        if num_bytes > self.data.numel():
            size = max(num_bytes, 2 * self.data.numel())
            self.data = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
            self._views.clear()
        elif len(self._views) >= _MAX_CACHED_SHAPES:
            self._views.clear()

    def _tensors(self, layout: StagingLayout) -> dict[str, Tensor]:
        return {
            place.field.name: self.data[place.begin : place.end]
            .view(_TORCH_DTYPES[place.field.dtype])
            .view(place.shape)
            for place in layout.places
        }


class StagingSlot(_Block):
    """Host side of one step. Grows to the largest shape it has held."""

    def __init__(self, pinned: bool) -> None:
        super().__init__(torch.device("cpu"), pinned)
        self.in_use = False

    def views(self, layout: StagingLayout) -> dict[str, np.ndarray]:
        """The fields by name, to be written; what an earlier step left is in them."""
        self._room(layout.num_bytes)
        found = self._views.get(layout.shape)
        if found is None:
            found = {name: tensor.numpy() for name, tensor in self._tensors(layout).items()}
            self._views[layout.shape] = found
        return found


class StagingRing:
    """Three host slots; a step holds one from `plan` until it has ended or was abandoned. Loop thread."""

    def __init__(self, device: torch.device) -> None:
        self._slots = [StagingSlot(pinned=device.type == "cuda") for _ in range(NUM_SLOTS)]
        self._next = 0

    @property
    def num_in_use(self) -> int:
        return sum(slot.in_use for slot in self._slots)

    def acquire(self) -> StagingSlot:
        """The slot that was given back longest ago.

        Raises:
            RuntimeError: three steps hold one: the loop plans further ahead than the ring allows.
        """
        for _ in range(NUM_SLOTS):
            slot = self._slots[self._next]
            self._next = (self._next + 1) % NUM_SLOTS
            if not slot.in_use:
                slot.in_use = True
                return slot
        raise RuntimeError(f"{NUM_SLOTS} steps of a node hold a staging slot; finish or abandon one before planning")

    def release(self, slot: StagingSlot) -> None:
        if not slot.in_use:
            raise RuntimeError("a staging slot is given back exactly once")
        slot.in_use = False


class DeviceBlock(_Block):
    """Device side of the block. One serves all eager steps of a node (steps run in order); each captured bucket has its
    own, so that its addresses stay."""

    def upload(self, slot: StagingSlot, layout: StagingLayout) -> dict[str, Tensor]:
        """Copy the step's block; returns the fields as tensors. Valid until the next upload."""
        self._room(layout.num_bytes)
        self.data[: layout.num_bytes].copy_(slot.data[: layout.num_bytes], non_blocking=True)
        found = self._views.get(layout.shape)
        if found is None:
            found = self._views[layout.shape] = self._tensors(layout)
        return found


def fill_padding(layout: StagingLayout, views: Mapping[str, np.ndarray], num_rows: int, num_tokens: int) -> None:
    """Make every row and token past the real ones a sink row."""
    for place in layout.places:
        if place.field.per == "row":
            views[place.field.name][num_rows:] = place.field.fill
        elif place.field.per == "token":
            views[place.field.name][num_tokens:] = place.field.fill


def narrow_staging(
    fields: Sequence[StagingField], staged: Mapping[str, Tensor], rows: slice, tokens: slice
) -> dict[str, Tensor]:
    """The fields of rows `rows` with tokens `tokens` alone; borders are counted from the first token again."""
    narrowed: dict[str, Tensor] = {}
    for field in fields:
        tensor = staged[field.name]
        if field.per == "row":
            narrowed[field.name] = tensor[rows]
        elif field.per == "token":
            narrowed[field.name] = tensor[tokens]
        else:
            narrowed[field.name] = tensor[rows.start : rows.stop + 1] - tokens.start
    return narrowed


class NoDeviceCopies(TorchDispatchMode):
    """Fails any torch operation inside a `plan`: whatever does not go through the staging slot is overwritten while an
    earlier step may still read it. For tests and debug runs."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"resource {self._key!r} ran {func} while planning: stage it, or set force_double_buffer")
