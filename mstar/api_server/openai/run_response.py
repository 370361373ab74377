"""The HTTP response of a run: whole, or as a stream. Front loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mstar.api_server.connection import BODY_WRITER
from mstar.api_server.front_state import front_of, request_id_of
from mstar.api_server.openai.text_outputs import TextOutputs
from mstar.api_server.sse import SSE_HEADERS
from mstar.conductor.events import Event


async def response_of(request: Request, run: TextOutputs, run_id: str) -> Response:
    """The response to `request`, which became `run`. Whatever happens, the run is closed. Until it ends, it can be
    aborted by `run_id` and by the request's own id.

    Raises:
        RefusedError: the run failed before anything of it was sent.
    """
    front_of(request).live.track((request_id_of(request), run_id), run.stream)
    is_handed_over = False
    try:
        run.watch_client(request.receive)
        if run.request.is_streamed:
            response = RunStream(run, await run.first_events())
            is_handed_over = True
            return response
        return Response(await run.whole(), media_type="application/json")
    finally:
        if not is_handed_over:
            run.close()


class RunStream(Response):
    """Streams a run. `events`: what its `first_events` returned."""

    def __init__(self, run: TextOutputs, events: Sequence[Event]) -> None:
        super().__init__()
        self._run = run
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The headers pass the whole stack of middleware. The bodies are written by a task of their own, to the server
        directly: else each token would wake and walk every layer twice."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
            self._run.writer = scope.get("extensions", {}).get(BODY_WRITER)
            await asyncio.create_task(self._run.write(self._events, scope["state"]["send"]))
        finally:
            self._run.close()
