"""The ready index is first come first served, whatever is taken, given back or gated: against a sorted list."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from support.graph_bench import GraphBench, compile_one, emit, node

from mstar.graph.base import Loop
from mstar.graph.protocol import Gate, ReadyKey

KEY = ReadyKey("a", "w")


@given(st.integers(0, 2**32), st.integers(1, 60))
def test_rows_keep_their_place(seed: int, num_events: int) -> None:
    rng = random.Random(seed)
    bench = GraphBench(compile_one({"w": Loop(node("a", (), (emit("y"),)), 10**9, name="l")}))
    arrival: dict[int, int] = {}  # row → when it became ready
    gated: set[int] = set()
    running: set[int] = set()
    clock = 0
    for _ in range(num_events):
        event = rng.choice(("add", "add", "take", "give back", "complete", "gate", "ungate", "remove"))
        waiting = sorted((row for row in arrival if row not in gated | running), key=lambda row: arrival[row])
        rows = rng.sample(sorted(arrival), rng.randint(0, len(arrival)))
        if event == "add":
            clock += 1
            row = max(arrival, default=0) + 1
            arrival[row] = clock
            bench.add(row, walk="w")
        elif event == "take":
            rows = [row for row in rows if row in waiting]
            assert bench.graph.take(KEY, rows).rows == rows
            running.update(rows)
        elif event == "give back":
            rows = [row for row in rows if row in running]
            bench.graph.give_back(KEY, rows)
            running.difference_update(rows)
        elif event == "complete":
            rows = [row for row in rows if row in running]
            bench.complete("a", "w", rows)
            running.difference_update(rows)
            for row in rows:
                clock += 1
                arrival[row] = clock
        elif event in ("gate", "ungate"):
            bench.graph.gate(rows, Gate.HELD, event == "gate")
            gated = gated | set(rows) if event == "gate" else gated - set(rows)
        elif event == "remove" and (idle := [row for row in rows if row not in running]):
            bench.remove(idle[0])
            del arrival[idle[0]]
            gated.discard(idle[0])
        waiting = sorted((row for row in arrival if row not in gated | running), key=lambda row: arrival[row])
        assert bench.graph.peek(KEY, 10**6) == waiting
        assert bench.graph.peek(KEY, 2) == waiting[:2]
        assert bench.graph.ready_keys() == ([KEY] if waiting else [])
