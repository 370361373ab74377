import pytest
import torch
from support.tiny_serving import TinyLlama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyLlama:
    torch.set_grad_enabled(False)
    return TinyLlama(tmp_path_factory.mktemp("tiny"))
