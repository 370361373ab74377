"""A whole instance in one thread: real workers on a loopback network, and a front that only keeps books.

The smallest thing that runs a model as a deployment does: no processes, no HTTP, no clock. `run` ticks the workers in
turn until every request is done; what they emitted is in `results`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from support.front_books import GREEDY, FrontBooks, Result
from support.late_executor import LateExecutor

from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.arena import SHM_DIR, Arena, ArenaReader, reclaim
from mstar.communication.bus import Bus
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import PeerLost, PeerUp, SamplingParams, ToWorker
from mstar.communication.wire import decode_to_front, decode_to_worker
from mstar.engine.engine import Engine
from mstar.engine.engine_config import EngineConfig
from mstar.engine.execution import Step
from mstar.engine.submodule import NodeSubmodule
from mstar.graph.compile import compile_walks
from mstar.graph.program import CompiledGraph
from mstar.model.base import Model, PreparedPrompt
from mstar.platforms.executor import InlineExecutor, ThreadedExecutor
from mstar.worker.assemble import Shared, WorkerSettings, assemble_worker
from mstar.worker.grammars.builds import Compiler
from mstar.worker.worker import Worker, WorkerParts

BuildNode = Callable[[str], NodeSubmodule]


@dataclass(frozen=True)
class Tuning:
    """What a deployment may choose. `num_pages` of caches by key; `capture_sizes` empty: nothing is captured."""

    overlap: bool = True
    threaded: bool = False
    late: bool = False
    """The device is one whose steps end as late as they may."""
    max_rows: int = 16
    max_waiting: int = 64
    max_step_tokens: int = 256
    max_seq_len: int = 256
    num_pages: Mapping[str, int] = field(default_factory=dict)
    capture_sizes: tuple[int, ...] = ()
    poison: bool = True
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `EngineConfig`."""
    load_grammars: Callable[[int], Compiler] | None = None


LOOPS: Mapping[str, Tuning] = {
    "plain": Tuning(overlap=False),
    "overlap": Tuning(),
    "threaded": Tuning(threaded=True),
    "late": Tuning(late=True),
}
"""How a worker's loop may run."""


class StepRecord(NamedTuple):
    """One submitted step; `rows` are handles of worker `rank`. `speculated`: it goes on from a step whose end was not
    routed yet (by what it was composed of; the workers' counters go by time)."""

    rank: int
    node: str
    walks: tuple[str, ...]
    rows: tuple[int, ...]
    speculated: bool


class Instance:
    """`placement`: rank of each node. Requests are submitted at any time; `tick` gives each worker one turn."""

    def __init__(
        self, model: Model, build_node: BuildNode, placement: Mapping[str, int], tuning: Tuning = Tuning()
    ) -> None:
        self.model = model
        self.compiled: CompiledGraph = compile_walks(model.walks(), model.partitions(), placement)
        self.steps: list[StepRecord] = []
        self.workers: list[Worker] = []
        self.parts: list[WorkerParts] = []
        self.lost: set[int] = set()
        """Ranks whose worker has gone and not come back."""
        self.net = LoopbackNet()
        self.front = self.net.bus("front", decode_to_front)
        ranks = sorted(set(placement.values()))
        self._books = FrontBooks(model, self.compiled, len(ranks), self.front)
        self.results = self._books.results
        self.name = secrets.token_hex(4)
        self._tuning = tuning
        self._build_node = build_node
        self._incarnations = dict.fromkeys(ranks, 1)
        for rank in ranks:
            worker, parts = self._make_worker(rank)
            self.workers.append(worker)
            self.parts.append(parts)
        for rank in ranks:
            self.front.connect(peer_name(rank), self._address(rank))
            self.front.send(peer_name(rank), [self._peer_up(other) for other in (FRONT_RANK, *ranks) if other != rank])

    def _address(self, rank: int) -> str:
        incarnation = self._incarnations.get(rank, 1)
        return peer_name(rank) if incarnation == 1 else f"{peer_name(rank)}.{incarnation}"

    def _peer_up(self, rank: int) -> PeerUp:
        return PeerUp(rank, self._incarnations.get(rank, 1), self._address(rank))

    def _make_worker(self, rank: int) -> tuple[Worker, WorkerParts]:
        tuning, incarnation = self._tuning, self._incarnations[rank]
        bus: Bus[ToWorker] = self.net.bus(self._address(rank), decode_to_worker)
        settings = WorkerSettings(
            rank=rank,
            incarnation=incarnation,
            max_rows=tuning.max_rows,
            max_waiting=tuning.max_waiting,
            max_step_tokens=tuning.max_step_tokens,
            overlap=tuning.overlap,
        )
        nodes = {node: self._build_node(node) for node in self.compiled.nodes_on(rank)}
        specs = [spec for spec in self.model.get_node_resources() if spec.node in nodes]
        config = EngineConfig(
            max_rows=tuning.max_rows,
            max_seq_len=tuning.max_seq_len,
            capacity=settings.capacity,
            num_pages={
                key: count
                for key, count in tuning.num_pages.items()
                if any(resource.key == key for spec in specs for resource in spec.resources)
            },
            capture_sizes=tuning.capture_sizes,
            debug_poison=tuning.poison,
            **tuning.engine,
        )
        shared = None
        if len(self._incarnations) > 1:
            shared = Shared(Arena(self.name, rank, incarnation), ArenaReader(self.name))
        threads = torch.get_num_threads()  # a new thread would take the environment's number
        threaded = partial(ThreadedExecutor, prepare=partial(torch.set_num_threads, threads))
        executor = LateExecutor() if tuning.late else threaded() if tuning.threaded else InlineExecutor()
        worker, parts = assemble_worker(
            compiled=self.compiled,
            nodes=nodes,
            specs=specs,
            bus=bus,
            executor=executor,
            engine_config=config,
            settings=settings,
            shared=shared,
            load_grammars=tuning.load_grammars,
        )
        if tuning.capture_sizes:
            parts.engine.capture()
        self._record_steps(rank, parts.engine)
        return worker, parts

    def lose(self, rank: int) -> None:
        """The process of `rank` is killed: what it held and was about to say is gone. The others hear of it as from a
        supervisor."""
        self.lost.add(rank)
        self.parts[rank].bus.close()
        self.parts[rank].engine.close_executor()
        self.front.disconnect(peer_name(rank))
        reclaim(self.name, rank, self._incarnations[rank])
        for other in self._incarnations.keys() - self.lost:
            self.front.send(peer_name(other), [PeerLost(rank, self._incarnations[rank], "killed")])
        self._books.lose()

    def restart(self, rank: int) -> None:
        """The next incarnation of a lost rank."""
        self._incarnations[rank] += 1
        self.workers[rank], self.parts[rank] = self._make_worker(rank)
        self.lost.discard(rank)
        self.front.connect(peer_name(rank), self._address(rank))
        for other in self._incarnations.keys() - self.lost - {rank}:
            self.front.send(peer_name(other), [self._peer_up(rank)])
            self.front.send(peer_name(rank), [self._peer_up(other)])
        self.front.send(peer_name(rank), [self._peer_up(FRONT_RANK)])

    def _record_steps(self, rank: int, engine: Engine) -> None:
        submit = engine.submit

        def recording(step: Step, *, draw_later: bool = False) -> None:
            walks = tuple(part.taken.key.walk for part in step.parts)
            rows = tuple(step.handles.tolist())
            self.steps.append(StepRecord(rank, step.node, walks, rows, bool(step.spec_ids)))
            submit(step, draw_later=draw_later)

        engine.submit = recording

    def submit(
        self,
        rid: str,
        prompt: PreparedPrompt,
        sampling: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Result:
        return self._books.submit(rid, prompt, sampling, priority=priority, cache_salt=cache_salt)

    def abort(self, rid: str) -> None:
        self._books.abort(rid)

    def tick(self, ranks: Sequence[int] | None = None) -> bool:
        """One turn for each worker (or some), then the front reads. False: nobody had anything to do."""
        busy = False
        for rank in range(len(self.workers)) if ranks is None else ranks:
            if rank in self.lost:
                continue
            if self.workers[rank].tick_once():
                busy = True
            else:
                self.parts[rank].outbox.rest()  # as its loop does before it blocks
        return self._books.read() or busy

    def run(self, max_ticks: int = 20000) -> dict[str, Result]:
        """Until every request is done and gone from the workers."""
        for _ in range(max_ticks):
            busy = self.tick()
            if not busy and all(result.done for result in self.results.values()) and not self.num_handles:
                return self.results
        stuck = [result for result in self.results.values() if not result.done]
        raise AssertionError(f"not done after {max_ticks} ticks: {stuck}; handles {self.num_handles}")

    @property
    def num_handles(self) -> int:
        """Requests that some worker still knows."""
        return int(sum(self.gauges(rank)["mstar_handles"] for rank in self._incarnations if rank not in self.lost))

    def gauges(self, rank: int) -> Mapping[str, float]:
        return self.parts[rank].counters._gauges()

    def held(self, rank: int) -> dict[str, float]:
        """What requests hold on a worker; not what is kept for later ones, nor what has been counted."""
        kept = ("_total", 'state="free"}', 'state="cached"}', 'state="snapshot"}')
        return {
            name: value for name, value in self.gauges(rank).items() if not any(word in name for word in kept) and value
        }

    def close(self) -> None:
        for rank, (worker, parts) in enumerate(zip(self.workers, self.parts, strict=True)):
            if rank not in self.lost:
                worker.close()
                parts.bus.close()
        self.front.close()


def shared_memory_of(instance: str) -> list[str]:
    """Files in shared memory that carry this instance's name."""
    return [path.name for path in SHM_DIR.iterdir() if instance in path.name]
