"""The grid of features that meet under pressure: what each cell deploys, and which cells cover the pairs.

A cell may change how requests are computed, never what comes out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import NamedTuple

from support.instance import Instance, Result, Tuning

UNLIMITED = 1 << 20
MAX_WAITING = 256
"""More than a run submits: what is tested is pressure on memory, not on the queue."""


class Cell(NamedTuple):
    """`chunk_pages`: budget of a step in pages, 0 for none. `tiny`: a pool in which few requests fit together."""

    overlap: bool
    chunk_pages: int
    prefix_cache: bool
    tiny: bool
    offload: bool

    def __str__(self) -> str:
        words = (
            "async" if self.overlap else "plain",
            f"chunks of {self.chunk_pages}" if self.chunk_pages else "no chunks",
            "cache" if self.prefix_cache else "no cache",
            "tiny pool" if self.tiny else "large pool",
            "offload" if self.offload else "no offload",
        )
        return ", ".join(words)

    def tuning(
        self,
        *,
        page_size: int,
        tiny_pages: int,
        host_bytes: int | Mapping[str, int],
        max_seq_len: int,
        max_rows: int,
        tiny_slots: Mapping[str, int] | None = None,
    ) -> Tuning:
        """The cell for a model with one cache, `kv`. Steps run on a thread, as deployments run them on a CPU. With
        recurrent states `tiny_slots` are those of a tiny pool, and `host_bytes` are by key."""
        hosts = {"kv": host_bytes} if isinstance(host_bytes, int) else dict(host_bytes)
        slots = {"num_slots": dict(tiny_slots)} if self.tiny and tiny_slots else {}
        return Tuning(
            overlap=self.overlap,
            threaded=self.overlap,
            max_rows=max_rows,
            max_waiting=MAX_WAITING,
            max_step_tokens=self.chunk_pages * page_size or UNLIMITED,
            max_seq_len=max_seq_len,
            num_pages={"kv": tiny_pages} if self.tiny else {},
            engine={"prefix_cache": self.prefix_cache, "host_bytes": hosts if self.offload else {}, **slots},
        )


BASELINE = Cell(overlap=False, chunk_pages=0, prefix_cache=False, tiny=False, offload=False)
ALL_CELLS = [Cell(*values) for values in product((True, False), (1, 3, 0), (True, False), (True, False), (True, False))]


def covering_cells(strength: int) -> list[Cell]:
    """Few cells in which every combination of values of any `strength` features occurs, the harder ones first."""
    columns = list(combinations(range(len(Cell._fields)), strength))
    missing = {(which, tuple(cell[i] for i in which)) for cell in ALL_CELLS for which in columns}
    chosen: list[Cell] = []
    while missing:
        best = max(ALL_CELLS, key=lambda cell: len(_covered(cell, columns) & missing))
        chosen.append(best)
        missing -= _covered(best, columns)
    return chosen


def _covered(cell: Cell, columns: Sequence[tuple[int, ...]]) -> set[tuple[tuple[int, ...], tuple[bool | int, ...]]]:
    return {(which, tuple(cell[i] for i in which)) for which in columns}


def staggered(instance: Instance, submits: list[Callable[[], Result]], seed: int) -> list[Result]:
    """The results of all, submitted at random moments of the run, not always one by one."""
    rng = random.Random(seed)
    results: list[Result] = []
    waiting = submits[::-1]
    while waiting:
        count = min(rng.choice((1, 2, 8)), len(waiting))
        results.extend(waiting.pop()() for _ in range(count))
        for _ in range(rng.randint(0, 6)):
            instance.tick()
    instance.run()
    return results
