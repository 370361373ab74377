"""`/metrics`: the conductor's statistics and the workers' gauges in Prometheus' text form. Front loop only.

Nothing is kept here: families are made from plain numbers when somebody asks, in a registry of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from mstar.api_server.connection import FrontProtocol
from mstar.conductor.handle import ConductorHandle
from mstar.conductor.statistics import Histogram

_GAUGE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(\{(?P<labels>[^}]*)\})?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class FrontCollector(Collector):
    """Families of one front process."""

    def __init__(self, handle: ConductorHandle, responses: Mapping[int, int]) -> None:
        self._handle = handle
        self._responses = responses

    def collect(self) -> Iterator[Metric]:
        handle, statistics = self._handle, self._handle.statistics
        yield GaugeMetricFamily(
            "mstar_waiting_choices", "Choices that wait for their first output.", value=handle.num_waiting
        )
        yield GaugeMetricFamily("mstar_live_requests", "Requests that have not ended.", value=handle.num_live)
        yield CounterMetricFamily(
            "mstar_worker_restarts", "Worker processes started again.", value=handle.num_worker_restarts
        )
        yield CounterMetricFamily(
            "mstar_prompt_tokens", "Prompt tokens of requests started.", value=statistics.num_prompt_tokens
        )
        yield CounterMetricFamily(
            "mstar_generated_tokens", "Tokens received from workers.", value=statistics.num_generated_tokens
        )
        yield _counter("mstar_requests", "Choices by how they ended.", "outcome", statistics.outcomes.items())
        by_status = [(str(status), count) for status, count in self._responses.items()]
        yield _counter("mstar_http_responses", "Responses of all routes.", "status", by_status)
        yield GaugeMetricFamily("mstar_connections", "Open connections of clients.", value=FrontProtocol.num_open)
        yield CounterMetricFamily(
            "mstar_refused_connections", "Connections answered 503.", value=FrontProtocol.num_refused
        )
        yield _counter("mstar_refused_requests", "Requests not taken on.", "code", statistics.refusals.items())
        yield _histogram(
            "mstar_time_to_first_token_seconds", "From submission to a choice's first output.", statistics.first_token_s
        )
        yield _histogram(
            "mstar_inter_token_seconds", "Between two outputs of a choice, as received.", statistics.inter_token_s
        )
        yield _histogram(
            "mstar_request_seconds", "From submission to the end, requests that succeeded.", statistics.request_s
        )
        yield from worker_families(handle.worker_gauges().items())


def render(handle: ConductorHandle, responses: Mapping[int, int]) -> bytes:
    """`responses`: counts by status. The front process's own time, memory and descriptors go along, as the client
    library names them."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(FrontCollector(handle, responses))
    return generate_latest(registry)


def worker_families(gauges: Iterable[tuple[str, float]]) -> Iterator[Metric]:
    """Families of what workers report as `name{label="value"}`: a counter where the name ends in `_total`, a histogram
    where there are buckets, a gauge else."""
    samples = list(named_gauges(gauges))
    histograms = {name.removesuffix("_bucket") for name, _, _ in samples if name.endswith("_bucket")}
    families: dict[str, Metric] = {}
    for name, labels, value in samples:
        base, _, part = name.rpartition("_")
        if base in histograms and part in ("bucket", "sum", "count"):
            kind = "histogram"
        elif part == "total":
            kind = "counter"
        else:
            kind, base = "gauge", name
        if base not in families:
            families[base] = Metric(base, "Reported by the workers.", kind)
        families[base].add_sample(name, labels, value)
    yield from families.values()


def named_gauges(gauges: Iterable[tuple[str, float]]) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of each; what is not written as `name{label="value"}` is left out."""
    for text, value in gauges:
        if match := _GAUGE.fullmatch(text):
            found = _LABEL.findall(match["labels"] or "")
            yield match["name"], {key: re.sub(r"\\(.)", r"\1", label) for key, label in found}, value


def _counter(name: str, text: str, label: str, counts: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts:
        family.add_metric([value], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(name, text)
    below, buckets = 0, []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((bound, below))
    family.add_metric([], buckets, histogram.total)
    return family
