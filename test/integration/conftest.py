"""Everything here needs an accelerator."""

from collections.abc import Iterator

import pytest
import torch

from mstar.engine.cuda_executor import CudaEvent, CudaExecutor
from mstar.platforms.executor import Work


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "test/integration" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no accelerator"))


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A step whose launch waits for the device fails."""
    plain = CudaExecutor.submit

    def submit(self: CudaExecutor, work: Work) -> CudaEvent:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self, work)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CudaExecutor, "submit", submit)
    yield
