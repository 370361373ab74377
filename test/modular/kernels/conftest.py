"""The kinds of kernels that the tests of this folder run with."""

import platform
import shutil
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from mstar import envs
from mstar.kernels import ops
from mstar.kernels.cpu import build
from mstar.kernels.cpu.library import Library
from mstar.kernels.cpu.native import NativeKernels

# The lowest common instruction set, where bf16 products and transposes take the paths without instructions for them.
PORTABLE = ("-march=x86-64",) if platform.machine() == "x86_64" else ()


@cache
def _compiled(target: tuple[str, ...] | None) -> NativeKernels:
    return NativeKernels(Library(build.load_or_build(envs.CACHE_DIR.get(), target)))


def _install(kind: str) -> None:
    if kind == "torch":
        ops.use_kernels(None)
        return
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler: only the torch kernels run here")
    ops.use_kernels(_compiled(PORTABLE if kind == "portable" else None))


@pytest.fixture(params=["native", "portable", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kind of kernels in turn."""
    _install(request.param)
    yield request.param
    ops.use_kernels(None)


@pytest.fixture(params=["native", "portable"])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """The compiled kernels, for what only they promise."""
    _install(request.param)
    yield request.param
    ops.use_kernels(None)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)
