"""Parts of a message's content, made from text and files. Pure, but for reading the files that are named."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

_SIGNATURES = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"RIFF", "image/webp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(image: str | bytes | Path) -> dict[str, Any]:
    """`image`: the bytes of a file, the path of one, or a URL (as text), which the server fetches if it may."""
    return {"type": "image_url", "image_url": {"url": _url(image)}}


def video_part(video: str | bytes | Path) -> dict[str, Any]:
    """As `image_part`."""
    return {"type": "video_url", "video_url": {"url": _url(video)}}


def _url(source: str | bytes | Path) -> str:
    if isinstance(source, str):
        return source
    data = source.read_bytes() if isinstance(source, Path) else source
    kind = next((kind for signature, kind in _SIGNATURES if data.startswith(signature)), "application/octet-stream")
    return f"data:{kind};base64,{b64encode(data).decode()}"
