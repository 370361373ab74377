"""The linear attention backends there are, and which of them a resource gets. At start-up."""

from __future__ import annotations

from mstar.engine.resources.backend_choice import choose
from mstar.engine.resources.fla_linear_attention import FlaLinearAttention
from mstar.engine.resources.linear_attention_backends import (
    GatedDeltaKernels,
    LinearAttentionBackend,
    LinearAttentionNeed,
    TorchReference,
)

BACKENDS: dict[str, LinearAttentionBackend] = {
    backend.name: backend
    for backend in (
        GatedDeltaKernels("cpu", "cpu"),
        FlaLinearAttention(),
        GatedDeltaKernels("triton", "cuda"),
        TorchReference(),
    )
}
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "torch_ref"), "cuda": ("fla", "triton", "torch_ref")}
"""By device type, best first."""


def choose_backend(key: str, need: LinearAttentionNeed, wanted: str | None) -> LinearAttentionBackend:
    """See `backend_choice.choose`."""
    return choose("linear attention", key, need, wanted, BACKENDS, PREFERENCE)
