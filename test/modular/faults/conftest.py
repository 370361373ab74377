import pytest
import torch
from support.composite.deployment import Composite
from support.instance import Tuning
from support.tiny_serving import TinyLlama

TUNINGS = {
    "plain": Tuning(overlap=False),
    "overlap": Tuning(),
    "threaded": Tuning(threaded=True),
    "late": Tuning(late=True),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyLlama:
    torch.set_grad_enabled(False)
    return TinyLlama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def composite(tmp_path_factory) -> Composite:
    return Composite(tmp_path_factory.mktemp("composite"))


@pytest.fixture(params=list(TUNINGS))
def tuning(request: pytest.FixtureRequest) -> Tuning:
    return TUNINGS[request.param]
