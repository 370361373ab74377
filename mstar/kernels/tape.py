"""`Tape`: a forward's kernel calls, recorded once and then run by one call outside the interpreter.

The CPU's counterpart of a captured CUDA graph, with the same contract: addresses and sizes are those of the recording,
so what the forward reads and writes lies in buffers that stay where they are. Runs on the thread of the forward; the
replay holds no lock of the interpreter, so that the control plane works beside it. Must not hold a request's state.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LINE = 64  # bytes; every buffer starts on a cache line
_EMPTY = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


class RecordError(RuntimeError):
    """The forward did something that a tape cannot repeat. The message names the operation."""


class Tape:
    """Calls in order, plus the memory of the tensors that the recorded forward allocated.

    Tensors that existed before the recording (weights, pages, input buffers) are not kept alive: whoever owns the
    tape keeps them, and the tensors that the forward returned.
    """

    def __init__(self, run: Callable[[ctypes.Array[Any]], None]) -> None:
        self.thread = threading.get_ident()
        self.num_calls = 0
        self.pool = _Pool()
        self._run = run
        self._words = bytearray()
        self._program: ctypes.Array[Any] | None = None

    def append(self, function: int, arguments: bytes) -> None:
        """Add a call of the kernel at address ``function``; ``arguments`` are whole 8-byte words."""
        self._words += struct.pack("qq", function, len(arguments) // 8) + arguments
        self.num_calls += 1

    def seal(self) -> None:
        """No more calls: fix the program in memory."""
        self._program = (ctypes.c_int64 * (len(self._words) // 8)).from_buffer(self._words)

    def replay(self) -> None:
        """Run all calls again, over what the buffers hold now. Raises `IndexError` as the calls do."""
        if self._program is None:
            raise RecordError("a tape replays once its recording has ended")
        self._run(self._program)


class Recording(TorchDispatchMode):
    """While active, tensors are allocated from the tape's pool and anything but views and allocations is an error."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.name in _EMPTY:
            like = func(*args, **{**(kwargs or {}), "device": "meta"})
            return self._tape.pool.empty(tuple(like.shape), like.dtype)
        returns = func._schema.returns
        if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **(kwargs or {}))
        raise RecordError(f"{func} is no kernel of mstar.kernels.ops, and a tape holds only those")


class _Pool:
    """Buffers for temporaries of a recording. One that no tensor uses any more serves the next allocation: the calls
    replay in the order they were recorded, so that is as safe the second time as the first."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []
        self._free: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the smallest free buffer that holds it, else over a new one."""
        wanted = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        fitting = [buffer for buffer in self._free if wanted <= buffer.nbytes <= 2 * wanted + 4096]
        if fitting:
            buffer = min(fitting, key=lambda each: each.nbytes)
            self._free = [each for each in self._free if each is not buffer]
        else:
            raw = np.empty(wanted + _LINE, dtype=np.uint8)
            start = -raw.ctypes.data % _LINE
            buffer = raw[start : start + wanted]
            self._buffers.append(buffer)
        lease = buffer[:wanted]  # dies with the last tensor that shares the memory
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return torch.from_numpy(lease).view(dtype).view(shape)
