"""Routes for whoever operates the server: health, readiness, version, metrics, a trace, aborting requests. Front loop
only."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from mstar import __version__
from mstar.api_server.answer_schemas import AbortAnswer, StatusAnswer, VersionAnswer
from mstar.api_server.front_state import front_of
from mstar.api_server.metrics import render
from mstar.api_server.openapi import describe
from mstar.api_server.trace import chrome_trace
from mstar.conductor.events import Failure, RefusedError

router = APIRouter()


@router.get("/live", **describe(None, "200 while the process answers", answer=StatusAnswer))
async def live() -> Response:
    return _status(200, "alive")


@router.get("/ready", **describe(None, "200 when requests are taken on", answer=StatusAnswer, answered_as=503))
async def ready(request: Request) -> Response:
    handle = front_of(request).handle
    if handle.is_draining:
        return _status(503, "draining")
    reason = handle.why_not_ready()
    return _status(200, "ready") if reason is None else _status(503, reason)


@router.get(
    "/health", **describe(None, "200 while every worker is well, busy or not", answer=StatusAnswer, answered_as=503)
)
async def health(request: Request) -> Response:
    reason = front_of(request).handle.why_not_ready()
    return _status(200, "healthy") if reason is None else _status(503, reason)


@router.get("/version", **describe(None, "Version of the server", answer=VersionAnswer))
async def version() -> Response:
    return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")


@router.get("/metrics", **describe(None, "Prometheus metrics", text="text/plain"))
async def metrics(request: Request) -> Response:
    front = front_of(request)
    return Response(render(front.handle, front.responses), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/debug/trace", **describe(None, "Requests and steps of the last seconds, as a Chrome trace"))
async def trace(request: Request, seconds: Annotated[float, Query(gt=0, le=3600)] = 60.0) -> Response:
    handle = front_of(request).handle
    since = handle.now() - seconds
    reports = await handle.steps_since(since)
    times, now, time_of_day = handle.times_since(since), handle.now(), datetime.now(UTC)

    def write() -> bytes:
        return msgspec.json.encode(chrome_trace(times, reports, now, time_of_day, __version__))

    # On a thread: of a busy server it is some hundred thousand objects, and streams go on meanwhile.
    return Response(await asyncio.to_thread(write), media_type="application/json")


@router.delete("/v1/requests/{request_id}", **describe(None, "Abort a running request", answer=AbortAnswer))
async def abort_request(request: Request, request_id: str) -> Response:
    """`request_id`: the response's id, or its x-request-id, which may name several requests: all are aborted."""
    front = front_of(request)
    streams = front.live.named(request_id)
    if not streams:
        message = "There is no running request with this id."
        raise RefusedError(Failure(404, "request_not_found", message, "request_id"))
    for stream in streams:
        front.handle.abort(stream)
    answer = {"id": request_id, "object": "request", "aborted": len(streams)}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _status(status: int, text: str) -> Response:
    return Response(msgspec.json.encode({"status": text}), status, media_type="application/json")
