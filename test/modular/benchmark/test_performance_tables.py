"""The tables of the performance page are those of the measured files."""

import json

from benchmark.performance_tables import PAGE, rewritten

PAGE_TEXT = """Speed
=====

.. begin {table} engine-a
.. end

After.
"""
ROW = {
    "via": "engine",
    "sampling": "greedy",
    "inlen": 8,
    "outlen": 4,
    "itl_ms": 1.234,
    "ttft_ms": 5.06,
    "last_ttft_ms": 40.4,
}


def spread(value):
    return {name: {"median": value, "min": value - 10, "max": value + 10} for name in ("out_tok_s", "prefill_tok_s")}


def row(kind, conc, speed, **fields):
    return (
        ROW | {"kind": kind, "conc": conc, "out_tok_s": speed, "prefill_tok_s": speed, "spread": spread(speed)} | fields
    )


def cells(tmp_path, table, rows, peer=()):
    (tmp_path / "engine-a.json").write_text(json.dumps({"model": "a", "rows": rows}))
    (tmp_path / "engine-peer-h200.json").write_text(json.dumps({"models": {"a": list(peer)}}))
    page = rewritten(PAGE_TEXT.format(table=table), tmp_path)
    assert page.startswith("Speed\n=====\n\n.. begin") and page.endswith("\n.. end\n\nAfter.\n")
    assert rewritten(page, tmp_path) == page
    found = []
    for line in page.splitlines():
        if line.startswith("   * - "):
            found.append([line[7:]])
        elif line.startswith("     - "):
            found[-1].append(line[7:])
    return found[1:]


def test_rows_beside_the_peer(tmp_path):
    rows = [row("decode", 1, 1000.4), row("decode", 1, 900.0, via="http"), row("prefill", 8, 5000.0)]
    sizes = {"inlen": 8, "outlen": 4}
    peer = [
        {"kind": "decode", "conc": 1, "inlen": 9, "outlen": 4, "out_tok_s": 1},
        {"kind": "decode", "conc": 1, "out_tok_s": 250, **sizes},
        {"kind": "prefill", "conc": 8, "prefill_tok_s": 2000, **sizes},
    ]
    ends = ["5.1", "40.4"]
    assert cells(tmp_path, "decode", rows, peer) == [["1", "1,000", "990 to 1,010", "250", "4.00", "1.23", *ends]]
    assert cells(tmp_path, "prefill", rows, peer) == [["8", "5,000", "4,990 to 5,010", "2,000", "2.50", *ends]]


def test_precision(tmp_path):
    tokens = {"all": {"distance": 0.06092, "divergence": 0.001896, "same_largest": 0.842}}
    rows = [{"dtype": "bfloat16", "state_dtype": "float32", "tokens": tokens}]
    assert cells(tmp_path, "precision", rows) == [["bfloat16", "float32", "all", "6.09%", "0.00190", "84.2%"]]


def test_without_a_peer_there_is_no_column_for_it(tmp_path):
    assert cells(tmp_path, "decode", [row("decode", 1, 1000.0)]) == [
        ["1", "1,000", "990 to 1,010", "1.23", "5.1", "40.4"]
    ]


def test_other_ways_beside_the_plain_one(tmp_path):
    rows = [row("decode", 64, 1000.0), row("decode", 64, 800.0, sampling="t"), row("decode", 64, 925.0, via="http")]
    rows.append(row("decode", 64, 925.0, via="http", server=["server.x=2"]))
    assert cells(tmp_path, "ways", rows) == [
        ["64", "t", "800", "790 to 810", "80.0%", "1.23", "40"],
        ["64", "greedy, over HTTP", "925", "915 to 935", "92.5%", "1.23", "40"],
        ["64", "greedy, over HTTP, ``server.x=2``", "925", "915 to 935", "92.5%", "1.23", "40"],
    ]


def test_kernels_of_one_kind_are_added(tmp_path):
    kernels = [
        {"us": 30.0, "calls": 2.0, "name": "nvjet_tile_a"},
        {"us": 25.0, "calls": 2.0, "name": "void at::native::sort<float>(float*)"},
        {"us": 20.0, "calls": 1.0, "name": "nvjet_tile_b"},
    ]
    device = {"busy_us": 70.0, "launches": 5.0, "kernels": kernels}
    rows = [row("decode", 8, 1000.0, host_total_us=44.4, device=device), row("decode", 64, 1.0, host_total_us=1.0)]
    assert cells(tmp_path, "device", rows) == [["8", "greedy", "70", "5", "44", "library products 50, ``sort`` 25"]]


def test_the_page_is_that_of_the_files():
    page = PAGE.read_text()
    assert rewritten(page) == page, "run `python -m benchmark.performance_tables`"
