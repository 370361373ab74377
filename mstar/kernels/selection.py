"""Which kernels this process runs: the compiled ones of the CPU, or plain torch. And recording them. CUDA tensors have
kernels of their own wherever torch comes with Triton.

`select_kernels` runs once where a worker starts, before the model loads, because weights are packed for one kind; the
rest runs on the thread of the forward. Must not know what the operations compute.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from mstar import envs
from mstar.kernels.cpu import build
from mstar.kernels.cpu.library import Library
from mstar.kernels.cpu.native import NativeKernels
from mstar.kernels.tape import RecordError, Tape

if TYPE_CHECKING:
    from mstar.kernels.triton.kernels import TritonKernels

T = TypeVar("T")

logger = logging.getLogger(__name__)

_native: NativeKernels | None = None
_selected: str | None = None
_COMPILED = frozenset({torch.bfloat16, torch.float32})


def select_kernels(choice: str | None = None) -> str:
    """Choose the kernels of this process and return the kind in use, ``native`` or ``torch``.

    ``auto`` compiles the CPU kernels if it can and falls back to torch with one log line; ``native`` raises
    `BuildError` instead of falling back. Without a choice the environment's (`mstar.envs.CPU_KERNELS`) holds.
    Weights packed before a change of kind keep working with the kind they were packed for.
    """
    choice = choice or envs.CPU_KERNELS.get()
    if choice not in ("auto", "native", "torch"):
        raise ValueError(f"kernels must be auto, native or torch, not {choice!r}")
    native = None
    if choice != "torch":
        try:
            native = NativeKernels(Library(build.load_or_build(envs.CACHE_DIR.get())))
        except (build.BuildError, OSError) as error:
            if choice == "native":
                raise
            logger.warning("CPU kernels fall back to torch, several times slower: %s", error)
    return use_kernels(native)


def use_kernels(native: NativeKernels | None) -> str:
    """Make these kernels, or without them torch, the process's; returns the kind. `select_kernels` chooses them."""
    global _native, _selected
    _native, _selected = native, "torch" if native is None else "native"
    return _selected


def record(forward: Callable[[], T]) -> tuple[Tape, T]:
    """Run ``forward`` once and return its operations as a `Tape`, with what it returned.

    ``tape.replay()`` then repeats them without the forward's Python, into the same returned tensors. Stretches of
    operations of this package cost one call; any other torch operation costs what it costs eagerly. Cheap: one run.

    Raises:
        RecordError: the forward read values of tensors in Python, or the process runs the torch kernels.
    """
    if _native is None:
        raise RecordError("the torch kernels cannot be recorded")
    return _native.library.record(forward)


def compiled() -> NativeKernels | None:
    """The compiled kernels, if this process runs them."""
    return _native


def compiled_for(x: Tensor) -> NativeKernels | None:
    """The compiled kernels, if they serve tensors like ``x``."""
    return _native if _native is not None and x.is_cpu and x.dtype in _COMPILED else None


def kernels_for(x: Tensor) -> NativeKernels | TritonKernels | None:
    """The kernels that serve tensors like ``x``, if any do."""
    if x.is_cuda:
        return triton_kernels() if x.dtype in _COMPILED else None
    return compiled_for(x)


@cache
def triton_kernels() -> TritonKernels | None:
    """The kernels of CUDA tensors, loaded when the first one asks."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("Triton is not installed: CUDA tensors fall back to torch, several times slower")
        return None
    from mstar.kernels.triton.kernels import TritonKernels  # noqa: PLC0415 - builds of torch for CPUs have no Triton

    return TritonKernels()


def compiled_to_pack() -> NativeKernels | None:
    """The kernels that weights are packed for; chooses them if nobody has."""
    if _selected is None:
        select_kernels()
    return _native


def refuse_recording(operation: str) -> None:
    """Raise while a forward is recorded: called where a reference that reads values in Python would run."""
    if _native is not None and _native.library.is_recording:
        raise RecordError(f"{operation} has no compiled kernel for these tensors")
