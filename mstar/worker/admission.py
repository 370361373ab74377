"""Admission: requests wait in order of seniority until the engine can promise room for what they need to begin.

Runs on the worker's loop thread. Nobody overtakes: a large request at the head is not starved by small ones. While
somebody who was let in waits for room, nobody joins the competition but a strictly more important request.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

import msgspec

from mstar.engine.engine import Engine
from mstar.engine.resources.base import OpenConfig
from mstar.worker.preemption import Preemption
from mstar.worker.requests import Request
from mstar.worker.waiting import seniority


class RequestRefused(Exception):
    """A request that cannot be served; `code` is the HTTP status that fits, `field` what is at fault of the request."""

    def __init__(self, message: str, code: int, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class Admission:
    """The waiting line in front of the engine."""

    def __init__(self, engine: Engine, preemption: Preemption) -> None:
        self._engine = engine
        self._preemption = preemption
        self._line: list[Request] = []

    def __len__(self) -> int:
        return len(self._line)

    @property
    def first(self) -> Request | None:
        """Who is next."""
        return self._line[0] if self._line else None

    def check(self, request: Request) -> None:
        """Refuse at once what can never fit."""
        most = self._engine.memory.most_tokens()
        if request.max_total_tokens > most:
            raise RequestRefused(
                f"the request needs room for {request.max_total_tokens} tokens ({request.num_prompt_tokens} of the "
                f"prompt and {request.open.sampling.max_tokens} of output); this server holds {most} for one request",
                400,
            )

    def join(self, request: Request) -> None:
        """What the request may share with others is worked out here, once, and not when its turn comes."""
        self._engine.memory.introduce(request.handle, _config(request))
        request.joined = True
        insort(self._line, request, key=seniority)

    def admitted(self) -> Iterator[Request]:
        """Requests at the head of the line that now have their room. Each keeps it until it leaves, or until a senior
        one is in need of it."""
        while self._line and self._has_room(self._line[0]):
            request = self._line.pop(0)
            request.admitted = True
            self._preemption.enter(request)
            yield request

    def open(self, request: Request) -> None:
        """Open an admitted request in the engine.

        Raises:
            RequestRefused: a resource cannot serve it.
        """
        try:
            self._engine.memory.open(request.handle)
        except ValueError as error:
            raise RequestRefused(str(error), 400) from error
        request.opened = True

    def withdraw(self, request: Request) -> None:
        """A request that leaves before its turn gives up its place at once."""
        del self._line[bisect_left(self._line, request.seniority, key=seniority)]
        self._engine.memory.close(request.handle)

    def leave(self, request: Request) -> None:
        """Give back what an admitted request holds."""
        self._engine.memory.close(request.handle)
        self._preemption.leave(request)

    def _has_room(self, request: Request) -> bool:
        memory, preemption = self._engine.memory, self._preemption
        if preemption.outranked(request) or not preemption.has_turn(request):
            return False
        if memory.reserve(request.handle):
            return True
        return preemption.make_way(request) and memory.reserve(request.handle)


def _config(request: Request) -> OpenConfig:
    opened = request.open
    sampling = opened.sampling
    if sampling.grammar is not None:  # where its end is all that a grammar allows, no floor may stand in the way
        sampling = msgspec.structs.replace(sampling, min_tokens=0)
    return OpenConfig(
        sampling=sampling,
        prompt_ids=request.prompt_ids,
        max_total_tokens=request.max_total_tokens,
        media=opened.media,
        cache_salt=opened.cache_salt,
        has_inputs=bool(opened.inputs),
        spans_workers=request.spans_workers,
    )
