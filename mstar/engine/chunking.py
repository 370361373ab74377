"""`ChunkingPolicy`: how a node's long inputs are cut into steps and share them. A declaration, read by engine and
micro-scheduler; and the arithmetic of cutting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ChunkingPolicy:
    """What may be done with the rows of one walk of a node.

    `batch_with`: walks of the same node whose rows may join this walk's rows in one step (decode with prefill).
    `chunked`: a row's tokens may be computed over several steps; `prepare_*` gives all that the cache lacks, the engine
    cuts. `align`: chunks that are not a row's last end at a multiple of so many tokens of the row.
    `keep_final_chunk_samples`: rows of a chunked walk draw in their last chunk; without it in none.
    `accumulate`: outputs `[tokens, ...]` per row whose chunks are joined; of other outputs the last chunk's count.
    `reuse_prefix`: full pages of an earlier prompt may be adopted instead of computed, so `prepare_*` starts at the
    row's length. `recomputable`: this walk's forward rebuilds the cache of any row of the node from token ids alone,
    those of the prompt and those drawn.
    """

    batch_with: tuple[str, ...] = ()
    chunked: bool = False
    align: int = 1
    keep_final_chunk_samples: bool = False
    accumulate: frozenset[str] = frozenset()
    reuse_prefix: bool = False
    recomputable: bool = False

    def __post_init__(self) -> None:
        if self.align < 1:
            raise ValueError(f"align is at least 1, not {self.align}")
        if self.accumulate and self.reuse_prefix:
            raise ValueError(f"{sorted(self.accumulate)} would lack the tokens of a reused prefix")
        if (self.accumulate or self.keep_final_chunk_samples) and not self.chunked:
            raise ValueError("accumulate and keep_final_chunk_samples speak of chunks, but the walk is not chunked")


MIN_CHUNK = 16
"""Tokens that a step with chunks computes of them at least, so that rows that decode, however many, starve no prompt.
Below, a step is all overhead."""

NOT_CHUNKED = ChunkingPolicy()
"""Of walks that declare nothing."""


def allot(starts: np.ndarray, pending: np.ndarray, budget: int, *, align: int, at_least: int) -> np.ndarray:
    """Tokens that each row computes in one step: first come, first served.

    `starts` int32 [rows]: tokens in each row's cache; `pending` int32 [rows]: tokens it has still to compute. Rows
    share `budget` in order; a row's chunk is its rest, or ends at a multiple of `align`. `at_least` > 0: the first row
    computes something even where the budget is too small for it. Returns int32 [rows], 0 for rows without a turn.
    """
    counts = np.zeros(pending.size, np.int32)
    for index in range(pending.size):
        start, rest = int(starts[index]), int(pending[index])
        room = max(budget, at_least) if index == 0 else budget
        if room <= 0:
            break
        count = rest
        if rest > room:
            count = (start + room) // align * align - start
            if count <= 0:
                if index or not at_least:
                    break
                count = min(rest, align - start % align)
        counts[index] = count
        budget -= count
    return counts
