"""Writes the tables of `docs/performance.rst` from the files of `benchmark.engine_bench` and `state_precision`:
`python -m benchmark.performance_tables`. What stands between the marks of a table is replaced, nothing else.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.results import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.rst"
MARKED = re.compile(r"(?<=\.\. begin )(\w+) (\S+)\n.*?(?=\.\. end\n)", re.DOTALL)
PEER = "engine-peer-h200"
MOST_KERNELS = 7
FIRST, LAST = "first token, ms", "until all have a token, ms"

Row = Mapping[str, Any]


def decode_table(rows: Sequence[Row], peer: Sequence[Row]) -> Iterator[Sequence[str]]:
    """Rows that decode greedily in the process."""
    yield "rows", "output tok/s", "least to most", "peer", "ratio", "between tokens, ms", FIRST, LAST
    for row in _chosen(rows, kind="decode", via="engine", sampling="greedy"):
        other = _peer(peer, row, "out_tok_s")
        yield (
            str(row["conc"]),
            f"{row['out_tok_s']:,.0f}",
            _range(row, "out_tok_s"),
            *_against(row["out_tok_s"], other),
            f"{row['itl_ms']:.2f}",
            f"{row['ttft_ms']:.1f}",
            f"{row['last_ttft_ms']:.1f}",
        )


def prefill_table(rows: Sequence[Row], peer: Sequence[Row]) -> Iterator[Sequence[str]]:
    """Rows with long prompts."""
    yield "rows", "prompt tok/s", "least to most", "peer", "ratio", FIRST, LAST
    for row in _chosen(rows, kind="prefill"):
        other = _peer(peer, row, "prefill_tok_s")
        yield (
            str(row["conc"]),
            f"{row['prefill_tok_s']:,.0f}",
            _range(row, "prefill_tok_s"),
            *_against(row["prefill_tok_s"], other),
            f"{row['ttft_ms']:.1f}",
            f"{row['last_ttft_ms']:.1f}",
        )


def ways_table(rows: Sequence[Row], _peer: Sequence[Row]) -> Iterator[Sequence[str]]:
    """The same rows greedily in the process, sampled, and over HTTP."""
    yield "rows", "way", "output tok/s", "least to most", "of greedy in the process", "between tokens, ms", LAST
    plain = {row["conc"]: row for row in _chosen(rows, kind="decode", via="engine", sampling="greedy")}
    for row in _chosen(rows, kind="decode"):
        if row is not plain.get(row["conc"]):
            name = row["sampling"]
            if row["via"] == "http":
                name = ", ".join([name, "over HTTP", *(f"``{each}``" for each in row.get("server", ()))])
            like = plain.get(row["conc"])
            share = "" if like is None else f"{row['out_tok_s'] / like['out_tok_s']:.1%}"
            numbers = f"{row['out_tok_s']:,.0f}", _range(row, "out_tok_s"), share, f"{row['itl_ms']:.2f}"
            yield str(row["conc"]), name, *numbers, f"{row['last_ttft_ms']:.0f}"


def device_table(rows: Sequence[Row], _peer: Sequence[Row]) -> Iterator[Sequence[str]]:
    """A decode step: on the device, and on the host."""
    yield "rows", "tokens", "device busy, us", "launches", "host work, us", "longest kernels, us"
    for row in _chosen(rows, kind="decode", via="engine"):
        if (device := row.get("device")) is not None:
            numbers = f"{device['busy_us']:,.0f}", f"{device['launches']:.0f}", f"{row['host_total_us']:,.0f}"
            yield str(row["conc"]), _drawn(row), *numbers, _longest(device["kernels"])


def precision_table(rows: Sequence[Row], _peer: Sequence[Row]) -> Iterator[Sequence[str]]:
    """Of `benchmark.state_precision`: how far the logits are from those of fp32."""
    yield "model", "states", "tokens", "distance", "divergence, nats", "same largest logit"
    for row in rows:
        for part, means in row["tokens"].items():
            numbers = f"{means['distance']:.2%}", f"{means['divergence']:.5f}", f"{means['same_largest']:.1%}"
            yield row["dtype"], row["state_dtype"], part, *numbers


TABLES: Mapping[str, Callable[[Sequence[Row], Sequence[Row]], Iterator[Sequence[str]]]] = {
    "decode": decode_table,
    "prefill": prefill_table,
    "ways": ways_table,
    "device": device_table,
    "precision": precision_table,
}


def rewritten(page: str, results: Path = RESULTS) -> str:
    """`page` with its tables as the files have them."""
    peer = json.loads((results / f"{PEER}.json").read_text())["models"]

    def replace(match: re.Match[str]) -> str:
        found = json.loads((results / f"{match[2]}.json").read_text())
        cells = TABLES[match[1]](found["rows"], peer.get(found["model"], []))
        return f"{match[1]} {match[2]}\n\n{_list_table(list(cells))}\n"

    return MARKED.sub(replace, page)


def _list_table(rows: Sequence[Sequence[str]]) -> str:
    shown = [index for index in range(len(rows[0])) if any(row[index] for row in rows[1:])]
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        lines += [f"   {'* -' if place == 0 else '  -'} {row[index]}" for place, index in enumerate(shown)]
    return "\n".join(lines) + "\n"


def _chosen(rows: Sequence[Row], **fields: str) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def _peer(peer: Sequence[Row], row: Row, name: str) -> float | None:
    same = (each for each in peer if all(each[key] == row[key] for key in ("kind", "conc", "inlen", "outlen")))
    return next((each[name] for each in same), None)


def _against(value: float, other: float | None) -> tuple[str, str]:
    return ("", "") if other is None else (f"{other:,.0f}", f"{value / other:.2f}")


def _range(row: Row, name: str) -> str:
    return f"{row['spread'][name]['min']:,.0f} to {row['spread'][name]['max']:,.0f}"


def _drawn(row: Row) -> str:
    return "greedy" if row["sampling"] == "greedy" else "sampled"


def _longest(kernels: Sequence[Mapping[str, Any]]) -> str:
    totals: dict[str, float] = defaultdict(float)
    for one in kernels:
        totals[_short(one["name"])] += one["us"]
    longest = sorted(totals.items(), key=lambda item: -item[1])[:MOST_KERNELS]
    return ", ".join(f"{name} {us:.0f}" for name, us in longest)


def _short(kernel: str) -> str:
    """The name without its namespaces, arguments and what a library's tile sizes add."""
    name = kernel.split("<")[0].split("(")[0].removeprefix("void ").split("::")[-1]
    return "library products" if name.startswith("nvjet") else f"``{name}``"


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(rewritten(page))


if __name__ == "__main__":
    main()
