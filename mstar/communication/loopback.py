"""A network inside one process, for tests and runs without processes: real frames, and faults on demand.

Any thread may send and receive: every bus is used by one thread, and they share one `LoopbackNet`. It takes the place
of `ZmqBus` behind the same protocol. An address is whatever text a bus was made with.
"""

from __future__ import annotations

import asyncio
import random
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mstar.communication.bus import MAX_DRAINED, BusCounters, decode_frames
from mstar.communication.messages import Message
from mstar.communication.wakeup import Wakeup
from mstar.communication.wire import Frame, encode

M = TypeVar("M")
Pair = tuple[str, str]
"""(sender's address, receiver's address)."""


class LoopbackNet:
    """Who is reachable, and what is under way. Order between two buses is kept, as it is between two sockets; order
    between different senders is not promised, and `deliver_shuffled` takes the freedom."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buses: dict[str, LoopbackBus] = {}
        self._under_way: dict[Pair, deque[list[bytes]]] = {}
        self._held: set[Pair] = set()
        self._holds_all = False

    def bus(self, address: str, decode: Callable[[Frame], M]) -> LoopbackBus[M]:
        """A bus that listens at `address`; what was sent there before it existed arrives first."""
        made = LoopbackBus(self, address, decode)
        with self._lock:
            self._buses[address] = made
        self._settle()
        return made

    def hold(self, sender: str | None = None, receiver: str | None = None) -> None:
        """From now on keeps what is sent between two addresses, or, without arguments, everything."""
        with self._lock:
            if sender is None or receiver is None:
                self._holds_all = True
            else:
                self._held.add((sender, receiver))

    def unhold(self) -> None:
        """Delivers what is held, and holds nothing any more."""
        with self._lock:
            self._held.clear()
            self._holds_all = False
        self._settle()

    def deliver(self, sender: str, receiver: str, count: int | None = None) -> int:
        """Delivers the `count` oldest held multipart messages of a pair (all by default); returns how many."""
        return self._move((sender, receiver), count)

    def deliver_shuffled(self, rng: random.Random) -> int:
        """Delivers everything held in a random order that keeps each pair's own; returns how many."""
        num_delivered = 0
        while pairs := self.pending():
            num_delivered += self._move(rng.choice(sorted(pairs)), 1)
        return num_delivered

    def drop(self, sender: str, receiver: str, count: int | None = None) -> int:
        """Loses the `count` oldest held multipart messages of a pair (all by default); returns how many."""
        with self._lock:
            queue = self._under_way.get((sender, receiver), deque())
            num_lost = len(queue) if count is None else min(count, len(queue))
            for _ in range(num_lost):
                queue.popleft()
        return num_lost

    def corrupt(self, sender: str, receiver: str, frame: bytes) -> None:
        """Puts bytes under way that no sender encoded."""
        self.carry((sender, receiver), [frame])

    def pending(self) -> dict[Pair, int]:
        """Multipart messages under way to a bus that exists, by pair."""
        with self._lock:
            return {pair: len(queue) for pair, queue in self._under_way.items() if queue and pair[1] in self._buses}

    def carry(self, pair: Pair, frames: list[bytes]) -> None:
        """What buses send through."""
        with self._lock:
            self._under_way.setdefault(pair, deque()).append(frames)
        self._settle()

    def lose(self, pair: Pair) -> None:
        """Drops what is under way between two addresses."""
        with self._lock:
            self._under_way.pop(pair, None)

    def leave(self, address: str) -> None:
        with self._lock:
            self._buses.pop(address, None)

    def _settle(self) -> None:
        for pair in self.pending():
            if not self._holds_all and pair not in self._held:
                self._move(pair, None)

    def _move(self, pair: Pair, count: int | None) -> int:
        with self._lock:
            queue, bus = self._under_way.get(pair), self._buses.get(pair[1])
            if not queue or bus is None:
                return 0
            num_moved = len(queue) if count is None else min(count, len(queue))
            for _ in range(num_moved):
                bus.inbox.append(queue.popleft())
            bus.arrived.set()  # under the lock: a bus closes its descriptor only after it has left
        return num_moved


class LoopbackBus(Generic[M]):
    """A `Bus` on a `LoopbackNet`. Made by `LoopbackNet.bus`."""

    def __init__(self, net: LoopbackNet, address: str, decode: Callable[[Frame], M]) -> None:
        self.address = address
        self.counters = BusCounters()
        self.inbox: deque[list[bytes]] = deque()
        self.arrived = Wakeup()
        self._net = net
        self._decode = decode
        self._peers: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def connect(self, peer: str, address: str) -> None:
        self.disconnect(peer)
        self._peers[peer] = address

    def disconnect(self, peer: str) -> None:
        address = self._peers.pop(peer, None)
        if address is not None:
            self._net.lose((self.address, address))

    def send(self, peer: str, messages: Sequence[Message]) -> bool:
        address = self._peers.get(peer)
        if address is None:
            self.counters.num_dropped += 1
            return False
        frames = [encode(message) for message in messages]
        if frames:
            self._net.carry((self.address, address), frames)
            self.counters.add_sent(frames)
        return True

    def receive(self) -> list[M]:
        self.arrived.clear()
        messages: list[M] = []
        for _ in range(MAX_DRAINED):
            if not self.inbox:
                break
            messages += decode_frames(self.inbox.popleft(), self._decode, self.counters)
        if self.inbox:
            self.arrived.set()
        return messages

    def wait(self, timeout_s: float | None, extra_fds: Sequence[int] = ()) -> bool:
        if self.inbox:
            return True
        poll = select.poll()
        for fd in (self.arrived.fileno(), *extra_fds):
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1e3))

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callable[[list[M]], None]) -> None:
        def drain() -> None:
            messages = self.receive()
            if messages:
                callback(messages)

        self._loop = loop
        loop.add_reader(self.arrived.fileno(), drain)

    def close(self, linger_s: float = 0.2) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.arrived.fileno())
            self._loop = None
        self._net.leave(self.address)
        self.arrived.close()
