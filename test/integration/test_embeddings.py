"""Embeddings on an accelerator, beside rows that decode: those of the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.device_parity import DEVICE, MODELS, open_instance, prompts, start, write_checkpoint

from mstar.communication.messages import SamplingParams
from mstar.model.base import PromptRequest

ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.mark.parametrize("model", MODELS)
def test_embeddings_are_those_of_the_cpu(model: str, tmp_path: Path):
    directory, texts = write_checkpoint(model, tmp_path / model), prompts(33)
    found: dict[str, list[np.ndarray]] = {}
    generated: dict[str, list[list[int]]] = {}
    for device in (DEVICE, "cpu"):
        instance = open_instance(model, directory, device, capture={"enabled": device != "cpu"})
        beside = start(instance, texts[:5], 12)
        asked = [
            instance.submit(
                instance.model.process_prompt(PromptRequest("embedding", token_ids=tuple(text.tolist()))), ONE
            )
            for text in texts
        ]
        instance.finish([*beside, *asked])
        assert all(len(request.tensors["embedding"]) == 1 for request in asked)
        found[device] = [request.tensors["embedding"][0] for request in asked]
        generated[device] = [list(request.tokens["token"]) for request in beside]
        instance.close()
    ours, expected = torch.tensor(np.stack(found[DEVICE])), torch.tensor(np.stack(found["cpu"]))
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
    assert float((expected @ expected.T).fill_diagonal_(0).max()) < 1, "texts that are alike would hide a mix-up"
    assert generated[DEVICE] == generated["cpu"]
