"""The application: routes, the entrance before them, and errors in one shape. Front loop only."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from mstar import __version__
from mstar.api_server import live_view, operations, token_routes
from mstar.api_server.entrance import Entrance
from mstar.api_server.errors import error_response, param_name
from mstar.api_server.front_state import FrontState, front_of, request_id_of
from mstar.api_server.generate import route as generate
from mstar.api_server.openai import completions, embeddings, models
from mstar.api_server.openai.responses import route as responses
from mstar.api_server.openapi import build_openapi
from mstar.api_server.page import routes as page
from mstar.conductor.events import Failure, RefusedError
from mstar.process_log import REQUEST

ROUTERS = {
    "as OpenAI has it": (completions.router, responses.router, embeddings.router, models.router),
    "of this server": (generate.router, token_routes.router),
    "operating": (operations.router, live_view.router),
    "the built-in page": (page.router,),
}
"""By the heading under which the document shows them."""


def create_app(front: FrontState) -> FastAPI:
    """An ASGI application over a conductor that runs on the same loop."""
    app = FastAPIOffline(
        title="M*",
        version=__version__,
        description="OpenAI-compatible inference server.",
        redoc_url=None,
        redirect_slashes=False,
        static_url="/docs/files",
        favicon_url="/page/icon.svg",
    )
    app.state.front = front
    for heading, routers in ROUTERS.items():
        for router in routers:
            app.include_router(router, tags=[heading])
    app.add_exception_handler(RefusedError, _on_refused)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(
        Entrance, api_keys=front.api_keys, max_body_bytes=front.max_body_bytes, responses=front.responses
    )
    if front.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(front.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.openapi = lambda: _openapi(app, front)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI, front: FrontState) -> dict[str, Any]:
    if app.openapi_schema is None:
        app.openapi_schema = build_openapi(app, front.served_names)
    return app.openapi_schema


async def _on_refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    if (noted := REQUEST.get()) is not None:
        noted["error"] = error.failure.message
    return error_response(error.failure)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(front_of(request).no_route(request.method, request.url.path), headers)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.url.path} does not take {request.method}, but {headers.get('Allow', '')}."
        return error_response(Failure(405, "method_not_allowed", message), headers)
    return error_response(Failure(error.status_code, "http_error", str(error.detail)), headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    complaint = error.errors()[0]
    param = param_name(complaint["loc"][1:])
    return error_response(Failure(400, "invalid_value", f"Invalid '{param}': {complaint['msg']}", param or None))


async def _on_bug(request: Request, error: Exception) -> Response:
    """Runs outside of the entrance; the exception goes on to the server, which logs the traceback and closes the
    connection."""
    failure = Failure(500, "internal_error", "The server failed to handle the request.")
    return error_response(failure, {"x-request-id": request_id_of(request), "connection": "close"})
