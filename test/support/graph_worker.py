"""A simulated worker around a real graph runtime: it takes rows, computes values, completes, sends, speculates, fails.

What a real worker decides by time or load is drawn at random here: which rows a step takes, what is abandoned or given
back, who is held. `mstar.graph.runtime` is used as the worker loop uses it: compose, route, settle.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from support.graph_behaviour import Plain
from support.graph_books import CheckedBooks
from support.graph_programs import Program

from mstar.graph.compile import CompiledGraph
from mstar.graph.protocol import LIVE_COLUMN, NO_TENSOR, Cols, Gate, ReadyKey, Routed, TakenRows
from mstar.graph.runtime import PyGraphRuntime

Emits = dict[tuple[str, str, str], list[int]]
"""(node, walk, signal) → values that reached the client, in order."""


@dataclass
class Frame:
    """What one step sends to one peer; values instead of ids."""

    edges: list[tuple[int, int, list[int]]] = field(default_factory=list)
    items: list[tuple[int, int, int, int]] = field(default_factory=list)
    ends: list[tuple[int, int, int]] = field(default_factory=list)
    credits: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Part:
    """Rows of one key in a step. `made[row]`: outputs by signal. A speculated part has an id until it is settled."""

    taken: TakenRows
    rows: list[int]
    spec_id: int | None = None
    made: dict[int, dict[str, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Chances:
    """How often what happens, per opportunity."""

    speculate: float = 0.8
    abandon: float = 0.15
    give_back: float = 0.1
    hold: float = 0.05
    fail: float = 0.0


class Surroundings(Protocol):
    """What a worker shares with the others. `live`: outputs that stay in a node's column, by key."""

    rng: random.Random
    compiled: CompiledGraph
    program: Program
    chances: Chances
    signals: dict[ReadyKey, list[str]]
    live: dict[ReadyKey, list[str]]
    emits: list[Emits]
    failed: set[int]
    channels: dict[tuple[int, int], deque[Frame]]


class SimulatedWorker:
    """One worker: `step` is in flight, `tick` composes the next and routes that one."""

    def __init__(self, cluster: Surroundings, rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.rng = cluster.rng
        self.books = CheckedBooks()
        self.graph = PyGraphRuntime(cluster.compiled, rank, self.books)
        self.columns: dict[tuple[str, int, str], int] = {}
        self.step: list[Part] = []
        self.pending: dict[tuple[int, str], deque[str]] = {}
        self.done: set[tuple[int, str]] = set()
        self.parked: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self.held: set[int] = set()
        self.failed: set[int] = set()
        self.gone: set[int] = set()
        self.counts: Counter[str] = Counter()

    def handle(self, request: int) -> int:
        return request * 7 + self.rank + 1

    def request(self, handle: int) -> int:
        return (handle - 1 - self.rank) // 7

    def open(self, request: int, partition: str, inputs: Sequence[tuple[str, int]], walks: Sequence[str]) -> None:
        handle, program = self.handle(request), self.cluster.program
        for name, value in inputs:
            self.graph.persist(handle, partition, name, self.books.put(value))
        self.pending[handle, partition] = deque(walks)
        fed = self.cluster.compiled.partition(partition).stream_fed
        first = None if fed else self.pending[handle, partition].popleft()
        self.graph.add(handle, partition, first, program.limits)
        for kind, values in self.parked.pop(handle, []):
            self._again(kind, values)
        self._flush(Routed())

    def tick(self) -> bool:
        """Compose and run one more step, and route the one in flight. False: nothing to do."""
        if self.rng.random() < self.cluster.chances.hold:
            self._hold_some()
        following = self._compose()
        if not following and not self.step:
            return False
        if following and self.rng.random() < self.cluster.chances.abandon:
            self._abandon(following)
            following = []
        for part in following:
            self._execute(part)
        self._route(following)
        self.step = following
        self._check_exclusive()
        return True

    def receive(self, frame: Frame) -> None:
        for request, slot, values in frame.edges:
            self._deliver("edge", (self.handle(request), slot, *values))
        for request, edge, value, tag in frame.items:
            self._deliver("item", (self.handle(request), edge, value, tag))
        for request, edge, total in frame.ends:
            self._deliver("end", (self.handle(request), edge, total))
        for request, edge, count in frame.credits:
            if self.handle(request) not in self.gone:
                self.graph.stream_credit([self.handle(request)], [edge], [count])
        self._flush(Routed())

    def remove(self, request: int) -> bool:
        """Forget the request. False: a step still holds it."""
        handle = self.handle(request)
        if handle in self.gone:
            return True
        if any(handle in part.rows for part in self.step):
            return False
        self.gone.add(handle)
        if any(known == handle for known, _ in self.pending):
            self.books.free(self.graph.remove(handle))
        self.parked.pop(handle, None)
        return True

    def release_held(self) -> bool:
        held = [handle for handle in self.held if handle not in self.gone]
        self.held.clear()
        self.graph.gate(held, Gate.HELD, False)
        return bool(held)

    def _deliver(self, kind: str, values: tuple[int, ...]) -> None:
        if values[0] in self.gone:
            return
        if values[0] in self.parked:
            self.parked[values[0]].append((kind, values))
        else:
            self._again(kind, values)

    def _again(self, kind: str, values: tuple[int, ...]) -> None:
        handle, index = values[0], values[1]
        refused = False
        if kind == "edge":
            ids = [self.books.put(value) if value else NO_TENSOR for value in values[2:]]
            refused = bool(self.graph.ingest(Cols([handle], [index], ids, [len(ids)])))
            if refused:
                self.books.free([one for one in ids if one])
        elif kind == "item":
            one = self.books.put(values[2])
            refused = bool(self.graph.stream_put([handle], [index], [one], [values[3]]))
            if refused:
                self.books.free([one])
        elif any(known == handle for known, _ in self.pending):
            self.graph.stream_end(handle, index, values[2])
        else:
            refused = True
        if refused:
            self.parked.setdefault(handle, []).append((kind, values))
            self.counts["parked"] += 1

    def _hold_some(self) -> None:
        live = sorted({handle for handle, _ in self.pending} - self.gone)
        if live and self.rng.random() < 0.5:
            handle = self.rng.choice(live)
            self.graph.gate([handle], Gate.HELD, True)
            self.held.add(handle)
        else:
            self.release_held()

    def _compose(self) -> list[Part]:
        rng, parts = self.rng, []
        for part in self.step:
            alive = [row for row in part.rows if row not in self.failed]
            for key, rows in self.graph.speculate_node(part.taken.key, alive):
                if rng.random() < self.cluster.chances.speculate:
                    armed = self.graph.spec_prepare(key, _some(rng, rows))
                    parts.append(Part(armed.taken, list(armed.taken.rows), armed.spec_id))
                    self.counts["armed"] += 1
        keys = self.graph.ready_keys()
        assert len(set(keys)) == len(keys)
        if parts:
            keys = [part.taken.key for part in parts if part.taken.key in keys]
        if keys and rng.random() < 0.9:
            key = rng.choice(keys)
            rows = self.graph.peek(key, rng.randint(1, 4))
            waiting = self.graph.peek(key, 100)
            assert waiting[: len(rows)] == rows
            taken = self.graph.take(key, _some(rng, rows))
            if rng.random() < self.cluster.chances.give_back:
                self.graph.give_back(key, taken.rows)
                assert self.graph.peek(key, 100) == waiting
                self.counts["given back"] += 1
            else:
                parts.append(Part(taken, list(taken.rows)))
        return parts

    def _abandon(self, parts: list[Part]) -> None:
        self.counts["abandoned"] += 1
        for part in reversed(parts):
            if part.spec_id is not None:
                self.graph.spec_settle(part.spec_id, ())
            else:
                self.graph.give_back(part.taken.key, part.rows)

    def _execute(self, part: Part) -> None:
        """Run the node: after the step in flight, on the values as they are now."""
        taken, behaviour = part.taken, self.cluster.program.behaviour
        node, walk = taken.key
        for i, row in enumerate(taken.rows):
            if row not in part.rows:
                continue
            inputs: dict[str, Plain] = {name: self._value(node, row, name, ids[i]) for name, ids in taken.ids.items()}
            for name, lists in taken.lists.items():
                inputs[name] = [self.books.values[one] for one in lists[i]]
            signals = self.cluster.signals[taken.key]
            part.made[row] = behaviour.run(node, walk, signals, inputs, taken.iterations[i], taken.finals[i])
            for name in self.cluster.live[taken.key]:
                value = part.made[row][name]
                assert value is not None
                self.columns[node, row, name] = value

    def _value(self, node: str, row: int, name: str, one: int) -> int | None:
        if one == LIVE_COLUMN:
            return self.columns[node, row, name]
        return None if one == NO_TENSOR else self.books.values[one]

    def _route(self, following: list[Part]) -> None:
        rng, routed = self.rng, Routed()
        for part in self.step:
            key = part.taken.key
            if part.rows and rng.random() < self.cluster.chances.fail:
                lost = rng.choice(part.rows)
                self.graph.fail([lost])
                self.failed.add(lost)
                self.cluster.failed.add(self.request(lost))
                if rng.random() < 0.5:
                    part.rows.remove(lost)
            if not part.rows:
                continue
            loops = self.cluster.compiled.loops_around(key)
            for row in part.rows:
                stops = self.cluster.program.behaviour.stops(key.node, key.walk, part.made[row], loops)
                self.graph.stop_loops([row] * len(stops), stops)
            live = self.cluster.live[key]
            ids = {
                name: [self._put(part.made[row][name], name in live) for row in part.rows]
                for name in self.cluster.signals[key]
            }
            self.graph.complete(key, part.rows, ids, routed)
            self._send_emits(routed, part)
        for part in following:
            if part.spec_id is not None:
                keep = [row for row in self.graph.spec_going(part.spec_id) if row not in self.failed]
                self.graph.spec_settle(part.spec_id, keep)
                self.counts["kept"] += len(keep)
                self.counts["wasted"] += len(part.rows) - len(keep)
                part.rows = keep
        self._flush(routed)

    def _put(self, value: int | None, live: bool) -> int:
        if value is None:
            return NO_TENSOR
        return LIVE_COLUMN if live else self.books.put(value)

    def _send_emits(self, routed: Routed, part: Part | None) -> None:
        for key, signal, _, handles, ids in routed.emits:
            for handle, one in zip(handles, ids, strict=True):
                if one == LIVE_COLUMN:
                    assert part is not None and key == part.taken.key
                    value = part.made[handle][signal]
                    assert value is not None
                else:
                    value = self.books.values[one]
                    self.books.free(self.books.release([one]))
                emits = self.cluster.emits[self.request(handle)]
                emits.setdefault((key.node, key.walk, signal), []).append(value)
        routed.emits.clear()

    def _flush(self, routed: Routed) -> None:
        """Follow walks that ended, then send one frame per peer."""
        self.graph.collect(routed)
        while routed.walk_done:
            handle, partition = routed.walk_done.pop(0)
            if self.cluster.compiled.partition(partition).stream_fed:
                self._finish(handle, partition, routed)
            elif handle not in self.failed:
                self._next_walk(handle, partition, routed)
            self.graph.collect(routed)
        self._send_emits(routed, None)
        frames: dict[int, Frame] = {}
        for peer, edges in routed.edges.items():
            first = 0
            for handle, slot, count in zip(edges.handles, edges.slots, edges.counts, strict=True):
                ids = edges.ids[first : first + count]
                first += count
                values = [self.books.values[one] if one else 0 for one in ids]
                frames.setdefault(peer, Frame()).edges.append((self.request(handle), slot, values))
                self.books.free(self.books.release([one for one in ids if one]))
        for peer, items in routed.streams.items():
            assert peer != self.rank
            for handle, edge, one, tag in zip(*items, strict=True):
                frame = frames.setdefault(peer, Frame())
                frame.items.append((self.request(handle), edge, self.books.values[one], tag))
                self.books.free(self.books.release([one]))
        for peer, columns in routed.stream_ends.items():
            frames.setdefault(peer, Frame()).ends += [(self.request(h), e, n) for h, e, n in zip(*columns, strict=True)]
        for peer, columns in routed.credits.items():
            own = [(self.request(h), e, n) for h, e, n in zip(*columns, strict=True)]
            frames.setdefault(peer, Frame()).credits += own
        self.books.free(routed.freed)
        for peer, frame in frames.items():
            self.cluster.channels[self.rank, peer].append(frame)

    def _next_walk(self, handle: int, partition: str, routed: Routed) -> None:
        assert self.graph.partition_idle(handle, partition)
        if self.pending[handle, partition]:
            self.graph.set_walk(handle, partition, self.pending[handle, partition].popleft())
        else:
            self._finish(handle, partition, routed)

    def _finish(self, handle: int, partition: str, routed: Routed) -> None:
        assert (handle, partition) not in self.done, "a partition ended twice"
        self.done.add((handle, partition))
        self.graph.end_streams(handle, partition, routed)

    def _check_exclusive(self) -> None:
        """No row is ready and running for the same key."""
        for part in self.step:
            ready = set(self.graph.peek(part.taken.key, 1000))
            assert ready.isdisjoint(part.rows), f"{ready & set(part.rows)} ready while in a step of {part.taken.key}"
        for handle in (self.held | self.failed) - self.gone:
            assert all(handle not in self.graph.peek(key, 1000) for key in self.graph.ready_keys())


def _some(rng: random.Random, rows: list[int]) -> list[int]:
    """A few of them, at least one."""
    return rows if rng.random() < 0.6 else sorted(rng.sample(rows, rng.randint(1, len(rows))), key=rows.index)
