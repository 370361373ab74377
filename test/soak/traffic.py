"""Clients: send asks, leave where an ask says so, and see to it that every request ends within a bound."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from soak.asks import Ask, Asks, Leave
from soak.exchange import CutOffError, Exchange
from soak.outcomes import Outcome, judge, read_reply

END_BOUND_S = 90.0
"""No request of these sizes may take longer, whatever happens to it."""
ENOUGH_WRONG = 20
"""Wrong answers that end the traffic: more of them say nothing more."""
REFUSED_PAUSE_S = {"queue_full": 0.25, "not_ready": 1.0}
"""Of the traffic after a refusal, by its code."""


class Traffic:
    """Requests to one server. `outcomes`: those that have ended and nobody has looked at. `had_kills`: workers are
    killed meanwhile."""

    def __init__(
        self, url: str, asks: Asks, rng: random.Random, *, max_rows: int, max_queue: int, shares_prefixes: bool
    ) -> None:
        self._url = url
        self._asks = asks
        self._rng = rng
        self._max_queue = max_queue
        self._shares_prefixes = shares_prefixes
        self._levels = (2, max_rows, max_rows + max_queue // 3, max_rows + max_queue)
        """Requests on their way that the traffic aims for; another one every so often."""
        self._paused_until = 0.0
        self._running: dict[asyncio.Task[None], Ask] = {}
        self._tag = rng.getrandbits(32)
        self.num_sent = 0
        self.outcomes: list[Outcome] = []
        self.counts: Counter[str] = Counter()
        self.had_kills = False
        self.num_wrong = 0

    async def run(self, seconds: float) -> None:
        """Requests for so long, then the end of all of them."""
        rng, ends_at = self._rng, time.monotonic() + seconds
        level, changes_at = self._levels[0], 0.0
        while (now := time.monotonic()) < ends_at and self.num_wrong < ENOUGH_WRONG:
            if now >= changes_at:
                level, changes_at = rng.choice(self._levels), now + rng.uniform(0.5, 3)
                if rng.random() < 0.15:
                    for ask in self._asks.long_pair():
                        self._start(ask)
                if rng.random() < 0.15:
                    for _ in range(self._max_queue + 12):
                        self._start(self._asks.draw())
            while len(self._running) < level and now >= self._paused_until:
                self._start(self._asks.draw())
            pause_s = rng.uniform(0.001, 0.05)
            if self._running:
                await asyncio.wait(self._running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(pause_s)
        if self._running:
            await asyncio.wait(self._running)

    def _start(self, ask: Ask) -> None:
        self.num_sent += 1
        outstanding = ask.num_choices + sum(other.num_choices for other in self._running.values())
        outcome = Outcome(ask, self.num_sent)
        task = asyncio.create_task(self._one(outcome, outstanding - self._max_queue))
        self._running[task] = ask
        task.add_done_callback(lambda task: self._running.pop(task, None))

    async def _one(self, outcome: Outcome, waiting_bound: int) -> None:
        ask, began = outcome.ask, time.monotonic()
        exchange = Exchange(self._url)
        enough = asyncio.Event()
        wanted = ask.leave.num_deltas if ask.leave is not None else 0

        def count() -> None:
            if wanted and len(exchange.reply.events) >= wanted:
                enough.set()

        name = f"soak-{self._tag}-{outcome.number}"
        body = {"model": "soak", **ask.fields}
        is_half = ask.leave is not None and ask.leave.how == "half"
        sending = asyncio.create_task(
            exchange.send("POST", f"/v1/{ask.route}", body, request_id=name, on_event=count, half=is_half)
        )
        try:
            async with asyncio.timeout(END_BOUND_S):
                if ask.leave is not None:
                    await self._leave(ask.leave, exchange, sending, enough, name, outcome)
                await sending
            read_reply(outcome, exchange.reply, is_whole=True)
        except TimeoutError:
            sending.cancel()
            outcome.wrong.append(f"has not ended after {END_BOUND_S:.0f} s")
        except (OSError, CutOffError) as error:
            read_reply(outcome, exchange.reply, is_whole=False)
            if outcome.ended != "left" and not self.had_kills:
                outcome.wrong.append(f"{type(error).__name__}: {error}")
        outcome.took_s = time.monotonic() - began
        judge(outcome, had_faults=True, had_kills=self.had_kills, waiting_bound=waiting_bound)
        if outcome.usage is not None and not self._shares_prefixes:
            if outcome.usage["prompt_tokens_details"]["cached_tokens"]:
                outcome.wrong.append(f"cached tokens without a prefix cache: {outcome.usage}")
        self.num_wrong += bool(outcome.wrong)
        self._count(outcome)
        self.outcomes.append(outcome)

    async def _leave(
        self,
        leave: Leave,
        exchange: Exchange,
        sending: asyncio.Task,
        enough: asyncio.Event,
        name: str,
        outcome: Outcome,
    ) -> None:
        moment = asyncio.create_task(enough.wait())
        await asyncio.wait((sending, moment), timeout=leave.after_s, return_when=asyncio.FIRST_COMPLETED)
        moment.cancel()
        if sending.done():
            return
        if leave.how == "delete":
            await Exchange(self._url).send("DELETE", f"/v1/requests/{name}")
            return
        outcome.ended = "left"
        exchange.leave(reset=leave.how == "resets")
        if not sending.done():
            sending.cancel()
            await asyncio.wait((sending,))
            raise CutOffError("the client left")

    def _count(self, outcome: Outcome) -> None:
        error = outcome.error
        if error is not None and error["code"] in REFUSED_PAUSE_S:
            self._paused_until = time.monotonic() + REFUSED_PAUSE_S[error["code"]]
        self.counts[outcome.ended if error is None else f"{outcome.ended}: {error['code']}"] += 1
        if outcome.ask.leave is not None:
            self.counts[f"leaves: {outcome.ask.leave.how}"] += 1
        if outcome.ask.fault is not None:
            self.counts[f"asks for fault: {outcome.ask.fault.name}"] += 1
