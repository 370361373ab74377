"""`ChunkingPolicy`: how a node's long inputs share steps with others. A declaration, read by the micro-scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkingPolicy:
    """`batch_with`: walks of the same node whose rows may join this walk's rows in one step (decode with prefill)."""

    batch_with: tuple[str, ...] = ()
