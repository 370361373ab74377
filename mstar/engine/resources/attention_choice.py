"""Which attention backend a resource gets: the deployment's choice, or the best of the platform's that can serve it."""

from __future__ import annotations

import logging

import torch

from mstar.engine.resources.attention_backends import AttentionBackend, AttentionNeed, PagedKernels, TorchReference
from mstar.engine.resources.flashinfer_attention import FlashInferAttention

log = logging.getLogger(__name__)

BACKENDS: dict[str, AttentionBackend] = {
    backend.name: backend
    for backend in (
        PagedKernels("cpu", "cpu"),
        FlashInferAttention(),
        PagedKernels("triton", "cuda"),
        TorchReference(),
    )
}
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "torch_ref"), "cuda": ("flashinfer", "triton", "torch_ref")}
"""By device type, best first."""


def choose_backend(
    key: str, need: AttentionNeed, wanted: str | None, device: torch.device | None = None
) -> AttentionBackend:
    """The deployment's choice, or the first of the platform's list that can serve `need`. Logs the choice.

    Raises:
        ValueError: an unknown name, a choice that cannot serve, or nothing that can; says why.
    """
    if wanted is not None and wanted not in BACKENDS:
        raise ValueError(f"resources.{key}.backend: {wanted!r} is unknown (known: {', '.join(sorted(BACKENDS))})")
    names = (wanted,) if wanted is not None else PREFERENCE.get(need.device_type, ("torch_ref",))
    refusals: list[str] = []
    for name in names:
        reason = BACKENDS[name].why_unavailable(need)
        if reason is None:
            log.info("attention %s: backend %s%s", key, name, f" (not {'; '.join(refusals)})" if refusals else "")
            return BACKENDS[name].bind(need, torch.device(need.device_type) if device is None else device)
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"resources.{key}: no attention backend can serve {need}: {'; '.join(refusals)}")
