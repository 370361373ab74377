"""The front's end of the worker's socket, in a process of its own: drains frames and counts what they carry.

`python -m benchmark.worker_phases.consumer ADDRESS NUM_REQUESTS`: prints a line when it listens; ends when that many
requests have, and prints one JSON object.
"""

from __future__ import annotations

import sys

import msgspec

from mstar.communication.bus import ZmqBus
from mstar.communication.messages import EmitFrame, Fail, ToFront, WalkDone
from mstar.communication.wire import decode_to_front


class Consumed(msgspec.Struct):
    """`tokens_by_frame`: tokens of each emit frame, in order; a step sends one."""

    tokens_by_frame: list[int] = []
    ended: int = 0
    stops: int = 0
    failures: list[str] = []


def consume(address: str, num_requests: int) -> Consumed:
    """Listen at `address` until every request has ended."""
    bus: ZmqBus[ToFront] = ZmqBus(address, decode_to_front)
    print("listening", flush=True)
    found = Consumed()
    while found.ended < num_requests:
        bus.wait(None)
        for message in bus.receive():
            match message:
                case EmitFrame():
                    found.tokens_by_frame.append(len(message.tokens))
                case WalkDone():
                    found.ended += 1
                    found.stops += message.reason == "stop"
                case Fail():
                    found.ended += 1
                    found.failures.append(message.message)
                case _:
                    pass
    bus.close()
    return found


if __name__ == "__main__":
    print(msgspec.json.encode(consume(sys.argv[1], int(sys.argv[2]))).decode())
