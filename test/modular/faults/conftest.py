import pytest
import torch
from support.composite.deployment import Composite
from support.instance import LOOPS, Tuning
from support.tiny_serving import TinyLlama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyLlama:
    torch.set_grad_enabled(False)
    return TinyLlama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


@pytest.fixture(params=LOOPS)
def tuning(request: pytest.FixtureRequest) -> Tuning:
    return LOOPS[request.param]
