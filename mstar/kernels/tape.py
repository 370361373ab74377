"""`Tape`: a forward's operations, recorded once and then run without the Python that chose them.

The CPU's counterpart of a captured CUDA graph, with the same contract: addresses, sizes and branches are those of the
recording, so what the forward reads and writes lies in buffers that stay where they are. Kernels of this package that
follow each other replay as one call that holds no lock of the interpreter, so that the control plane works beside it;
other torch operations replay one by one. Runs on the thread of the forward. Must not hold a request's state.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Program = ctypes.Array[Any]
_LINE = 64  # bytes; every buffer starts on a cache line
_EMPTY = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
_READS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class RecordError(RuntimeError):
    """The forward did something that a tape cannot repeat. The message names it."""


class Tape:
    """Operations in order, plus the memory of the tensors that the recorded forward allocated.

    Tensors that existed before the recording (weights, pages, input buffers) are not kept alive: whoever owns the
    tape keeps them, and the tensors that the forward returned.
    """

    def __init__(self, run: Callable[[Program], None]) -> None:
        self.thread = threading.get_ident()
        self.num_kernels = 0
        self.num_torch_operations = 0
        self.pool = _Pool()
        self._run = run
        self._words = bytearray()
        self._steps: list[Program | Callable[[], None]] = []
        self._sealed = False

    def append_kernel(self, function: int, arguments: bytes) -> None:
        """Add a call of the kernel at address ``function``; ``arguments`` are whole 8-byte words."""
        self._words += struct.pack("qq", function, len(arguments) // 8) + arguments
        self.num_kernels += 1

    def append_torch(self, operation: Callable[[], None]) -> None:
        """Add anything else."""
        self._end_program()
        self._steps.append(operation)
        self.num_torch_operations += 1

    def seal(self) -> None:
        """No more operations."""
        self._end_program()
        self._sealed = True

    def replay(self) -> None:
        """Run everything again, over what the buffers hold now. Raises `IndexError` as the kernels do."""
        if not self._sealed:
            raise RecordError("a tape replays once its recording has ended")
        with torch.inference_mode():
            for step in self._steps:
                if isinstance(step, ctypes.Array):
                    self._run(step)
                else:
                    step()

    def _end_program(self) -> None:
        if self._words:
            words = bytearray(self._words)
            self._steps.append((ctypes.c_int64 * (len(words) // 8)).from_buffer(words))
            self._words.clear()


class Recording(TorchDispatchMode):
    """While active, tensors are allocated from the tape's pool, and torch operations go onto the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and being hidden from the compiler would load it, seconds of imports."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _EMPTY:
            like = func(*args, **{**kwargs, "device": "meta"})
            return self._tape.pool.empty(tuple(like.shape), like.dtype)
        results = func(*args, **kwargs)
        if any(tag in func.tags for tag in _READS_VALUES) and not _index_has_fixed_shape(func, args):
            raise RecordError(f"the shape or value of {func} depends on data, which a tape cannot repeat")
        if not all(isinstance(each, Tensor) for each in _leaves(results)):
            raise RecordError(f"{func} hands values of tensors to Python, which a tape cannot repeat")
        aliases = [r.alias_info for r in func._schema.returns]
        copies = any(alias is None or alias.is_write for alias in aliases) or not aliases
        if copies or not _shares_memory(results, (args, tuple(kwargs.values()))):
            writes = [alias is not None and alias.is_write for alias in aliases]
            fresh = [t for t, written in zip(_leaves(results), writes, strict=False) if not written]
            self._tape.append_torch(lambda: _repeat(func, args, kwargs, fresh))
        return results


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fresh: list[Tensor]) -> None:
    """Run a torch operation again and bring what it makes to where it was made the first time."""
    for kept, result in zip(fresh, _leaves(func(*args, **kwargs)), strict=False):
        kept.copy_(result)


def _shares_memory(results: Any, inputs: Any) -> bool:
    """True for a view. An operation such as `to` or `reshape` may return one or a copy, and only the result tells."""
    owners = {each.untyped_storage().data_ptr() for each in _leaves(inputs) if isinstance(each, Tensor)}
    return all(each.untyped_storage().data_ptr() in owners for each in _leaves(results))


def _index_has_fixed_shape(func: Any, args: tuple[Any, ...]) -> bool:
    """True for `x[index]` with integers only; a mask selects as many entries as it is true."""
    if func._schema.name != "aten::index":
        return False
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in args[1])


def _leaves(results: Any) -> Iterator[Any]:
    if isinstance(results, (tuple, list)):
        for each in results:
            yield from _leaves(each)
    elif results is not None:
        yield results


class _Pool:
    """Buffers for temporaries of a recording. One that no tensor uses any more serves the next allocation: the
    operations replay in the order they were recorded, so that is as safe the second time as the first."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []
        self._free: list[np.ndarray] = []

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor over the smallest free buffer that holds it without much waste, else over a new one."""
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
        weakref.finalize(lease, self._release, buffer).atexit = False
        return torch.from_numpy(lease).view(dtype).view(shape)

    def _release(self, buffer: np.ndarray) -> None:
        self._free.append(buffer)
