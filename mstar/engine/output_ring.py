"""`OutputRing`: host copies of what a step made, safe to read while later steps run.

Three slots per node, used in turn. Written on the executor as the last operation of a step; read by the loop thread
after the step's event. A slot is valid until two more steps of the node have been submitted; in a debug run it is
poisoned at that moment, so that a late reader sees nonsense instead of luck.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NUM_SLOTS = 3


class OutputSlot:
    """Host buffers of one step, by name; they grow to the largest step."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def copy(self, name: str, value: Tensor) -> np.ndarray:
        """Copy `value [rows, ...]`; a view of the copy. bf16 arrives as fp32: numpy has no bf16."""
        dtype = torch.float32 if value.dtype in (torch.bfloat16, torch.float16) else value.dtype
        buffer = self._buffers.get(name)
        if buffer is None or buffer.dtype != dtype or buffer.shape[1:] != value.shape[1:] or len(buffer) < len(value):
            rows = max(len(value), 0 if buffer is None else len(buffer))
            buffer = torch.empty((rows, *value.shape[1:]), dtype=dtype, pin_memory=self._pinned)
            self._buffers[name] = buffer
        target = buffer[: len(value)]
        target.copy_(value, non_blocking=True)
        return target.numpy()

    def poison(self) -> None:
        for buffer in self._buffers.values():
            poison_tensor(buffer)


class OutputRing:
    """See the module docstring. `begin` on the loop thread at submit."""

    def __init__(self, device: torch.device, *, poison: bool) -> None:
        self._slots = [OutputSlot(pinned=device.type == "cuda") for _ in range(NUM_SLOTS)]
        self._next = 0
        self._poison = poison

    def begin(self) -> OutputSlot:
        """The slot of the step being submitted. The step before the last one loses its slot from now on."""
        slot = self._slots[self._next]
        if self._poison:
            self._slots[(self._next - 2) % NUM_SLOTS].poison()
        self._next = (self._next + 1) % NUM_SLOTS
        return slot


def poison_tensor(tensor: Tensor) -> None:
    """Overwrite a buffer that nobody may read any more."""
    with torch.inference_mode():
        _poison(tensor)


def _poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min + 7)
