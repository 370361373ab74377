"""Which backend a resource gets: the deployment's choice, or the best of the platform's that can serve it.

At start-up, where resources are built.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)


class Need(Protocol):
    """What a resource asks of its backend."""

    @property
    def device_type(self) -> str: ...


NeedT = TypeVar("NeedT", bound=Need, contravariant=True)


class Backend(Protocol[NeedT]):
    """What can be chosen."""

    name: str

    def why_unavailable(self, need: NeedT) -> str | None:
        """None: it can serve `need`; otherwise the reason, for the log and the error."""
        ...


BackendT = TypeVar("BackendT", bound=Backend)


def choose(
    kind: str,
    key: str,
    need: Need,
    wanted: str | None,
    backends: Mapping[str, BackendT],
    preference: Mapping[str, Sequence[str]],
) -> BackendT:
    """`wanted`, or the first of the list of `preference` for `need.device_type` that can serve `need`. Logs the choice.

    Raises:
        ValueError: an unknown name, a choice that cannot serve, or nothing that can; says why.
    """
    if wanted is not None and wanted not in backends:
        raise ValueError(f"resources.{key}.backend: {wanted!r} is unknown (known: {', '.join(sorted(backends))})")
    names = (wanted,) if wanted is not None else preference.get(need.device_type, ("torch_ref",))
    refusals: list[str] = []
    for name in names:
        reason = backends[name].why_unavailable(need)
        if reason is None:
            log.info("%s %s: backend %s%s", kind, key, name, f" (not {'; '.join(refusals)})" if refusals else "")
            return backends[name]
        refusals.append(f"{name}: {reason}")
    raise ValueError(f"resources.{key}: no {kind} backend can serve {need}: {'; '.join(refusals)}")


def why_elsewhere(device_type: str, needed: str) -> str | None:
    """What keeps kernels for one type of device from another."""
    if device_type == needed:
        return None
    kind = "a CPU" if device_type == "cpu" else "an accelerator"
    return f"runs on {kind}, not on {needed}"
