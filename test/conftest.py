"""Settings every test shares. Thread counts are pinned before torch can be imported, here and for child processes:
the suite has to behave on two cores as it does on sixty-four."""

import os
import sys
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = str(min(2, int(os.environ.get(_name) or 2)))
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


@pytest.fixture(autouse=True)
def _pinned_torch_threads() -> None:
    """No test leaves another number of threads behind, and none loads torch only to say so."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() > 2:
        torch.set_num_threads(2)
