"""xgrammar's native core, without the rest of the package, which imports torch and transformers.

The core is what the package's own classes call, argument by argument. Any process, any thread; loaded once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGE = "xgrammar"
RAW, BYTE_FALLBACK, BYTE_LEVEL = range(3)
"""How a vocabulary is written; see `xgrammar.VocabType`."""


@cache
def load_core() -> Any:
    """The module of native classes."""
    with _without_its_own_code():
        # Not before: a process that meets no grammar loads nothing of it.
        from xgrammar import load_binding  # noqa: F401, PLC0415
        from xgrammar.tvm_ffi_binding import _ffi_api as core  # noqa: PLC0415
    return core


@contextmanager
def _without_its_own_code() -> Iterator[None]:
    """Parts of the package can be imported without the package; whoever wants that later gets it."""
    spec = None if PACKAGE in sys.modules else find_spec(PACKAGE)
    if spec is None:
        yield
        return
    package = ModuleType(PACKAGE)
    package.__path__ = list(spec.submodule_search_locations or ())
    sys.modules[PACKAGE] = package
    try:
        yield
    finally:
        del sys.modules[PACKAGE]
