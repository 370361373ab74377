"""`Candidates`: rows that may go into the next step, in runs of one key and one kind.

Loop thread, host integers. Finds and changes nothing: what is not taken stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mstar.engine.chunking import NOT_CHUNKED, ChunkingPolicy
from mstar.engine.engine import Engine
from mstar.engine.execution import Step
from mstar.graph.protocol import GraphRuntime, ReadyKey, SpecTarget, TakenRows


class Run(NamedTuple):
    """Rows of one key. `shares_as`: the key by whose rules they share a step; rows whose cache is being restored go by
    the node's recomputable walk, whatever they wait for. `cut`: their tokens may be computed over several steps.
    `part`: what they were taken as, of rows that go on with a run of the step before."""

    key: ReadyKey
    shares_as: ReadyKey
    rows: list[int]
    cut: bool
    part: TakenRows | None = None

    @property
    def restores(self) -> bool:
        return self.shares_as != self.key


class Candidates:
    """See the module docstring."""

    def __init__(self, graph: GraphRuntime, engine: Engine, policies: Mapping[ReadyKey, ChunkingPolicy]) -> None:
        self._graph = graph
        self._engine = engine
        self._policies = policies
        self._rebuilds = {key.node: key for key, policy in policies.items() if policy.recomputable}

    def targets(self, cur: Step | None, declined: set[int]) -> list[SpecTarget]:
        """Rows that begin a further run if the one they are in ends well, one target for each key: rows that came at
        different times would else stay parts of their own, and every part costs each stage of the loop."""
        if cur is None:
            return []
        unwanted = cur.dropped | declined
        targets: dict[ReadyKey, SpecTarget] = {}
        for part in cur.parts:
            rows = part.taken.rows
            if going := cur.unfinished_in(part):
                others = set(range(len(rows))).difference(going)
                rows = [rows[place] for place in sorted(others)]
            if unwanted:
                rows = [row for row in rows if row not in unwanted]
            for target in self._graph.speculate_node(part.taken.key, rows) if rows else ():
                if target.rows:
                    targets.setdefault(target.key, SpecTarget(target.key, [])).rows.extend(target.rows)
        return list(targets.values())

    def carried(self, cur: Step | None, declined: set[int]) -> list[Run]:
        """Rows whose run `cur` computes a part of: the next part may be planned, the cache's length is known."""
        if cur is None or cur.unfinished is None:
            return []
        unwanted = cur.dropped | declined
        runs: list[Run] = []
        for part in cur.parts:
            rows = [row for i in cur.unfinished_in(part) if (row := part.taken.rows[i]) not in unwanted]
            if rows and (rows := self._graph.carriable(part.taken.key, rows)):
                runs.extend(self._runs(part.taken.key, rows, part.taken))
        return runs

    def fresh(self, key: ReadyKey, declined: set[int], limit: int) -> list[Run]:
        """Rows from the head of the key's queue."""
        rows = self._graph.peek(key, limit + len(declined))
        if declined:
            rows = [row for row in rows if row not in declined][:limit]
        return self._runs(key, rows, None) if rows else []

    def _runs(self, key: ReadyKey, rows: list[int], part: TakenRows | None) -> list[Run]:
        chunked = self._policies.get(key, NOT_CHUNKED).chunked
        rebuild = self._rebuilds.get(key.node)
        if rebuild is not None and (restoring := self._engine.restoring(key.node, rows)):
            runs = [Run(key, rebuild, [row for row in rows if row in restoring], True, part)]
            if rest := [row for row in rows if row not in restoring]:
                runs.append(Run(key, key, rest, chunked, part))
            return runs
        return [Run(key, key, rows, chunked, part)]


def taken_again(part: TakenRows, rows: list[int]) -> TakenRows:
    """Some of a part's rows, with the inputs that they were taken with."""
    if rows == part.rows:
        return part
    place = {row: index for index, row in enumerate(part.rows)}
    index = [place[row] for row in rows]
    return TakenRows(
        part.key,
        rows,
        {name: [ids[i] for i in index] for name, ids in part.ids.items()},
        {name: [lists[i] for i in index] for name, lists in part.lists.items()},
        [part.iterations[i] for i in index],
        [part.finals[i] for i in index],
    )
