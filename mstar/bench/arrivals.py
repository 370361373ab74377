"""When requests start: closed loop, waves, or Poisson arrivals. Event-loop code; knows nothing of HTTP.

`run_one(index, scheduled_s)` performs request `index`; times are `time.perf_counter` seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable

RunOne = Callable[[int, float], Coroutine[None, None, None]]


async def closed_loop(run_one: RunOne, num_requests: int, concurrency: int) -> None:
    """`concurrency` requests at all times: each that ends is followed by the next."""
    indices = iter(range(num_requests))

    async def client() -> None:
        for index in indices:
            await run_one(index, time.perf_counter())

    await _all(client() for _ in range(min(concurrency, num_requests)))


async def waves(run_one: RunOne, num_requests: int, concurrency: int) -> None:
    """`concurrency` requests at once, and the next wave when the last of them has ended."""
    for begin in range(0, num_requests, concurrency):
        now = time.perf_counter()
        await _all(run_one(index, now) for index in range(begin, min(begin + concurrency, num_requests)))


async def poisson(run_one: RunOne, num_requests: int, rate: float, seed: int) -> None:
    """`rate` requests per second on average, with exponential gaps, whether or not earlier ones have ended."""
    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index, offset in enumerate(poisson_offsets(num_requests, rate, seed)):
            delay = start + offset - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            group.create_task(run_one(index, start + offset))


def poisson_offsets(num_requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start to each arrival; the first comes at once."""
    draw = random.Random(seed)
    offsets = [0.0]
    while len(offsets) < num_requests:
        offsets.append(offsets[-1] + draw.expovariate(rate))
    return offsets[:num_requests]


async def _all(coroutines: Iterable[Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for coroutine in coroutines:
            group.create_task(coroutine)
