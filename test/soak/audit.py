"""What has to hold of a server: at every sample, and at quiet points everything at its baseline.

Gauges are what `/metrics` says, at most a heartbeat old; the rest is the kernel's account of the processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil

from soak.exchange import CutOffError, Exchange
from soak.process_facts import ProcessFacts, instance_of, look_at, shared_memory_bytes

SAMPLE_S = 0.2
HEARTBEAT_S = 0.3
"""Age that a gauge may have."""
IDLE_BOUND_S = 1.0
"""Steps have to advance within that while something waits; heartbeats and the sample's own delay come on top."""
RETURN_BOUND_S = 1.0
"""Everything is given back within that, plus a heartbeat."""
EMPTY = (
    "mstar_handles",
    "mstar_running_rows",
    "mstar_queue_depth",
    "mstar_tensors",
    "mstar_live_requests",
    "mstar_waiting_choices",
)
_PAGES = re.compile(r'mstar_(?:pages|slots)\{(?=.*pool="([^"]+)")(?=.*state="([^"]+)")')
_WAITING = re.compile(r"mstar_(queue_depth|\w*held\w*|\w*preempted\w*|waiting_rows)$")
RSS_SHARE, RSS_BYTES = 0.02, 20 << 20
RSS_FIRST, RSS_LAST = 100, 1000
"""Memory after so many requests is compared with that after so many."""

Gauges = dict[str, float]


class MemorySample(NamedTuple):
    num_requests: int
    pid: int
    rss_bytes: int


class Audit:
    """Of one server. `findings`: what did not hold."""

    def __init__(self, url: str, supervisor: int, sockets: Path) -> None:
        self.findings: list[str] = []
        self.latest: Gauges = {}
        self.num_samples = 0
        self.memory: dict[str, list[MemorySample]] = defaultdict(list)
        self.restarts_expected = 0
        self._url = url
        self._supervisor = supervisor
        self._instance = instance_of(sockets)
        self._totals: dict[str, float] = {}
        self._facts: ProcessFacts | None = None
        self._shared: dict[str, int] = {}
        self._still_since = time.monotonic()
        self._steps = -1.0
        self._sampled_at = time.monotonic()

    async def gauges(self) -> Gauges:
        reply = await Exchange(self._url).send("GET", "/metrics")
        samples: Gauges = {}
        for line in str(reply.body).splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples

    async def watch(self) -> None:
        """Samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            with contextlib.suppress(OSError, CutOffError):
                self._sample(await self.gauges())

    async def take_baseline(self) -> None:
        """Now, on a server that is warm and has nothing to do."""
        await asyncio.sleep(2 * HEARTBEAT_S)
        gauges = await self.gauges()
        self._totals = pool_totals(gauges)
        self._facts = look_at(self._supervisor)
        self._shared = shared_memory_bytes(self._instance)

    async def check_quiet(self, num_requests: int) -> None:
        """Everything that requests held has come back."""
        deadline = time.monotonic() + RETURN_BOUND_S + 2 * HEARTBEAT_S
        await asyncio.sleep(HEARTBEAT_S)
        while held := held_things(gauges := await self.gauges(), self._totals):
            if time.monotonic() > deadline:
                self.findings.append(f"held by nobody after {num_requests} requests: {held}")
                break
            await asyncio.sleep(0.05)
        self.latest = gauges
        restarts = gauges.get("mstar_worker_restarts_total", 0)
        if restarts != self.restarts_expected:
            self.findings.append(f"{restarts:.0f} workers were started again, {self.restarts_expected} were killed")
        await self._check_processes(num_requests)

    async def _check_processes(self, num_requests: int) -> None:
        assert self._facts is not None
        deadline = time.monotonic() + 8
        while True:
            try:
                facts = look_at(self._supervisor)
                shared = shared_memory_bytes(self._instance)
                more = differences(self._facts, facts) + more_shared_memory(self._shared, shared)
            except (psutil.NoSuchProcess, FileNotFoundError, KeyError) as error:
                facts, more = None, [f"a process ended: {error!r}"]
            if not more or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.25)
        self.findings += [f"after {num_requests} requests: {what}" for what in more]
        if facts is not None:
            for role, rss in facts.rss_bytes.items():
                self.memory[role].append(MemorySample(num_requests, facts.pids[role], rss))

    def check_memory(self) -> None:
        """Resident memory of every process after many requests, against that after the first hundred."""
        for role, samples in self.memory.items():
            early = [sample for sample in samples if sample.num_requests >= RSS_FIRST]
            if not early:
                continue
            first, last = early[0], samples[-1]
            bound = first.rss_bytes * (1 + RSS_SHARE) + RSS_BYTES
            if first.pid == last.pid and last.num_requests >= RSS_LAST and last.rss_bytes > bound:
                self.findings.append(
                    f"{role} grew from {first.rss_bytes >> 20} MiB after {first.num_requests} requests to "
                    f"{last.rss_bytes >> 20} MiB after {last.num_requests}"
                )

    def _sample(self, gauges: Gauges) -> None:
        self.num_samples += 1
        now = time.monotonic()
        late_s, self._sampled_at = now - self._sampled_at - SAMPLE_S, now
        restarted = gauges.get("mstar_worker_restarts_total", 0) != self.latest.get("mstar_worker_restarts_total", 0)
        self.latest = gauges
        for pool, total in pool_totals(gauges).items():
            if self._totals and pool in self._totals and total != self._totals[pool]:
                self._note_once(f"pages of {pool} are {total:.0f} in all, not {self._totals[pool]:.0f}")
        steps = num_steps(gauges)
        waiting = {name: value for name, value in gauges.items() if value > 0 and _WAITING.match(name)}
        # A sample that came late says that this machine was busy with something else.
        if not waiting or steps != self._steps or restarted or late_s > HEARTBEAT_S:
            self._steps, self._still_since = steps, now
        elif now - self._still_since > IDLE_BOUND_S + 2 * HEARTBEAT_S:
            self.findings.append(f"no step for {now - self._still_since:.1f} s while these wait: {waiting}; {gauges}")
            self._still_since = now

    def _note_once(self, finding: str) -> None:
        if finding not in self.findings:
            self.findings.append(finding)


def num_steps(gauges: Gauges) -> float:
    return sum(value for name, value in gauges.items() if name.startswith("mstar_steps_total"))


def pool_totals(gauges: Gauges) -> dict[str, float]:
    """Pages of each pool, whatever their state."""
    totals: dict[str, float] = defaultdict(float)
    for name, value in gauges.items():
        if match := _PAGES.match(name):
            totals[match[1]] += value
    return dict(totals)


def held_things(gauges: Gauges, totals: dict[str, float]) -> dict[str, float]:
    """What is not empty though nothing runs."""
    held = {name: gauges.get(name, -1) for name in EMPTY if gauges.get(name, -1) != 0}
    held |= {
        name: value
        for name, value in gauges.items()
        if value and (_WAITING.match(name) or ((match := _PAGES.match(name)) and match[2] not in ("free", "cached")))
    }
    return held | {pool: total for pool, total in pool_totals(gauges).items() if total != totals.get(pool, total)}


def differences(before: ProcessFacts, after: ProcessFacts) -> list[str]:
    """Processes that are not the same ones, and kinds of descriptors of which one has more than before."""
    found = []
    if before.pids.keys() != after.pids.keys():
        found.append(f"processes are {sorted(after.pids)}, they were {sorted(before.pids)}")
    for role, kinds in after.descriptors.items():
        for kind, count in kinds.items():
            known = before.descriptors[role][kind] if role in before.descriptors else count
            if count > known:
                found.append(f"{role} has {count} of {kind} open, it had {known}")
    return found


def more_shared_memory(before: dict[str, int], after: dict[str, int]) -> list[str]:
    if len(after) <= len(before):
        return []
    return [f"files in shared memory: {sorted(after)}, there were {sorted(before)}"]
