"""The front's end of the worker's socket, in a process of its own: drains frames and counts what they carry.

`python -m benchmark.worker_phases.consumer ADDRESS NUM_REQUESTS`: prints a line when it listens; ends when that many
requests have, and prints one JSON object. With `WORKER FRAMES EVERY` behind them it also sends: with every EVERY-th
emit frame the next start message of the file FRAMES to the worker's address, and a `Remove` for each of these requests
when it has ended, as the front does. They do not count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mstar.communication.address import peer_name
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import EmitFrame, Fail, Message, Remove, StartWalk, ToFront, WalkDone
from mstar.communication.wire import decode, decode_to_front, encode

ARRIVAL = "arrival-"
"""How the ids of requests begin that arrive while the others are measured."""
WORKER = peer_name(0)


class Consumed(msgspec.Struct):
    """`tokens_by_frame`: tokens of each emit frame, in order; a step sends one. `arrived`: start messages sent."""

    tokens_by_frame: list[int] = []
    ended: int = 0
    stops: int = 0
    arrived: int = 0
    failures: list[str] = []


class Arrivals:
    """Start messages that are sent as the worker goes on."""

    def __init__(self, bus: ZmqBus[ToFront], messages: Iterator[Message], every: int) -> None:
        self._bus = bus
        self._messages = messages
        self._every = every
        self._num_frames = 0
        self.num_sent = 0

    def frame_came(self) -> None:
        self._num_frames += 1
        if self._num_frames % self._every == 0 and (message := next(self._messages, None)) is not None:
            self._bus.send(WORKER, (message,))
            self.num_sent += 1

    def ended(self, rid: str) -> None:
        self._bus.send(WORKER, (Remove(rid),))


def write_arrivals(file: Path, starts: list[StartWalk]) -> None:
    """The file FRAMES."""
    file.write_bytes(msgspec.msgpack.encode([encode(start) for start in starts]))


def consume(bus: ZmqBus[ToFront], num_requests: int, arrivals: Arrivals | None) -> Consumed:
    """Until so many requests that did not arrive meanwhile have ended."""
    found = Consumed()
    while found.ended < num_requests:
        bus.wait(None)
        for message in bus.receive():
            match message:
                case EmitFrame():
                    found.tokens_by_frame.append(len(message.tokens))
                    if arrivals is not None:
                        arrivals.frame_came()
                case WalkDone(rid=rid) | Fail(rid=rid) if arrivals is not None and rid.startswith(ARRIVAL):
                    arrivals.ended(rid)
                    if isinstance(message, Fail):
                        found.failures.append(message.message)
                case WalkDone():
                    found.ended += 1
                    found.stops += message.reason == "stop"
                case Fail():
                    found.ended += 1
                    found.failures.append(message.message)
                case _:
                    pass
    found.arrived = 0 if arrivals is None else arrivals.num_sent
    return found


def main(address: str, num_requests: str, *more: str) -> None:
    bus: ZmqBus[ToFront] = ZmqBus(address, decode_to_front)
    arrivals = None
    if more:
        worker, frames, every = more
        bus.connect(WORKER, worker)
        messages = msgspec.msgpack.decode(Path(frames).read_bytes(), type=list[bytes])
        arrivals = Arrivals(bus, map(decode, messages), int(every))
    print("listening", flush=True)
    found = consume(bus, int(num_requests), arrivals)
    bus.close()
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
