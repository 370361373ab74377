"""A front reduced to its books: opens requests on workers, collects what they emit, and removes what has ended.

Speaks the product's messages over any bus; no HTTP, no text, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch

from mstar.communication import host_tensors
from mstar.communication.address import peer_name
from mstar.communication.bus import Bus
from mstar.communication.messages import (
    EmitFrame,
    Fail,
    Open,
    Opened,
    OpenRequest,
    Remove,
    SamplingParams,
    StartWalk,
    ToFront,
    TokenLogprobs,
    WalkDone,
)
from mstar.graph.program import CompiledGraph
from mstar.model.base import Model, PreparedPrompt

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Result:
    """What one request led to. `tensors`: emitted tensors by signal, in order. `failure`: the worker's message."""

    rid: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    aborted: bool = False
    expected_emits: dict[tuple[int, str], int] = field(default_factory=dict)
    received_emits: dict[tuple[int, str], int] = field(default_factory=dict)
    opening: OpenRequest | None = None
    starts: list[tuple[int, StartWalk]] = field(default_factory=list)
    num_opened: int = 0
    waiting: set[tuple[int, str]] = field(default_factory=set)

    @property
    def done(self) -> bool:
        if self.failure is not None or self.aborted:
            return True
        return not self.starts and not self.waiting and self.received_emits == self.expected_emits


class FrontBooks:
    """Workers are the ranks 0 to `num_workers - 1`, reachable on `bus` by their peer names."""

    def __init__(self, model: Model, compiled: CompiledGraph, num_workers: int, bus: Bus[ToFront]) -> None:
        self.model = model
        self.compiled = compiled
        self.results: dict[str, Result] = {}
        self._num_workers = num_workers
        self._bus = bus

    @property
    def done(self) -> bool:
        """Every request has ended."""
        return all(result.done for result in self.results.values())

    def submit(
        self,
        rid: str,
        prompt: PreparedPrompt,
        sampling: SamplingParams = GREEDY,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Result:
        """Start a request as the front would: open it everywhere, then start every partition on its workers."""
        plan = self.model.plan_walks(prompt, sampling.max_tokens)
        assert plan is not None
        opening = OpenRequest(
            sampling=sampling,
            prompt_ids=None if prompt.token_ids is None else host_tensors.from_numpy(prompt.token_ids),
            inputs={name: host_tensors.from_numpy(array) for name, array in prompt.inputs.items()},
            limits=dict(plan.limits),
            media=prompt.media,
            cache_salt=cache_salt,
            priority=priority,
            arrival=len(self.results),
        )
        result = self.results[rid] = Result(rid, opening=opening)
        for partition, walks in plan.partitions:
            for rank in self.compiled.ranks_of_partition(partition):
                result.waiting.add((rank, partition))
                result.starts.append((rank, StartWalk(rid=rid, partition=partition, walks=tuple(walks), last=True)))
        if self._num_workers == 1:
            self._start(result, opening)
        else:
            self._bus.send(peer_name(0), [Open(rid=rid, open=opening)])
        return result

    def lose(self) -> None:
        """A worker has gone: every request that has not ended had something there, and fails."""
        for result in self.results.values():
            if not result.done:
                result.failure = "a worker was lost"
                self._finish(result)

    def abort(self, rid: str) -> None:
        """The client has left; what still comes for it is ignored."""
        self.results[rid].aborted = True
        self._finish(self.results[rid])

    def _remove(self, rid: str) -> None:
        for worker_rank in range(self._num_workers):
            self._bus.send(peer_name(worker_rank), [Remove(rid)])

    def _start(self, result: Result, opening: OpenRequest | None) -> None:
        for rank, start in result.starts:
            message = start if opening is None else msgspec.structs.replace(start, open=opening)
            self._bus.send(peer_name(rank), [message])
        result.starts.clear()

    def read(self) -> bool:
        """Take what has arrived. False: nothing had."""
        messages = self._bus.receive()
        for message in messages:
            match message:
                case Opened(rid=rid):
                    result = self.results[rid]
                    if result.done:
                        continue  # the client has left meanwhile
                    result.num_opened += 1
                    if result.num_opened == self._num_workers:
                        self._start(result, None)
                    else:
                        assert result.opening is not None
                        self._bus.send(peer_name(result.num_opened), [Open(rid=rid, open=result.opening)])
                case EmitFrame():
                    self._emits(message)
                case WalkDone():
                    result = self.results[message.rid]
                    result.waiting.discard((message.rank, message.partition))
                    result.reasons[message.partition] = message.reason
                    for signal, count in message.emits.items():
                        result.expected_emits[message.rank, signal] = count
                    self._finish(result)
                case Fail(rid=rid, message=text):
                    self.results[rid].failure = text
                    self._finish(self.results[rid])
        return bool(messages)

    def _emits(self, frame: EmitFrame) -> None:
        signals = frame.signals * len(frame.rids) if len(frame.signals) == 1 else frame.signals
        for index, (rid, signal, token) in enumerate(zip(frame.rids, signals, frame.tokens, strict=True)):
            result = self.results[rid]
            result.tokens.append(token)
            result.logprobs.append(None if frame.logprobs is None else frame.logprobs[index])
            self._count(result, frame.src, signal)
        for rid, signal, tensor in zip(frame.tensor_rids, frame.tensor_signals, frame.tensors, strict=True):
            result = self.results[rid]
            result.tensors.setdefault(signal, []).append(host_tensors.to_torch(tensor).clone())
            self._count(result, frame.src, signal)

    def _count(self, result: Result, rank: int, signal: str) -> None:
        result.received_emits[rank, signal] = result.received_emits.get((rank, signal), 0) + 1
        self._finish(result)

    def _finish(self, result: Result) -> None:
        if result.done and result.opening is not None:
            result.opening = None
            self._remove(result.rid)
