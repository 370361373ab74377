"""The shared library of compiled kernels: calling one, recording calls, replaying them.

Runs on the thread of the forward; a call holds no lock of the interpreter. Knows words and addresses, no tensors: what
they mean is `mstar.kernels.cpu.native`.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from mstar.kernels.tape import Program, RecordError, Recording, Tape

T = TypeVar("T")

_FAULTS = {
    1: "a position lies outside the rotary table",
    2: "a slot lies outside the pages",
    3: "a block table names a page that does not exist",
    4: "a row's lengths do not fit its queries or its block table",
    5: "a token id lies outside the vocabulary",
    6: "a slot lies outside the states",
    7: "an expert id lies outside the experts",
}


class Library:
    """One loaded library. Every kernel takes one array of 8-byte words, the first its number of threads."""

    def __init__(self, path: Path) -> None:
        self._lib = ctypes.CDLL(str(path))
        self._replay = self._lib.mstar_replay
        self._replay.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        self._replay.restype = ctypes.c_int
        self.vector_width: int = self._lib.mstar_vector_width()
        self.tape: Tape | None = None

    @property
    def is_recording(self) -> bool:
        """True on the thread whose operations go onto a tape."""
        return self.tape is not None and self.tape.thread == threading.get_ident()

    def call(self, name: str, layout: str) -> Callable[..., None]:
        """The kernel ``name`` as a function of its words, given in the `struct` format ``layout``.

        The function raises `IndexError` when the kernel finds an index or a length out of range.
        """
        kernel = getattr(self._lib, name)
        kernel.argtypes, kernel.restype = [ctypes.c_char_p], ctypes.c_int
        address = ctypes.cast(kernel, ctypes.c_void_p).value or 0
        pack = struct.Struct(layout).pack

        def call(*args: float) -> None:
            words = pack(*args)
            if self.tape is not None and self.is_recording:
                self.tape.append_kernel(address, words)
            if status := kernel(words):
                raise IndexError(_FAULTS[status])

        return call

    def record(self, forward: Callable[[], T]) -> tuple[Tape, T]:
        """Run ``forward`` once and keep its operations. One recording at a time in a process."""
        if self.tape is not None:
            raise RecordError("another recording is under way")
        tape = self.tape = Tape(self.replay)
        try:
            with Recording(tape):
                result = forward()
        finally:
            self.tape = None
        tape.seal()
        return tape, result

    def replay(self, program: Program) -> None:
        """Run a tape's calls with the present number of threads; raises as the calls do."""
        if status := self._replay(ctypes.addressof(program), len(program), torch.get_num_threads()):
            raise IndexError(_FAULTS[status])
