"""A conductor without a loop: real ledger, walks and bus, a clock and timers that a test moves by hand."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.loopback import LoopbackNet
from mstar.communication.messages import (
    EmitFrame,
    Heartbeat,
    Message,
    OpenRequest,
    PeerUp,
    Ready,
    SamplingParams,
    ToFront,
    WalkDone,
)
from mstar.communication.wire import decode_to_front, decode_to_worker
from mstar.conductor.conductor import Conductor
from mstar.conductor.events import Event, RequestStream
from mstar.conductor.request import GenerateRequest, PromptInput
from mstar.conductor.request_table import RequestRecord
from mstar.conductor.walks import WalkDirectory
from mstar.conductor.workers import WorkerTable
from mstar.model.base import Model, PreparedPrompt

NO_PROMPT = PreparedPrompt(None)


@dataclass
class Timer:
    at: float
    callback: Callable[..., object]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class ManualTime:
    """Stands for clock and loop: `pass_time` runs the timers that fall due."""

    now: float = 100.0
    timers: list[Timer] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., object], *_: object) -> Timer:
        timer = Timer(self.now + delay, callback)
        self.timers.append(timer)
        return timer

    def pass_time(self, seconds: float) -> int:
        """Returns how many timers ran."""
        end, num_run = self.now + seconds, 0
        while due := [t for t in self.timers if not t.is_cancelled and t.at <= end]:
            timer = min(due, key=lambda t: t.at)
            self.timers.remove(timer)
            self.now = max(self.now, timer.at)
            timer.callback()
            num_run += 1
            assert num_run < 1000, "a timer arms itself again without end"
        self.now = end
        return num_run


class ConductorRig:
    """Workers of all ranks are up and ready in incarnation 0 unless `ranks_up` says otherwise."""

    def __init__(self, model: Model, placement: Mapping[str, int], **workers: Any) -> None:
        self.time = ManualTime()
        self.net = LoopbackNet()
        self.walks = WalkDirectory(model, placement)
        settings = {"watchdog_s": 10.0, "step_timeout_s": 60.0} | workers
        self.workers = WorkerTable(self.walks.all_ranks, **settings)
        self.num_ready_calls = 0
        self.num_shutdowns = 0
        self.conductor = Conductor(
            bus=self.net.bus(peer_name(FRONT_RANK), decode_to_front),
            walks=self.walks,
            workers=self.workers,
            loop=self.time,  # type: ignore[arg-type]
            clock=self.time.clock,
            on_ready=self._on_ready,
            on_shutdown=self._on_shutdown,
        )
        self.buses = {rank: self.net.bus(f"{peer_name(rank)}.0", decode_to_worker) for rank in self.walks.all_ranks}
        self._next_rid = 0

    def bring_up(self, *ranks: int, incarnation: int = 0) -> None:
        for rank in ranks or self.walks.all_ranks:
            address = f"{peer_name(rank)}.{incarnation}"
            if incarnation:
                self.buses[rank] = self.net.bus(address, decode_to_worker)
            ready = Ready(rank=rank, incarnation=incarnation, max_total_tokens=0)
            self.say(PeerUp(rank, incarnation, address), ready)

    def say(self, *messages: ToFront) -> None:
        """One pass over the inbox."""
        self.conductor.on_messages(messages)

    def beat(self, rank: int = 0, step_age_s: float = 0.0, **gauges: float) -> None:
        self.say(Heartbeat(rank=rank, incarnation=0, step_age_s=step_age_s, gauges=gauges))

    def submit(self, num_choices: int = 1, max_tokens: int = 8, prompt: PreparedPrompt = NO_PROMPT) -> RequestStream:
        """A request whose choices are started at once."""
        request = GenerateRequest("", (PromptInput("native"),), num_choices=num_choices)
        stream = RequestStream(request, self.time.now)
        self.conductor.num_waiting += num_choices
        for choice in range(num_choices):
            partitions, limits = self.walks.plan(prompt, max_tokens)
            record = RequestRecord(
                rid=f"r{self._next_rid}",
                stream=stream,
                choice=choice,
                num_prompt_tokens=5,
                step_metadata={},
                partitions=partitions,
                ranks=self.walks.ranks_of(partitions),
            )
            self._next_rid += 1
            self.conductor.start(record, OpenRequest(sampling=SamplingParams(max_tokens=max_tokens), limits=limits))
        self.conductor.flush()
        return stream

    def sent(self, rank: int = 0) -> list[Message]:
        """What the rank has received since the last call."""
        return list(self.buses[rank].receive())

    def emit(self, *rids: str, src: int = 0, token: int = 7, signal: str = "token") -> None:
        self.say(EmitFrame(src=src, rids=list(rids), signals=[signal], tokens=[token] * len(rids)))

    def done(
        self, rid: str, partition: str, emits: Mapping[str, int], *, rank: int = 0, reason: Any = "length"
    ) -> None:
        self.say(WalkDone(rid=rid, partition=partition, rank=rank, reason=reason, emits=dict(emits)))

    @staticmethod
    def events(stream: RequestStream) -> list[Event]:
        return stream.take_now()

    def _on_ready(self) -> None:
        self.num_ready_calls += 1

    def _on_shutdown(self) -> None:
        self.num_shutdowns += 1
