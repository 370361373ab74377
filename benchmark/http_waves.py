"""The client of `benchmark.engine_bench` over HTTP, a process of its own: rows of token ids that start together at a
running server, streamed, several times. One event loop; prints one JSON object."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
import uvloop

from mstar.bench.connection import ConnectionPool
from mstar.bench.load import Load, LoadKind, perform
from mstar.bench.openai_events import StreamReader
from mstar.bench.preflight import first_model
from mstar.bench.records import RequestRecord
from mstar.bench.workloads import PATHS, Api, WorkloadRequest

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Streamed completions of random token ids, each `outlen` tokens whatever the model says."""

    model: str
    inlen: int
    outlen: int
    vocab: int
    sampling: Mapping[str, float]

    def request(self, index: int) -> WorkloadRequest:
        ids = np.random.default_rng(index).integers(100, self.vocab - 100, self.inlen)
        body = {
            "model": self.model,
            "prompt": ids.tolist(),
            "max_tokens": self.outlen,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": index,
            **self.sampling,
        }
        return WorkloadRequest("tokens", PATHS[Api.COMPLETIONS], msgspec.json.encode(body))

    def reader(self, record: RequestRecord) -> StreamReader:
        return StreamReader(record)


async def run(url: str, prompts: TokenPrompts, rows: int, waves: int) -> dict[str, Any]:
    """One wave that warms up, then `waves`. Raises `RuntimeError` for a request that failed or ended early."""
    pool = ConnectionPool(url, None)
    try:
        prompts = TokenPrompts(await first_model(pool), prompts.inlen, prompts.outlen, prompts.vocab, prompts.sampling)
        load = Load(LoadKind.WAVE, rows, rows, 0.0, 0)
        found: list[dict[str, float]] = []
        for wave in range(waves + 1):
            cpu_s = time.process_time()
            records = await perform(pool, prompts, load, timeout_s=TIMEOUT_S, first_index=rows * wave)
            found.append(summarize(records, prompts, time.process_time() - cpu_s))
    finally:
        pool.close()
    return {"waves": found[1:], "tokens": rows * prompts.outlen * (waves + 1)}


def summarize(records: Sequence[RequestRecord], prompts: TokenPrompts, cpu_s: float) -> dict[str, float]:
    """Seconds from the start of a wave until the first and until every row has a token, and to the end."""
    errors = [record.error for record in records if record.error is not None]
    counts = {record.output_tokens for record in records}
    if errors or counts != {prompts.outlen}:
        raise RuntimeError(f"{len(errors)} requests failed ({errors[:1]}); rows have {counts} tokens")
    begin = min(record.scheduled_s for record in records)
    firsts = [record.chunk_s[0] - begin for record in records]
    return {
        "first_s": min(firsts),
        "all_first_s": max(firsts),
        "end_s": max(record.end_s for record in records) - begin,
        "client_cpu_us": cpu_s * 1e6 / (len(records) * prompts.outlen),
    }


def main(
    url: Annotated[str, typer.Option()],
    vocab: Annotated[int, typer.Option(help="Tokens of the model.")],
    rows: Annotated[int, typer.Option(min=1)] = 64,
    inlen: Annotated[int, typer.Option(min=1)] = 128,
    outlen: Annotated[int, typer.Option(min=2)] = 256,
    waves: Annotated[int, typer.Option(min=1)] = 5,
    sampling: Annotated[str, typer.Option(metavar="JSON", help="Fields of each request.")] = '{"temperature": 0}',
) -> None:
    """The server is there and serves token ids."""
    prompts = TokenPrompts("", inlen, outlen, vocab, json.loads(sampling))
    print(json.dumps(uvloop.run(run(url, prompts, rows, waves))))


if __name__ == "__main__":
    typer.run(main)
