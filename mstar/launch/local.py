"""A whole deployment inside one process: its workers on a loopback bus, ticked by the caller. For `mstar run`, offline
benchmarks and tests. One thread; no sockets, no HTTP.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mstar.communication import host_tensors
from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import (
    EmitFrame,
    Fail,
    FinishReason,
    HostTensor,
    Message,
    Open,
    Opened,
    OpenRequest,
    PeerUp,
    Remove,
    SamplingParams,
    StartWalk,
    ToFront,
    WalkDone,
)
from mstar.communication.wire import decode_to_front, decode_to_worker
from mstar.launch.calibration import calibrate_steps
from mstar.launch.deployment import Deployment
from mstar.launch.engine_start import start_engine
from mstar.launch.rank import Place, build_rank
from mstar.model.base import PreparedPrompt, WalkPlan
from mstar.model.loader.progress import LoadProgress
from mstar.platforms.executor import DeviceExecutor
from mstar.profile.phases import PhaseClock


class LocalFailure(RuntimeError):
    """A request failed; the message is what a client would see."""


@dataclass(slots=True)
class LocalRequest:
    """One request and what it has emitted: tokens and tensors by signal, in order."""

    rid: str
    plan: WalkPlan
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    tensors: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    """How each partition ended."""
    waiting: set[tuple[str, int]] = field(default_factory=set)
    """(partition, rank) whose end has not been reported."""
    unopened: list[int] = field(default_factory=list)
    failure: str | None = None

    @property
    def finished(self) -> bool:
        return self.failure is not None or not self.waiting


class LocalInstance:
    """See the module docstring. Every model here must plan its walks up front."""

    def __init__(
        self,
        deployment: Deployment,
        *,
        progress: LoadProgress | None = None,
        clock: PhaseClock | None = None,
        executor: DeviceExecutor | None = None,
        calibrate: bool = True,
    ) -> None:
        """`executor`: another than the configuration's, for an instance of one worker. `calibrate`: measure steps
        first, as a server does; of no use to a request that is alone, and not possible on an executor of the caller's,
        which may run nothing yet."""
        self.model = deployment.model()
        self._compiled = deployment.compile(self.model)
        self._requests: dict[str, LocalRequest] = {}
        self._openings: dict[str, OpenRequest] = {}
        self._num_made = 0
        net = LoopbackNet()
        names = [peer_name(rank) for rank in (FRONT_RANK, *range(deployment.config.num_workers))]
        self._front = net.bus(peer_name(FRONT_RANK), decode_to_front)
        self.workers = []
        for rank in range(deployment.config.num_workers):
            bus = net.bus(peer_name(rank), decode_to_worker)
            place = Place(f"local{id(self):x}", rank)
            worker, parts = build_rank(
                deployment, self.model, self._compiled, place, bus, progress=progress, clock=clock, executor=executor
            )
            start_engine(parts.engine)
            if calibrate and executor is None:
                calibrate_steps(deployment.config, self._compiled, rank, parts)
            self.workers.append((worker, parts))
            for name in names:
                self._front.connect(name, name)
        for rank, (_, parts) in enumerate(self.workers):
            peers = [
                PeerUp(other, 0, peer_name(other)) for other in (FRONT_RANK, *range(len(self.workers))) if other != rank
            ]
            parts.inbox.apply(peers)

    def submit(
        self, prompt: PreparedPrompt, sampling: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> LocalRequest:
        """Start a request. `prompt` comes from the model's `process_prompt`."""
        plan = self.model.plan_walks(prompt, sampling.max_tokens)
        if plan is None:
            raise LocalFailure("this model plans its walks one by one, which needs a server")
        rid = f"local-{self._num_made}"
        self._num_made += 1
        request = LocalRequest(rid, plan)
        request.waiting = {
            (name, rank) for name, _ in plan.partitions for rank in self._compiled.ranks_of_partition(name)
        }
        opening = OpenRequest(
            sampling=sampling,
            prompt_ids=None if prompt.token_ids is None else host_tensors.from_numpy(prompt.token_ids),
            inputs={name: host_tensors.from_numpy(value) for name, value in prompt.inputs.items()},
            limits=dict(plan.limits),
            media=prompt.media,
            cache_salt=cache_salt,
            priority=priority,
            arrival=self._num_made,
        )
        self._requests[rid] = request
        ranks = sorted({rank for _, rank in request.waiting})
        if len(ranks) == 1:
            self._start(request, opening)
        else:
            self._openings[rid] = opening
            request.unopened = ranks
            self._send(ranks[0], Open(rid=rid, open=opening))
        return request

    def remove(self, request: LocalRequest) -> None:
        """Forget a request, finished or not."""
        self._requests.pop(request.rid, None)
        for rank in range(len(self.workers)):
            self._send(rank, Remove(request.rid))

    def tick(self) -> bool:
        """One tick of every worker. False: nobody had anything to run."""
        busy = False
        for worker, _ in self.workers:
            busy = worker.tick_once() or busy
        messages = self._front.receive()
        for message in messages:
            self._take(message)
        return busy or bool(messages)

    def finish(self, requests: Iterable[LocalRequest]) -> None:
        """Tick until all of them have finished, then forget them.

        Raises:
            LocalFailure: one failed, or nothing moves any more.
        """
        requests = list(requests)
        waiting = requests
        idle = 0
        while waiting:
            idle = 0 if self.tick() else idle + 1
            if idle > 100:
                raise LocalFailure("nothing runs, and requests wait")
            # One that has finished goes at once: others wait for its room.
            for request in waiting:
                if request.finished:
                    self.remove(request)
            waiting = [request for request in waiting if not request.finished]
        while self.tick():
            pass
        for request in requests:
            if request.failure is not None:
                raise LocalFailure(request.failure)

    def stream(self, request: LocalRequest, signal: str) -> Iterator[int]:
        """Tokens of one signal as they come."""
        sent = 0
        while True:
            finished = request.finished
            tokens = request.tokens[signal]
            yield from tokens[sent:]
            sent = len(tokens)
            if finished:
                break
            self.tick()
        self.finish([request])

    def close(self) -> None:
        for worker, _ in self.workers:
            worker.close()

    def _start(self, request: LocalRequest, opening: OpenRequest | None) -> None:
        for name, walks in request.plan.partitions:
            for rank in self._compiled.ranks_of_partition(name):
                self._send(
                    rank, StartWalk(rid=request.rid, partition=name, walks=tuple(walks), last=True, open=opening)
                )
                opening = None

    def _send(self, rank: int, message: Message) -> None:
        self._front.send(peer_name(rank), (message,))

    def _take(self, message: ToFront) -> None:
        match message:
            case EmitFrame():
                self._emitted(message)
            case WalkDone():
                request = self._requests.get(message.rid)
                if request is not None:
                    request.waiting.discard((message.partition, message.rank))
                    if request.reasons.get(message.partition) != "stop":
                        request.reasons[message.partition] = message.reason
            case Opened():
                request = self._requests.get(message.rid)
                if request is not None:
                    request.unopened.remove(message.rank)
                    if request.unopened:
                        self._send(request.unopened[0], Open(rid=request.rid, open=self._openings[request.rid]))
                    else:
                        del self._openings[request.rid]
                        self._start(request, None)
            case Fail():
                request = self._requests.get(message.rid)
                if request is not None:
                    request.failure = message.message
            case _:
                pass

    def _emitted(self, frame: EmitFrame) -> None:
        signals: Sequence[str] = frame.signals if len(frame.signals) != 1 else frame.signals * len(frame.rids)
        for rid, signal, token in zip(frame.rids, signals, frame.tokens, strict=True):
            if rid in self._requests:
                self._requests[rid].tokens[signal].append(token)
        for rid, signal, tensor in zip(frame.tensor_rids, frame.tensor_signals, frame.tensors, strict=True):
            if rid in self._requests:
                self._requests[rid].tensors[signal].append(_array(tensor))


def _array(tensor: HostTensor) -> np.ndarray:
    return host_tensors.to_numpy(tensor)
