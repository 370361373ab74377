"""Which linear attention backend a resource gets: the deployment's choice, or the best of the platform's that can serve
it."""

from __future__ import annotations

import logging

from mstar.engine.resources.fla_linear_attention import FlaLinearAttention
from mstar.engine.resources.linear_attention_backends import (
    GatedDeltaKernels,
    LinearAttentionBackend,
    LinearAttentionNeed,
    TorchReference,
)

log = logging.getLogger(__name__)

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
            log.info("linear attention %s: backend %s", key, name)
            return BACKENDS[name]
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"resources.{key}: no linear attention backend can serve {need}: {'; '.join(refusals)}")
