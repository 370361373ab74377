"""A worker process for fault tests: `python -m support.transport_peer DIRECTORY INSTANCE INCARNATION MODE`.

Rank 1, with rank 0 as its peer and "r0" as its request. `read` prints a digest of each value and acknowledges; `hold`
prints it and never acknowledges; `send` sends 1 MiB and prints how large its frames were. Each waits for the end of its
standard input.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from support.linked_workers import LinkedWorker, routed

from mstar.communication import wire
from mstar.communication.address import socket_address
from mstar.communication.bus import ZmqBus

NUM_FLOATS = (1 << 20) // 4


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def main(directory: Path, instance: str, incarnation: int, mode: str) -> None:
    bus = ZmqBus(socket_address(directory, "w1", incarnation), wire.decode_to_worker)
    worker = LinkedWorker.build(bus, instance, 1, limit_bytes=8 << 20, incarnation=incarnation)
    handle = worker.rids.intern("r0")
    worker.meet(0, socket_address(directory, "w0", 1))
    print("up", flush=True)
    if mode == "send":
        ids = [worker.store.put(torch.arange(NUM_FLOATS, dtype=torch.float32))]
        worker.transport.send(routed(worker.store, 0, edges=[(handle, 3, ids)]))
        print(bus.counters.largest_frame_bytes, flush=True)
    stdin = sys.stdin.fileno()
    while True:
        bus.wait(None, [stdin])
        worker.pump(acknowledge=mode != "hold")
        for cols in worker.edges:
            print(*(digest(worker.store.get(tensor_id)) for tensor_id in cols.ids), flush=True)
        worker.free_arrived()
        if mode != "hold":
            worker.transport.rest()
        if not bus.wait(0) and bus.wait(0, [stdin]):
            break
    worker.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
