"""A scripted worker: a real peer on a real bus, with a script where a model would be.

It opens, runs, stops and removes requests as a worker does, one token of every running request per step, one message
per step; `script` says which tokens a request samples. It ends a request at its end tokens and limits and reports exact
counts. It runs on an asyncio loop, its own or the front's.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from mstar import __version__
from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.bus import Bus
from mstar.communication.host_tensors import from_numpy
from mstar.communication.messages import (
    AskSteps,
    EmitFrame,
    Fail,
    Heartbeat,
    Hello,
    HostTensor,
    Message,
    Open,
    Opened,
    OpenRequest,
    PeerUp,
    Ready,
    Remove,
    SamplingParams,
    StartWalk,
    StepReport,
    Stop,
    TokenLogprobs,
    ToWorker,
    WalkDone,
)
from mstar.communication.wire import schema_hash

BEAT_S = 0.1
EMBEDDING = np.full(4, 0.5, np.float32)
Script = Callable[[OpenRequest], Iterable[int]]


def endless(_: object) -> Iterator[int]:
    """A script: one token again and again."""
    return iter(lambda: 300, None)


@dataclass
class Row:
    """One running request. It samples `tokens` until an end token, `max_tokens` or `Stop`."""

    start: StartWalk
    sampling: SamplingParams
    tokens: Iterator[int]
    num_computed_tokens: int
    num_sampled: int = 0
    is_stopped: bool = False


@dataclass
class FakeWorker:
    """`signal`: the emitted signal. `step_s`: pause between steps. `is_paused`: no steps while true. `is_silent`:
    no heartbeats. `embedding`: of requests for one (None: they wait for ever). `num_queued`: requests that it says
    wait for room. `num_cached`: prompt tokens that a request finds computed. `report`: what it answers who asks for
    its steps; None: nothing. `received`: every message from the front. `num_open`: requests that hold something
    here. `more_gauges`: reported with each heartbeat, beside its own."""

    bus: Bus[ToWorker]
    script: Script
    rank: int = 0
    incarnation: int = 0
    signal: str = "token"
    step_s: float = 0.0
    is_paused: bool = False
    is_silent: bool = False
    is_ended: bool = False
    max_total_tokens: int = 0
    num_queued: int = 0
    num_cached: Callable[[OpenRequest], int] = lambda _: 0
    logprobs: Callable[[int, SamplingParams], TokenLogprobs | None] | None = None
    report: StepReport | None = None
    embedding: Callable[[OpenRequest], HostTensor] | None = lambda _: from_numpy(EMBEDDING)
    received: list[ToWorker] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    more_gauges: dict[str, float] = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop | None = None
    _is_due: bool = False

    @property
    def num_open(self) -> int:
        return len(self.opened)

    def run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Introduces itself and serves; the bus must know the front."""
        self._loop = loop
        self.bus.attach(loop, self._on_messages)
        hello = Hello(
            rank=self.rank, incarnation=self.incarnation, version=__version__, schema_hash=schema_hash(), pid=1
        )
        ready = Ready(rank=self.rank, incarnation=self.incarnation, max_total_tokens=self.max_total_tokens)
        self.say(hello, ready)
        self._keep_beating()

    def say(self, *messages: Message) -> None:
        self.bus.send(peer_name(FRONT_RANK), messages)

    def beat(self, step_age_s: float = 0.0) -> None:
        if self.is_silent:
            return
        gauges = {
            "mstar_handles": float(self.num_open),
            "mstar_queue_depth": float(self.num_queued),
            "mstar_running_rows": float(len(self.rows)),
            'mstar_pages{pool="kv",state="owned"}': float(self.num_open),
            'mstar_pages{pool="kv",state="free"}': 100.0 - self.num_open,
            'mstar_steps_total{kind="fresh"}': 1.0,
            **self.more_gauges,
        }
        self.say(Heartbeat(rank=self.rank, incarnation=self.incarnation, step_age_s=step_age_s, gauges=gauges))

    def _keep_beating(self) -> None:
        if self._loop is not None and not self.is_ended:
            self.beat()
            self._loop.call_later(BEAT_S, self._keep_beating)

    def fail(self, rid: str, message: str, code: int = 500) -> None:
        self.rows.pop(rid, None)
        self.say(Fail(rid=rid, message=message, code=code))

    def resume(self) -> None:
        self.is_paused = False
        self._schedule()

    def step(self) -> None:
        """Every running request samples one token."""
        self._is_due = False
        rids: list[str] = []
        tokens: list[int] = []
        entries: list[TokenLogprobs | None] = []
        done: list[Message] = []
        for rid, row in list(self.rows.items()):
            token = None if row.is_stopped else next(row.tokens, None)
            if token is not None:
                row.num_sampled += 1
                rids.append(rid)
                tokens.append(token)
                entries.append(None if self.logprobs is None else self.logprobs(token, row.sampling))
            reason = self._end(row, token)
            if reason is not None:
                del self.rows[rid]
                done.append(
                    WalkDone(
                        rid=rid,
                        partition=row.start.partition,
                        rank=self.rank,
                        reason=reason,
                        emits={self.signal: row.num_sampled} if row.num_sampled else {},
                        num_computed_prompt_tokens=row.num_computed_tokens,
                    )
                )
        frames: list[Message] = []
        if rids:
            logprobs = entries if self.logprobs is not None else None
            frames.append(EmitFrame(src=self.rank, rids=rids, signals=[self.signal], tokens=tokens, logprobs=logprobs))
        if frames or done:
            self.say(*frames, *done)
        if self.rows:
            self._schedule()

    @staticmethod
    def _end(row: Row, token: int | None):
        if token is None:
            return "stop"
        if token in row.sampling.stop_token_ids and row.num_sampled > row.sampling.min_tokens:
            return "stop"
        return "length" if row.num_sampled >= row.sampling.max_tokens else None

    def _on_messages(self, messages: list[ToWorker]) -> None:
        for message in messages:
            self.received.append(message)
            match message:
                case Open(rid=rid):
                    self.opened.add(rid)
                    self.say(Opened(rid=rid, rank=self.rank))
                case StartWalk(rid=rid, walks=("embed",), open=OpenRequest() as opening):
                    self.opened.add(rid)
                    self._embed(message, opening)
                case StartWalk(rid=rid, open=OpenRequest() as opening):
                    self.opened.add(rid)
                    num_prompt = 0 if opening.prompt_ids is None else opening.prompt_ids.shape[0]
                    self.rows[rid] = Row(
                        message, opening.sampling, iter(self.script(opening)), num_prompt - self.num_cached(opening)
                    )
                case Stop(rid=rid):
                    if rid in self.rows:
                        self.rows[rid].is_stopped = True
                case Remove(rid=rid):
                    self.rows.pop(rid, None)
                    self.opened.discard(rid)
                    self.beat()
                case AskSteps(ask=ask):
                    if self.report is not None:
                        self.say(msgspec.structs.replace(self.report, ask=ask))
                case PeerUp(rank=rank, address=address):
                    self.bus.connect(peer_name(rank), address)
        if self.rows:
            self._schedule()

    def _embed(self, start: StartWalk, opening: OpenRequest) -> None:
        if self.embedding is None:
            return
        frame = EmitFrame(
            src=self.rank,
            rids=[],
            signals=[],
            tokens=[],
            tensor_rids=[start.rid],
            tensor_signals=["embedding"],
            tensors=[self.embedding(opening)],
        )
        done = WalkDone(
            rid=start.rid, partition=start.partition, rank=self.rank, reason="length", emits={"embedding": 1}
        )
        self.say(frame, done)

    def _schedule(self) -> None:
        if self._loop is not None and not self._is_due and not self.is_paused and self.rows:
            self._is_due = True
            self._loop.call_later(self.step_s, self._guarded_step)

    def _guarded_step(self) -> None:
        if self.is_paused:
            self._is_due = False
        else:
            self.step()
