"""Lost and late frames on the loopback net of an instance.

A frame is one encoded message. Lost ones vanish on the way; the others of the same multipart message arrive. Late ones
wait with all that the same peer sends behind them: two sockets may run ahead of each other, one never does of itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.instance import Instance

from mstar.communication.loopback import LoopbackNet, Pair
from mstar.communication.messages import (
    EdgeFrame,
    EmitFrame,
    Message,
    Open,
    Opened,
    StartWalk,
    StreamFrame,
    ToFront,
    ToWorker,
    WalkDone,
)
from mstar.communication.wire import WireError, decode_to_front, decode_to_worker


@dataclass
class LostFrame:
    """Loses `times` messages of this kind, from the `after`-th on; with `rid` only such as name this request; with
    `sender` and `receiver` only those on the way between these two. `lost`: what vanished."""

    kind: type
    rid: str | None = None
    after: int = 0
    times: int = 1
    sender: str | None = None
    receiver: str | None = None
    lost: list[Message] = field(default_factory=list)
    num_matched: int = 0

    def takes(self, pair: Pair, message: Message) -> bool:
        if type(message) is not self.kind or (self.rid is not None and self.rid not in named_in(message)):
            return False
        if self.sender not in (None, pair[0]) or self.receiver not in (None, pair[1]):
            return False
        self.num_matched += 1
        if self.num_matched <= self.after or len(self.lost) >= self.times:
            return False
        self.lost.append(message)
        return True

    @property
    def rids(self) -> set[str]:
        """Requests that something was lost of."""
        return {rid for message in self.lost for rid in named_in(message)}


def named_in(message: Message) -> Sequence[str]:
    """Requests that a message is about."""
    match message:
        case EdgeFrame(rids=rids):
            return rids
        case StreamFrame(rids=rids, end_rids=ending):
            return [*rids, *ending]
        case EmitFrame(rids=rids, tensor_rids=more):
            return [*rids, *more]
        case Open(rid=rid) | Opened(rid=rid) | StartWalk(rid=rid) | WalkDone(rid=rid):
            return (rid,)
        case _:
            return ()


class FrameFaults:
    """Stands between the buses of an instance and their net."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._net: LoopbackNet = instance.net
        self._faults: list[LostFrame] = []
        self._carry = self._net.carry
        self._net.carry = self._carry_some

    def lose(self, fault: LostFrame) -> LostFrame:
        self._faults.append(fault)
        return fault

    def run_late(self, rng: random.Random, is_over: Callable[[], bool], max_ticks: int = 20000) -> int:
        """Ticks until `is_over`, while everything that is sent stays under way for some ticks: before each, a few
        messages arrive, of peers drawn at random. Returns how often a message overtook an older one of another peer."""
        self._net.hold()
        order: dict[Pair, list[int]] = {}
        clock = overtaken = 0
        sent = self._net.carry

        def stamped(pair: Pair, frames: list[bytes]) -> None:
            nonlocal clock
            clock += 1
            order.setdefault(pair, []).append(clock)
            sent(pair, frames)

        self._net.carry = stamped
        try:
            for _ in range(max_ticks):
                if is_over():
                    return overtaken
                for _ in range(rng.randint(0, 4)):
                    if not (pending := self._net.pending()):
                        break
                    pair = rng.choice(sorted(pending))
                    if self._net.deliver(*pair, 1) and order.get(pair):
                        stamp = order[pair].pop(0)
                        overtaken += any(waiting and waiting[0] < stamp for waiting in order.values())
                self._instance.tick()
            raise AssertionError(f"not over after {max_ticks} ticks")
        finally:
            self._net.carry = sent
            self._net.unhold()

    def clear(self) -> None:
        """No frame is lost any more."""
        self._faults.clear()
        self._net.carry = self._carry

    def _carry_some(self, pair: Pair, frames: list[bytes]) -> None:
        kept = [frame for frame in frames if not self._loses(pair, frame)]
        if kept:
            self._carry(pair, kept)

    def _loses(self, pair: Pair, frame: bytes) -> bool:
        if not self._faults:
            return False
        message = _decoded(pair, frame)
        return message is not None and any(fault.takes(pair, message) for fault in self._faults)


def _decoded(pair: Pair, frame: bytes) -> ToFront | ToWorker | None:
    try:
        return decode_to_front(frame) if pair[1] == "front" else decode_to_worker(frame)
    except WireError:
        return None
