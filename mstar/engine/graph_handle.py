"""`GraphHandle`: a computation over static buffers, recorded by whatever the device has for it.

Captured at start-up on the thread that loads, replayed on the executor. Must not know what it records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from mstar.engine.device_graph import DeviceGraph, GraphMemory
from mstar.kernels import ops
from mstar.kernels.tape import RecordError

log = logging.getLogger(__name__)


class GraphHandle:
    """A forward over static buffers, recorded once. `is_recorded`: replaying runs no Python of the forward."""

    def __init__(self) -> None:
        self._run: Callable[[], None] | None = None
        self.is_recorded = False

    def capture(self, run: Callable[[], None], memory: GraphMemory | None = None) -> None:
        """Run, and keep it for `replay`. `memory`: of the device's graphs, where the forward runs on one. What `run`
        raises ends start-up; on a CPU a forward that cannot be recorded is kept as the closure that it is."""
        if memory is not None and memory.on_device:
            self._run = DeviceGraph(memory, run).replay
            self.is_recorded = True
            return
        try:
            tape, _ = ops.record(run)
        except RecordError as error:
            log.debug("replayed as Python: %s", error)
        else:
            self._run = tape.replay
            self.is_recorded = True
            return
        run()
        self._run = run

    def replay(self) -> None:
        if self._run is None:
            raise RuntimeError("a graph is captured before it is replayed")
        self._run()
