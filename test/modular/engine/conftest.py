"""Kernels that engine tests run with: plain torch, unless a test asks for the compiled ones."""

import shutil
from collections.abc import Iterator

import pytest

from mstar.kernels import ops


@pytest.fixture(autouse=True)
def _torch_kernels() -> Iterator[None]:
    ops.use_kernels(None)
    yield
    ops.use_kernels(None)


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest, _torch_kernels: None) -> str:
    """Both kinds: with the compiled kernels a captured walk is a tape."""
    if request.param == "native":
        if not any(map(shutil.which, ("g++", "c++", "clang++"))):
            pytest.skip("no C++ compiler: only the torch kernels run here")
        ops.select_kernels("native")
    return request.param
