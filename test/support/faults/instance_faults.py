"""The door: faults on a real in-process instance, and what must be true of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping

from support.faults.declared import HOOKS, Fault
from support.faults.engine_faults import EngineFaults
from support.instance import Instance

COUNTERS = ("_total", "_bucket", "_sum", "_count")


class InstanceFaults:
    """Installs engine faults on the workers of an instance, and remembers what its workers held before."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._engines = [EngineFaults(parts) for parts in instance.parts]
        self._baseline = [held_by(instance, rank) for rank in range(len(instance.parts))]

    def add(self, fault: Fault, target: str) -> Fault:
        """`target`: a node for a hook, the key of a resource for a stage; on whatever worker it is."""
        for parts, engine in zip(self.instance.parts, self._engines, strict=True):
            nodes = parts.engine._nodes
            here = target in nodes if fault.place in HOOKS else any(target in node.resources for node in nodes.values())
            if here:
                return engine.add(fault, target)
        raise LookupError(f"no worker has {target!r}")

    def ask_row_by_row(self, node: str) -> None:
        for parts, engine in zip(self.instance.parts, self._engines, strict=True):
            if node in parts.engine._nodes:
                engine.ask_row_by_row(node)

    def clear(self) -> None:
        for engine in self._engines:
            engine.clear()

    def assert_baseline(self) -> None:
        """Nothing is held that was not when the faults were put in: by gauges, and where gauges do not look."""
        for rank, before in enumerate(self._baseline):
            assert held_by(self.instance, rank) == before, f"worker {rank}"


def held_by(instance: Instance, rank: int) -> Mapping[str, float]:
    """What a worker holds now: its gauges but those that count what has been, staging slots in use, parked values,
    rows in steps, bytes and tickets of the arena, debts to peers. A cached page is as good as a free one."""
    parts = instance.parts[rank]
    inbox = parts.inbox
    held = {name: value for name, value in instance.gauges(rank).items() if not _counts(name)}
    for name in [name for name in held if 'state="cached"' in name]:
        free = name.replace("cached", "free")
        held[free] += held.pop(name)
    held["staging slots"] = sum(node.staging.num_in_use for node in parts.engine._nodes.values())
    held["leaving"] = len(inbox.leaving)
    held["parked"] = len(inbox._parking)
    held["rows in steps"] = int(inbox._requests.in_steps.sum())
    transport = inbox._transport
    if transport._arena is not None:
        held["tickets"] = transport._arena.num_tickets
        held["arena bytes in use"] = transport._arena.num_used_bytes
    held["parcels that wait"] = transport.num_waiting
    held["debts"] = len(transport._debts.peers())
    return held


def _counts(name: str) -> bool:
    return name.split("{")[0].endswith(COUNTERS)


def settle(instance: Instance, max_ticks: int = 5000) -> None:
    """Until nobody has anything to do.

    Raises:
        AssertionError: something is always to be done.
    """
    quiet = 0
    for _ in range(max_ticks):
        quiet = 0 if instance.tick() else quiet + 1
        if quiet == 3:
            return
    raise AssertionError(f"still busy after {max_ticks} ticks")
