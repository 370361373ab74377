"""Before a load: which model the server has, whether it counts tokens and takes images, and how many words make a
prompt."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec

from mstar.bench.connection import OK, UNAUTHORIZED, ConnectionClosed, ConnectionPool
from mstar.bench.images import ImageChoice, ImageSize
from mstar.bench.load import perform_one
from mstar.bench.openai_events import NO_OUTPUT, body_text
from mstar.bench.prompts import of_words, words_for
from mstar.bench.records import RequestRecord
from mstar.bench.workloads import ImageToText, TextToText, Workload

FEW_WORDS = 8


class PreflightError(Exception):
    """The server cannot be measured; the message says why."""


class _Entry(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    data: list[_Entry]


async def first_model(pool: ConnectionPool) -> str:
    """The first model that the server lists."""
    try:
        response = await pool.get("/v1/models")
    except (OSError, ConnectionClosed) as error:
        reason = f"{pool.url} does not answer: {error}; mstar serve starts a server, --url names another"
        raise PreflightError(reason) from error
    if response.status == UNAUTHORIZED:
        raise PreflightError(f"{pool.url} asks for a key; give one with --api-key")
    if response.status != OK:
        raise PreflightError(f"the server lists no models (HTTP {response.status}: {body_text(response.body)})")
    try:
        return msgspec.json.decode(response.body, type=_Listing).data[0].id
    except (msgspec.DecodeError, IndexError) as error:
        raise PreflightError("the server lists no models; name one with --model") from error


async def with_usage(pool: ConnectionPool, workload: TextToText, timeout_s: float) -> TextToText:
    """`workload`, without `include_usage` if the server refuses that.

    Raises:
        PreflightError: one request does not succeed either way.
    """
    record = await _probe(pool, replace(workload, max_tokens=1), timeout_s)
    if record.error is not None and record.error.startswith("HTTP 4"):
        plain = replace(workload, include_usage=False)
        if (await _probe(pool, replace(plain, max_tokens=1), timeout_s)).error is None:
            return plain
    if record.error is not None:
        raise PreflightError(f"a first request failed: {record.error}")
    return workload


async def words_of(pool: ConnectionPool, workload: TextToText, num_tokens: int, seed: int, timeout_s: float) -> int:
    """Words of a prompt of `num_tokens` tokens, by the server's own counts (one per token if it gives none).

    Raises:
        PreflightError: a probe failed, or the prompt template alone is longer.
    """
    probes: list[tuple[int, int]] = []
    for num_words in (FEW_WORDS, max(num_tokens, 2 * FEW_WORDS)):
        record = await _probe(pool, replace(workload, max_tokens=1, prompts=of_words(num_words, seed)), timeout_s)
        if record.error is not None:
            raise PreflightError(f"a probe of {num_words} words failed: {record.error}")
        if record.prompt_tokens is None:
            return num_tokens
        probes.append((num_words, record.prompt_tokens))
    if num_tokens < probes[0][1] - FEW_WORDS:
        raise PreflightError(
            f"--input-tokens {num_tokens} is less than the prompt template's own {probes[0][1] - FEW_WORDS} tokens; "
            "ask for more, or use --api completions"
        )
    return words_for(num_tokens, probes)


async def require_images(pool: ConnectionPool, workload: TextToText, timeout_s: float) -> None:
    """Raises `PreflightError` if a request with an image does not succeed."""
    image = ImageChoice((ImageSize(64, 64),), num_images=1, repeats=0.0, seed=workload.seed, num_requests=0)
    record = await _probe(pool, ImageToText(replace(workload, max_tokens=1), image), timeout_s)
    if record.error is not None:
        raise PreflightError(f"a first request with an image failed: {record.error}")


async def _probe(pool: ConnectionPool, workload: Workload, timeout_s: float) -> RequestRecord:
    """Its request -1. One token may show nothing: half a character, or a token that is no text."""
    request = workload.request(-1)
    record = RequestRecord(request.kind, time.perf_counter())
    await perform_one(pool, request, workload.reader(record), record, timeout_s)
    if record.error == NO_OUTPUT:
        record.error = None
    return record
