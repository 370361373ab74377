"""Performs a load: sends requests when the arrivals say so and keeps a record of each."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass

from mstar.bench.arrivals import closed_loop, poisson, waves
from mstar.bench.connection import ConnectionClosed, ConnectionPool
from mstar.bench.records import RequestRecord
from mstar.bench.workloads import AnswerReader, Workload, WorkloadRequest


class LoadKind(enum.StrEnum):
    """closed: so many requests at all times; wave: so many at once, then the next; poisson: random arrivals."""

    CLOSED = "closed"
    WAVE = "wave"
    POISSON = "poisson"


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` counts for closed loops and waves, `rate` (requests per second) for Poisson arrivals."""

    kind: LoadKind
    num_requests: int
    concurrency: int
    rate: float
    seed: int


async def perform(
    pool: ConnectionPool, workload: Workload, load: Load, *, timeout_s: float, first_index: int = 0
) -> list[RequestRecord]:
    """Records in the order in which the requests were sent. Nothing is raised for a failed request: see its `error`."""
    records: list[RequestRecord] = []

    async def run_one(index: int, scheduled_s: float) -> None:
        request = workload.request(first_index + index)
        record = RequestRecord(request.kind, scheduled_s, variant=request.variant)
        records.append(record)
        await perform_one(pool, request, workload.reader(record), record, timeout_s)

    match load.kind:
        case LoadKind.CLOSED:
            await closed_loop(run_one, load.num_requests, load.concurrency)
        case LoadKind.WAVE:
            await waves(run_one, load.num_requests, load.concurrency)
        case LoadKind.POISSON:
            await poisson(run_one, load.num_requests, load.rate, load.seed)
    return records


async def perform_one(
    pool: ConnectionPool, request: WorkloadRequest, reader: AnswerReader, record: RequestRecord, timeout_s: float
) -> None:
    """One request; `reader` fills `record` with its answer."""
    record.sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s):
            response = await pool.post(request.path, request.body, reader)
        reader.close(response)
    except TimeoutError:
        record.error = f"no complete answer within {timeout_s:g} s"
    except (OSError, ConnectionClosed) as error:
        record.error = str(error) or type(error).__name__
    if record.end_s == 0.0:
        record.end_s = time.perf_counter()
