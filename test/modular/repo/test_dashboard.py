"""The Grafana dashboard asks for metrics and labels that `docs/serving.rst` lists, which are those that are exported,
and shows every one of them. Its expressions are well formed as far as that can be told without Prometheus."""

import json
import re
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from support.repository import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "mstar.json").read_text())
METRICS = (ROOT / "docs" / "serving.rst").read_text().split("Metrics\n---")[1].split("\n---")[0]
HISTOGRAMS = {
    name for name, text in re.findall(r"^   \* - ``(\w+)``\n     - (.+)$", METRICS, re.MULTILINE) if "histogram" in text
}
ROW = re.compile(r"^   \* - ``(\w+)\{?([^}`]*)", re.MULTILINE)
DOCUMENTED = {name: {*labels.split(",")} - {""} for name, labels in ROW.findall(METRICS)}
PROCESS = {
    sample.name for family in ProcessCollector(registry=CollectorRegistry()).collect() for sample in family.samples
}
METRIC = re.compile(r"\b((?:mstar|process)_\w+)(\{[^}]*\})?")


def _panels() -> Iterator[dict]:
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            yield panel


QUERIES = [(panel["title"], target["expr"]) for panel in _panels() for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """Labels by the name of a sample."""
    samples = {name: labels for name, labels in DOCUMENTED.items() if name not in HISTOGRAMS}
    for name in HISTOGRAMS:
        samples |= {f"{name}_sum": set(), f"{name}_count": set(), f"{name}_bucket": {"le"}}
    return samples | {name: set() for name in PROCESS}


def test_what_is_compared_is_there():
    assert len(QUERIES) > 40 and len(HISTOGRAMS) == 4 and "process_open_fds" in PROCESS
    assert DOCUMENTED["mstar_pages"] == {"pool", "state"} and DOCUMENTED["mstar_queue_depth"] == set()


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_a_query_names_what_is_exported(title: str, expression: str):
    known, names = exported(), METRIC.findall(expression)
    assert names and {name for name, _ in names} <= known.keys(), title
    labels = {label for name, _ in names for label in known[name]} | {"instance"}
    for selector in (selector for _, selector in names if selector):
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= labels
        assert 'instance=~"$instance"' in selector
    for group in re.findall(r"by \(([^)]*)\)", expression):
        assert set(group.replace(" ", "").split(",")) <= labels
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")
    for name, _ in names:
        is_counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
        is_rated = re.search(rf"(rate|increase)\({name}\{{[^}}]*\}}\[\$__rate_interval\]\)", expression) is not None
        assert is_rated == is_counter, f"{title}: {name}"


@pytest.mark.parametrize("panel", list(_panels()), ids=lambda panel: panel["title"])
def test_legends_name_labels_that_are_kept(panel: dict):
    for target in panel["targets"]:
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        kept = {label for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in re.split(r",\s*", group)}
        assert shown <= kept and target["datasource"]["uid"] == "${datasource}"


def test_every_metric_is_shown():
    shown = {name for _, expression in QUERIES for name, _ in METRIC.findall(expression)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in DOCUMENTED if name not in families} == set()


def test_panels_do_not_overlap_and_have_names_of_their_own():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and all(x < 24 for x, _ in cells)
        taken |= cells
