"""How the processes of an instance reach each other: named peers, one multipart message per call, nothing ever blocks.

A `Bus` belongs to one thread of one process. `ZmqBus` is what runs; `mstar.communication.loopback` has the one for
tests. It moves typed messages only (see `wire`), knows no request and keeps no order between different senders.

Queues towards a peer have no bound of their own: what may be under way is bounded by the requests admitted, and the
supervisor disconnects a peer that is gone, which drops its queue. So a send neither blocks nor is refused.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import zmq

from mstar.communication.messages import Message
from mstar.communication.wire import Frame, WireError, encode

logger = logging.getLogger(__name__)
M = TypeVar("M")

MAX_DRAINED = 512
"""Multipart messages that one `receive` takes at most, so that a flood cannot keep a loop from its own work."""


@dataclass(slots=True)
class BusCounters:
    """What went over a bus since it was made. A frame is one encoded message."""

    num_sent: int = 0
    """Multipart messages."""
    num_frames_sent: int = 0
    num_bytes_sent: int = 0
    largest_frame_bytes: int = 0
    num_dropped: int = 0
    """Multipart messages to a peer that is not connected."""
    num_frames_received: int = 0
    num_frames_refused: int = 0
    """Frames received that were no message for this process."""

    def add_sent(self, frames: Sequence[bytes]) -> None:
        sizes = [len(frame) for frame in frames]
        self.num_sent += 1
        self.num_frames_sent += len(sizes)
        self.num_bytes_sent += sum(sizes)
        self.largest_frame_bytes = max(self.largest_frame_bytes, *sizes)


class Bus(Protocol[M]):
    """`M` is what this process may receive."""

    counters: BusCounters

    def connect(self, peer: str, address: str) -> None:
        """Makes `peer` reachable; a new address for a known name replaces the old one and drops what it had queued.
        The peer may start to listen later."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forgets the peer and drops what is queued for it. An unknown name is no error: it is gone already."""
        ...

    def send(self, peer: str, messages: Sequence[Message]) -> bool:
        """One multipart message. False: the peer is not connected and nothing was sent. Messages to one peer arrive
        in the order they were sent in."""
        ...

    def receive(self) -> list[M]:
        """What has arrived, without waiting; up to `MAX_DRAINED` multipart messages. A frame that does not decode is
        logged, counted and left out, and nothing else with it."""
        ...

    def wait(self, timeout_s: float | None, extra_fds: Sequence[int] = ()) -> bool:
        """Blocks until a message has arrived or one of `extra_fds` is readable. False: the time is over. None waits
        without end. A signal does not end the wait: its handler sets a `Wakeup` that is among `extra_fds`."""
        ...

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callable[[list[M]], None]) -> None:
        """Hands what arrives to `callback`, in the loop's thread, until `close`."""
        ...

    def close(self, linger_s: float = 0.2) -> None:
        """Sends what is queued for at most `linger_s`, then lets go."""
        ...


def decode_frames(frames: Sequence[Frame], decode: Callable[[Frame], M], counters: BusCounters) -> list[M]:
    """The messages in these frames; a bad frame fails itself only."""
    messages = []
    for frame in frames:
        try:
            messages.append(decode(frame))
        except WireError as error:
            counters.num_frames_refused += 1
            logger.warning("refused a frame that begins %s: %s", bytes(frame[:16]).hex(" "), error)
    counters.num_frames_received += len(frames)
    return messages


class ZmqBus(Generic[M]):
    """A `Bus` over ZMQ: this process binds one PULL socket and connects one PUSH socket per peer."""

    def __init__(self, address: str | None, decode: Callable[[Frame], M]) -> None:
        """Listens at `address` (`None`: this bus only sends). `decode` is one of the decoders of `wire`.

        Raises:
            zmq.ZMQError: the address cannot be listened at.
        """
        self.address = address
        self.counters = BusCounters()
        self._decode = decode
        self._context = zmq.Context()
        self._peers: dict[str, zmq.Socket] = {}
        self._inbox: zmq.Socket | None = None
        self._poll = select.poll()
        self._polled: tuple[int, ...] = ()
        self._loop: asyncio.AbstractEventLoop | None = None
        if address is not None:
            self._inbox = self._make_socket(zmq.PULL)
            self._inbox.bind(address)
            self._poll.register(self._inbox.FD, select.POLLIN)

    def connect(self, peer: str, address: str) -> None:
        self.disconnect(peer)
        socket = self._make_socket(zmq.PUSH)
        socket.connect(address)
        self._peers[peer] = socket

    def disconnect(self, peer: str) -> None:
        socket = self._peers.pop(peer, None)
        if socket is not None:
            socket.close(linger=0)

    def send(self, peer: str, messages: Sequence[Message]) -> bool:
        socket = self._peers.get(peer)
        if socket is None:
            self.counters.num_dropped += 1
            return False
        frames = [encode(message) for message in messages]
        if not frames:
            return True
        for frame in frames[:-1]:
            socket.send(frame, zmq.SNDMORE | zmq.NOBLOCK)
        socket.send(frames[-1], zmq.NOBLOCK)
        self.counters.add_sent(frames)
        return True

    def receive(self) -> list[M]:
        inbox = self._inbox
        messages: list[M] = []
        if inbox is None:
            return messages
        for _ in range(MAX_DRAINED):
            if not self._has_arrived():  # cheaper than the exception of an empty socket
                break
            frames = inbox.recv_multipart(zmq.NOBLOCK)
            messages += decode_frames(frames, self._decode, self.counters)
        return messages

    def wait(self, timeout_s: float | None, extra_fds: Sequence[int] = ()) -> bool:
        inbox = self._inbox
        # The inbox's descriptor only tells of changes: what arrived before is asked for, or it would be slept over.
        if self._has_arrived():
            return True
        self._poll_also(tuple(extra_fds))
        inbox_fd = -1 if inbox is None else inbox.FD
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1e3)
            ready = self._poll.poll(left_ms)
            if not ready:
                return False
            for fd, event in ready:
                if event & select.POLLNVAL:
                    raise ValueError(f"wait on descriptor {fd}, which is closed")
                if fd != inbox_fd:
                    return True
            if self._has_arrived():
                return True

    def attach(self, loop: asyncio.AbstractEventLoop, callback: Callable[[list[M]], None]) -> None:
        inbox = self._inbox
        if inbox is None:
            raise ValueError("this bus has no address to receive at")

        def drain() -> None:
            if self._loop is None:
                return
            messages = self.receive()
            if messages:
                callback(messages)
            # A change is told once, so what is left over must be fetched without being told again.
            if self._has_arrived():
                loop.call_soon(drain)

        self._loop = loop
        loop.add_reader(inbox.FD, drain)
        loop.call_soon(drain)

    def close(self, linger_s: float = 0.2) -> None:
        if self._loop is not None and self._inbox is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._inbox.FD)
            self._loop = None
        if self._inbox is not None:
            self._inbox.close(linger=0)
            self._inbox = None
        for socket in self._peers.values():
            socket.close(linger=int(linger_s * 1e3))
        self._peers.clear()
        self._context.term()

    def _has_arrived(self) -> bool:
        return self._inbox is not None and bool(cast(int, self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _poll_also(self, fds: tuple[int, ...]) -> None:
        if fds == self._polled:
            return
        for fd in set(self._polled) - set(fds):
            self._poll.unregister(fd)
        for fd in fds:
            self._poll.register(fd, select.POLLIN)
        self._polled = fds

    def _make_socket(self, kind: int) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.linger = 0
        socket.reconnect_ivl = 20
        socket.reconnect_ivl_max = 100
        return socket
