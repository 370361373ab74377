"""From records to a report: percentiles of latencies, rates, failures by reason; as JSON or as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mstar.bench.composition import Composition
from mstar.bench.load import Load, LoadKind
from mstar.bench.records import RequestRecord

PERCENTS = (50, 90, 95, 99)


class Distribution(msgspec.Struct, frozen=True):
    """Of some latencies, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class TokenCounts(msgspec.Struct, frozen=True):
    """Per request."""

    min: int
    mean: float
    max: int
    total: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request, or all. Latencies are of requests that succeeded and count from when they were scheduled.

    `ttft_ms`: to the first chunk with output. `itl_ms`: between a request's chunks with output. `tpot_ms`: per request,
    (last chunk - first chunk) / (output tokens - 1), which a server that joins tokens in one chunk does not change.
    `e2e_ms`: to the end of the stream. `duration_s`: from the first arrival to the last end.
    `token_source`: "usage" where the server counted every request's tokens, "chunks" where chunks were counted instead.
    """

    requests: int
    succeeded: int
    failed: int
    failures: Mapping[str, int]
    duration_s: float
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    prompt_tokens: TokenCounts | None
    cached_tokens: TokenCounts | None
    output_tokens: TokenCounts | None
    token_source: str
    output_tok_s: float
    requests_s: float
    finish_reasons: Mapping[str, int]


class ClientCost(msgspec.Struct, frozen=True):
    """The load generator itself. `cpu_us_per_chunk`: its process time over the load, per chunk received.
    `max_lag_ms`: how late a request was sent at most; much of it says that the client, not the server, was measured."""

    cpu_us_per_chunk: float
    max_lag_ms: float
    peak_in_flight: int


class Report(Measured, frozen=True, kw_only=True):
    """All kinds together, then each."""

    url: str
    model: str
    api: str
    load: Load
    workload: Composition
    kinds: Mapping[str, Measured]
    client: ClientCost


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of an ascending sequence, linear between its neighbours (as numpy's default)."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(seconds: Iterable[float]) -> Distribution | None:
    """None when there is nothing to describe."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    values = [sum(ordered) / len(ordered), *(percentile(ordered, percent) for percent in PERCENTS), ordered[-1]]
    return Distribution(len(ordered), *(round(value * 1e3, 3) for value in values))


def measure(records: Sequence[RequestRecord]) -> Measured:
    good = [record for record in records if record.error is None]
    duration_s = max(r.end_s for r in records) - min(r.scheduled_s for r in records) if records else 0.0
    exact = bool(good) and all(record.output_tokens is not None for record in good)
    outputs = _counts(record.num_output_tokens for record in good)
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    return Measured(
        requests=len(records),
        succeeded=len(good),
        failed=len(records) - len(good),
        failures=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        duration_s=round(duration_s, 4),
        ttft_ms=distribution(record.ttft_s for record in good),
        itl_ms=distribution(
            later - earlier
            for record in good
            for earlier, later in zip(record.chunk_s, record.chunk_s[1:], strict=False)
        ),
        tpot_ms=distribution(
            (record.chunk_s[-1] - record.chunk_s[0]) / (record.num_output_tokens - 1)
            for record in good
            if record.num_output_tokens > 1
        ),
        e2e_ms=distribution(record.e2e_s for record in good),
        prompt_tokens=_counts(record.prompt_tokens for record in good if record.prompt_tokens is not None),
        cached_tokens=_counts(record.cached_tokens for record in good if record.cached_tokens is not None),
        output_tokens=outputs,
        token_source="usage" if exact else "chunks",
        output_tok_s=round((outputs.total if outputs else 0) * per_second, 2),
        requests_s=round(len(good) * per_second, 3),
        finish_reasons=dict(Counter(record.finish_reason or "none" for record in good)),
    )


def by_kind(records: Sequence[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Of each kind, and where a kind has several variants of each of them, as "kind, variant"."""
    kinds: dict[str, list[RequestRecord]] = {}
    for kind in sorted({record.kind for record in records}):
        kinds[kind] = [record for record in records if record.kind == kind]
        variants = sorted({record.variant for record in kinds[kind]})
        if len(variants) > 1:
            for variant in variants:
                kinds[f"{kind}, {variant}"] = [record for record in kinds[kind] if record.variant == variant]
    return kinds


def build_report(
    records: Sequence[RequestRecord],
    *,
    url: str,
    model: str,
    api: str,
    load: Load,
    workload: Composition,
    cpu_s: float,
) -> Report:
    """`cpu_s`: process time that the load took here."""
    kinds = {name: measure(some) for name, some in by_kind(records).items()}
    chunks = sum(len(record.chunk_s) for record in records)
    client = ClientCost(
        cpu_us_per_chunk=round(cpu_s * 1e6 / chunks, 2) if chunks else 0.0,
        max_lag_ms=round(max((r.sent_s - r.scheduled_s for r in records), default=0.0) * 1e3, 3),
        peak_in_flight=peak_in_flight(records),
    )
    together = msgspec.structs.asdict(measure(records))
    return Report(**together, url=url, model=model, api=api, load=load, workload=workload, kinds=kinds, client=client)


def peak_in_flight(records: Iterable[RequestRecord]) -> int:
    """The most requests that were under way at once."""
    changes = sorted(change for record in records for change in ((record.sent_s, 1), (record.end_s, -1)))
    peak = running = 0
    for _, step in changes:
        running += step
        peak = max(peak, running)
    return peak


def report_text(report: Report) -> str:
    """For people."""
    load = report.load
    how = (
        f"Poisson, {load.rate:g} requests/s"
        if load.kind is LoadKind.POISSON
        else f"{load.kind}, {load.concurrency} at once"
    )
    lines = [
        f"{report.model} at {report.url}, {report.api}, {how}; {report.workload.described}",
        f"{report.succeeded} of {report.requests} requests succeeded in {report.duration_s:.2f} s; "
        f"{report.output_tok_s:.1f} output tokens/s, {report.requests_s:.2f} requests/s",
    ]
    lines += [f"  failed {count}x: {reason}" for reason, count in report.failures.items()]
    for kind, measured in report.kinds.items():
        lines.append(f"{kind:<20}{'mean':>10}{'p50':>10}{'p90':>10}{'p95':>10}{'p99':>10}{'max':>10}  ms")
        for name in ("ttft", "itl", "tpot", "e2e"):
            d: Distribution | None = getattr(measured, f"{name}_ms")
            if d is not None:
                lines.append(
                    f"  {name:<18}" + "".join(f"{v:>10.2f}" for v in (d.mean, d.p50, d.p90, d.p95, d.p99, d.max))
                )
        lines.append(
            f"  {measured.succeeded} of {measured.requests} succeeded; {measured.output_tok_s:.1f} output tokens/s"
        )
        for name, counts in (
            ("prompt tokens", measured.prompt_tokens),
            ("of them cached", measured.cached_tokens),
            ("output tokens", measured.output_tokens),
        ):
            if counts is not None:
                lines.append(f"  {name}: {counts.total}, {counts.min} to {counts.max} per request")
        if measured.token_source == "chunks":
            lines.append("  the server gave no usage: output tokens are counted as chunks")
    lines.append(
        f"client: {report.client.cpu_us_per_chunk:.1f} us of CPU per chunk, sent at most "
        f"{report.client.max_lag_ms:.1f} ms late, {report.client.peak_in_flight} in flight at most"
    )
    return "\n".join(lines)


def _counts(values: Iterable[int]) -> TokenCounts | None:
    counts = list(values)
    if not counts:
        return None
    return TokenCounts(min(counts), round(sum(counts) / len(counts), 2), max(counts), sum(counts))
