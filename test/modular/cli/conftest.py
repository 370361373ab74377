"""A cache of this directory's own for what commands write about tiny checkpoints; compiled kernels are the user's."""

from pathlib import Path

import pytest
from support.checkpoints import tiny_llama, write_directory
from transformers import LlamaForCausalLM

from mstar import envs


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    kernels = envs.CACHE_DIR.get() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    own = tmp_path_factory.mktemp("cache")
    (own / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MSTAR_CACHE_DIR", str(own))
        yield


@pytest.fixture(scope="session")
def weights() -> LlamaForCausalLM:
    """Larger than usual, so that greedy texts differ between prompts."""
    return tiny_llama(initializer_range=0.5)


@pytest.fixture(scope="session")
def checkpoint(weights, tmp_path_factory) -> Path:
    """A directory with `weights`, a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    write_directory(directory, weights)
    return directory
