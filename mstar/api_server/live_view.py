"""`/debug/graph` and `/debug/live`: the model's walks, and what goes on in them now. Front loop only.

Both are made from what the front has anyway; a look costs about as much as one at `/metrics`.
"""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from mstar.api_server.front_state import front_of
from mstar.api_server.metrics import named_gauges
from mstar.api_server.openapi import describe
from mstar.conductor.handle import ConductorHandle

router = APIRouter()
_POOLS = {"mstar_pages": "pages", "mstar_slots": "slots"}


class NodeActivity(msgspec.Struct):
    """Steps of one node in one walk since its worker started, and the rows in them."""

    node: str
    walk: str
    steps: int = 0
    rows: int = 0


class PoolState(msgspec.Struct):
    """How many pages or slots of a pool are in each state."""

    name: str
    kind: str
    states: dict[str, int]


class WorkerView(msgspec.Struct):
    """`problem`: what is wrong with it, or null. `step_age_s`: of the step that runs."""

    rank: int
    problem: str | None
    step_age_s: float


class LiveView(msgspec.Struct):
    """Counts since the start, and what is there now. `time_s` is a clock for differences of the counts."""

    time_s: float
    live_requests: int
    waiting_choices: int
    queue_depth: int
    running_rows: int
    held_requests: int
    preempted_requests: int
    prompt_tokens: int
    prefix_hit_tokens: int
    generated_tokens: int
    is_draining: bool
    workers: list[WorkerView]
    pools: list[PoolState]
    nodes: list[NodeActivity]


@router.get("/debug/graph", **describe(None, "The model's walks, and where their nodes run"))
async def graph(request: Request) -> Response:
    return Response(msgspec.json.encode(front_of(request).graph), media_type="application/json")


@router.get("/debug/live", **describe(None, "What goes on now: requests, pools, steps by node and walk"))
async def live(request: Request) -> Response:
    view = view_of(front_of(request).handle)
    return Response(msgspec.json.encode(view), headers={"cache-control": "no-store"}, media_type="application/json")


def view_of(handle: ConductorHandle) -> LiveView:
    totals: dict[str, int] = {}
    pools: dict[tuple[str, str], PoolState] = {}
    nodes: dict[tuple[str, str], NodeActivity] = {}
    for name, labels, value in named_gauges(handle.worker_gauges().items()):
        if name in _POOLS:
            pool = labels.get("pool", "")
            state = pools.setdefault((name, pool), PoolState(pool, _POOLS[name], {}))
            state.states[labels.get("state", "")] = int(value)
        elif name in ("mstar_node_steps_total", "mstar_node_rows_total"):
            key = (labels.get("node", ""), labels.get("walk", ""))
            activity = nodes.setdefault(key, NodeActivity(*key))
            if name == "mstar_node_steps_total":
                activity.steps = int(value)
            else:
                activity.rows = int(value)
        elif not labels:
            totals[name] = int(value)
    statistics = handle.statistics
    return LiveView(
        time_s=time.monotonic(),
        live_requests=handle.num_live,
        waiting_choices=handle.num_waiting,
        queue_depth=totals.get("mstar_queue_depth", 0),
        running_rows=totals.get("mstar_running_rows", 0),
        held_requests=totals.get("mstar_held_requests", 0),
        preempted_requests=totals.get("mstar_preempted_requests", 0),
        prompt_tokens=statistics.num_prompt_tokens,
        prefix_hit_tokens=totals.get("mstar_prefix_hit_tokens_total", 0),
        generated_tokens=statistics.num_generated_tokens,
        is_draining=handle.is_draining,
        workers=[WorkerView(rank, problem, age_s) for rank, problem, age_s in handle.worker_states()],
        pools=[pools[key] for key in sorted(pools)],
        nodes=[nodes[key] for key in sorted(nodes)],
    )
