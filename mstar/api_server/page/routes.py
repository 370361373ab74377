"""`GET /` and the files beside it: read once at import, sent as they are. Front loop only.

The page may load its own files and nothing else, run no script but those, and turn no text into markup: the policy
below makes the browser hold it to that. What a model or a client writes reaches it as text only.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mstar.api_server.openapi import describe

router = APIRouter()
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "media-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_FILES = {path.name: path.read_bytes() for path in Path(__file__).parent.iterdir() if path.suffix in _TYPES}

_DESCRIBED = describe(None, "A file of the built-in page")
_DESCRIBED["responses"][200]["content"] = {kind: {} for kind in _TYPES.values()}


@router.get("/", **describe(None, "The built-in page", text="text/html"))
async def page() -> Response:
    return _file("index.html")


@router.get("/page/{name}", **_DESCRIBED)
async def page_file(name: str) -> Response:
    if name not in _FILES:
        raise HTTPException(404)
    return _file(name)


def _file(name: str) -> Response:
    return Response(_FILES[name], headers=HEADERS, media_type=_TYPES[Path(name).suffix])
