"""The attention backends there are, and which of them a resource gets. At start-up."""

from __future__ import annotations

import torch

from mstar.engine.resources.attention_backends import AttentionBackend, AttentionNeed, PagedKernels, TorchReference
from mstar.engine.resources.backend_choice import choose
from mstar.engine.resources.flashinfer_attention import FlashInferAttention

BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend
    for backend in (
        PagedKernels("cpu", "cpu"),
        FlashInferAttention(),
        PagedKernels("triton", "cuda"),
        TorchReference(),
    )
}
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "torch_ref"), "cuda": ("triton", "torch_ref")}
"""By device type, best first. FlashInfer is for those who name it: its first step of prompts that is not replayed waits
for a compiler, up to two minutes, while requests run."""


def choose_backend(
    key: str, need: AttentionNeed, wanted: str | None, device: torch.device | None = None
) -> AttentionBackend:
    """`backend_choice.choose`, bound to the resource: its device is `device`, or the first of `need.device_type`."""
    chosen = choose("attention", key, need, wanted, BACKENDS, PREFERENCE)
    return chosen.bind(need, torch.device(need.device_type) if device is None else device)
