"""The course of a soak of one target: start, warm up, rounds of traffic with a quiet point behind each, the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from support.server import Server, running

from soak.asks import Asks
from soak.audit import Audit
from soak.deployments import MAX_SEQ_LEN, Knobs, Target, choose_knobs, target_of, write_configs
from soak.exchange import CutOffError, Exchange
from soak.process_facts import roles
from soak.server_log import unexpected_records
from soak.traffic import Traffic
from soak.truth import Truth, composite_logits, llama_logits, tokens_of

ROUND_S, LEAST_ROUNDS = 12.0, 3
WARM_REQUESTS = 25
KILL_EVERY_S = (4.0, 10.0)
RECOVERY_BOUND_S = 60.0


@dataclass
class Verdict:
    """Of one target. `findings` empty: all held."""

    target: str
    knobs: Knobs
    kills: bool
    findings: list[str] = field(default_factory=list)
    num_requests: int = 0
    num_kills: int = 0
    num_compared: int = 0
    num_alone: int = 0
    accepted: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    gauges: dict[str, float] = field(default_factory=dict)
    memory_mib: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def soak_target(
    name: str,
    seconds: float,
    seed: int,
    directory: Path,
    *,
    kills: bool,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Verdict:
    """Two servers, `seconds` of traffic with its quiet points, and what was found. `fixed`: knobs that the seed does
    not choose."""
    rng = random.Random(f"{seed} {name}")
    target, knobs = target_of(name), replace(choose_knobs(rng), **fixed)
    directory.mkdir(parents=True, exist_ok=True)
    served, alone = write_configs(target, knobs, directory)
    verdict = Verdict(name, knobs, kills)
    # Short, because the paths of sockets are.
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        sockets = Path(base) / "a"
        with (
            running([str(served)], directory / "served.log", MSTAR_SOCKET_DIR=str(sockets)) as server,
            running([str(alone)], directory / "alone.log", MSTAR_SOCKET_DIR=str(Path(base) / "b")) as other,
        ):
            campaign = Campaign(target, knobs, rng, server, other, sockets, directory, verdict)
            asyncio.run(campaign.run(seconds))
            if (code := server.stop()) != 0:
                verdict.findings.append(f"the server ended with {code}")
            other.stop()
        verdict.findings += unexpected_records(directory / "served.log", had_kills=kills)
        if left := [path.name for path in sockets.iterdir()]:
            verdict.findings.append(f"left behind: {left}")
    return verdict


class Campaign:
    """See the module docstring."""

    def __init__(
        self,
        target: Target,
        knobs: Knobs,
        rng: random.Random,
        server: Server,
        alone: Server,
        sockets: Path,
        directory: Path,
        verdict: Verdict,
    ) -> None:
        self._server = server
        self._rng = rng
        self._verdict = verdict
        self._audit = Audit(server.url, server.pid, sockets)
        self._truth = Truth(
            alone.url, llama_logits(directory / "checkpoint") if target.name == "llama" else composite_logits()
        )
        self._knobs = knobs
        self._target = target

    async def run(self, seconds: float) -> None:
        verdict, audit = self._verdict, self._audit
        self._asks = asks = Asks(
            self._rng,
            vocab_size=self._target.vocab_size,
            room=self._knobs.room,
            max_seq_len=MAX_SEQ_LEN,
            has_chat=self._target.has_chat,
            accepts=await accepted_fields(self._server.url),
        )
        traffic = self._new_traffic(asks)
        await self._warm_up(asks)
        await audit.take_baseline()
        ends_at = time.monotonic() + seconds
        while not verdict.findings:
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                break
            await self._round(traffic, min(ROUND_S, seconds / LEAST_ROUNDS, left_s))
            await audit.check_quiet(traffic.num_sent)
            await self._compare(traffic)
            verdict.findings += audit.findings
            audit.findings = []
        audit.check_memory()
        verdict.findings += audit.findings
        if len(self._truth.accepted) > self._truth.num_allowed():
            verdict.findings.append(f"{len(self._truth.accepted)} texts part from theirs: {self._truth.accepted}")
        verdict.num_requests, verdict.counts = traffic.num_sent, traffic.counts
        verdict.num_compared, verdict.num_alone = self._truth.num_compared, self._truth.num_alone
        verdict.accepted, verdict.gauges = self._truth.accepted, audit.latest
        verdict.memory_mib = {
            role: [(sample.num_requests, sample.rss_bytes >> 20) for sample in samples]
            for role, samples in audit.memory.items()
        }

    async def _warm_up(self, asks: Asks) -> None:
        """Requests of every kind, so that what is made at a first use has been made; what came of them is not judged
        here."""
        warm = self._new_traffic(asks)
        while warm.num_sent < WARM_REQUESTS:
            await warm.run(0.5)

    def _new_traffic(self, asks: Asks) -> Traffic:
        knobs = self._knobs
        return Traffic(
            self._server.url,
            asks,
            self._rng,
            max_rows=knobs.max_rows,
            max_queue=knobs.max_queue,
            shares_prefixes=knobs.prefix_cache,
        )

    async def _round(self, traffic: Traffic, seconds: float) -> None:
        tasks = [asyncio.create_task(self._audit.watch())]
        if self._verdict.kills:
            traffic.had_kills = True
            tasks.append(asyncio.create_task(self._kill_workers(time.monotonic() + seconds)))
        try:
            await traffic.run(seconds)
        finally:
            for task in tasks[1:]:
                await task
            tasks[0].cancel()

    async def _kill_workers(self, until: float) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(*KILL_EVERY_S))
            if time.monotonic() > until - 1:
                break
            workers = [pid for role, pid in roles(self._server.pid).items() if role.startswith("worker")]
            os.kill(self._rng.choice(workers), signal.SIGKILL)
            self._verdict.num_kills += 1
            self._audit.restarts_expected += 1
            began = time.monotonic()
            await asyncio.sleep(0.5)
            while not await is_ready(self._server.url):
                if time.monotonic() - began > RECOVERY_BOUND_S:
                    self._verdict.findings.append(f"not ready {RECOVERY_BOUND_S:.0f} s after a worker was killed")
                    return
                await asyncio.sleep(0.2)

    async def _compare(self, traffic: Traffic) -> None:
        outcomes, traffic.outcomes = traffic.outcomes, []
        for outcome in outcomes:
            await self._truth.check(outcome)
            if outcome.wrong:
                self._verdict.findings.append(f"{'; '.join(outcome.wrong)}: {outcome}")
            elif outcome.is_done and outcome.ask.prompts:
                self._asks.answered(outcome.ask.prompts[0], tokens_of(outcome.texts[0]))


async def is_ready(url: str) -> bool:
    with contextlib.suppress(OSError, CutOffError):
        return (await Exchange(url).send("GET", "/ready")).status == 200
    return False


async def accepted_fields(url: str) -> set[str]:
    """Fields of a completion that the server's own schema lists with a value that may be given."""
    schema: Any = (await Exchange(url).send("GET", "/openapi.json")).body
    properties = schema["components"]["schemas"]["CompletionRequest"]["properties"]
    return {name for name, field in properties.items() if field.get("type") != "null"}
