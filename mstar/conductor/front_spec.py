"""What the front process is started with. Pure data, made by the launcher; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mstar.config.schema import ServerConfig
from mstar.model.base import ModelCard, ModelSetup


@dataclass(frozen=True, slots=True)
class FrontSpec:
    """`address` is where this process listens for messages, `supervisor_address` where it reports (None: to nobody).
    `served_names` are what `model` may be in a request, the first is the one shown. `placement` maps every node of the
    model to its rank. `server` holds times, limits and keys as configured; a worker runs up to
    `max_rows` requests, and up to `max_queue` more may wait."""

    address: str
    supervisor_address: str | None
    card: ModelCard
    setup: ModelSetup
    served_names: tuple[str, ...]
    placement: Mapping[str, int]
    server: ServerConfig
    max_rows: int = 256
    max_queue: int = 1024
    incarnation: int = 0
