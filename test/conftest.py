"""Settings every test shares. Thread counts are pinned before torch can be imported, here and for child processes:
the suite has to behave on two cores as it does on sixty-four."""

import logging
import os
import sys
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that would download has to say so
if not Path("/dev/nvidiactl").exists():  # before Triton is imported: without a device its kernels are interpreted
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

# The clock of a shared machine decides nothing: examples are bounded by count, a hang by the test's timeout.
settings.register_profile("quick", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("full" if os.environ.get("MSTAR_TEST_FULL") else "quick")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tensors of most tests are tiny: a second thread only adds waits for it, long ones on a busy machine. Tests of
    whole checkpoints are marked, and get it where no other test runs beside them. None loads torch only to say so, and
    none leaves another number behind."""
    torch = sys.modules.get("torch")
    if torch is not None:
        alone = "PYTEST_XDIST_WORKER" not in os.environ
        torch.set_num_threads(2 if alone and item.get_closest_marker("both_cores") else 1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A command that ran in this process has set up the log of its own, on a stream that ends with the test."""
    root = logging.getLogger()
    root.handlers[:] = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]
    root.setLevel(logging.WARNING)
