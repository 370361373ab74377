"""Admission: requests wait in arrival order until the engine can promise room for all that they may ever hold.

Runs on the worker's loop thread. Nobody overtakes: a large request at the head is not starved by small ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from mstar.engine.engine import Engine
from mstar.engine.resources.base import OpenConfig
from mstar.worker.requests import Request


class RequestRefused(Exception):
    """A request that cannot be served; `code` is the HTTP status that fits."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Admission:
    """The waiting line in front of the engine."""

    def __init__(self, engine: Engine, max_rows: int) -> None:
        self._engine = engine
        self._max_rows = max_rows
        self._line: deque[Request] = deque()
        self.num_admitted = 0

    def __len__(self) -> int:
        return len(self._line)

    def check(self, request: Request) -> None:
        """Refuse at once what can never fit."""
        most = self._engine.memory.most_tokens()
        if most is not None and request.max_total_tokens > most:
            raise RequestRefused(
                f"the request needs room for {request.max_total_tokens} tokens ({request.num_prompt_tokens} of the "
                f"prompt and {request.open.sampling.max_tokens} of output); this server holds {most} for one request",
                400,
            )

    def join(self, request: Request) -> None:
        self._engine.memory.introduce(request.handle, _config(request))
        self._line.append(request)

    def admitted(self) -> Iterator[Request]:
        """Requests at the head of the line that now have their room, which each keeps until it leaves."""
        while self._line and self.num_admitted < self._max_rows:
            request = self._line[0]
            if not self._engine.memory.reserve(request.handle):
                return
            self._line.popleft()
            request.admitted = True
            self.num_admitted += 1
            yield request

    def open(self, request: Request) -> None:
        """Open an admitted request in the engine.

        Raises:
            RequestRefused: a resource cannot serve it.
        """
        try:
            self._engine.memory.open(request.handle, _config(request))
        except ValueError as error:
            raise RequestRefused(str(error), 400) from error
        request.opened = True

    def withdraw(self, request: Request) -> None:
        """A request that leaves before its turn gives up its place at once."""
        self._line.remove(request)
        self._engine.memory.close(request.handle)

    def leave(self, request: Request) -> None:
        """Give back what an admitted request holds."""
        self._engine.memory.close(request.handle)
        self.num_admitted -= 1


def _config(request: Request) -> OpenConfig:
    opened = request.open
    return OpenConfig(
        sampling=opened.sampling,
        prompt_ids=request.prompt_ids,
        max_total_tokens=request.max_total_tokens,
        media=opened.media,
        cache_salt=opened.cache_salt,
        has_inputs=bool(opened.inputs),
    )
