"""What comes back for a request: typed events, and the `RequestStream` that hands them over.

The conductor pushes, one consumer takes, both on the front's loop. Pushing wakes nobody; the conductor wakes each
stream once per pass over its inbox, so that the tokens of one pass are taken, and written, together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from mstar.communication.messages import FinishReason, HostTensor, TokenLogprobs
from mstar.conductor.request import GenerateRequest
from mstar.conductor.request_times import RequestTimes


class PreparedEvent(NamedTuple):
    """Prompt number `prompt` has been tokenized and its choices started. `tail`: its last token ids. `opens_reasoning`:
    it ends inside the reasoning."""

    prompt: int
    num_tokens: int
    tail: tuple[int, ...]
    opens_reasoning: bool = False


class TokenEvent(NamedTuple):
    """One sampled token of the emitted signal `signal`."""

    choice: int
    signal: str
    token: int
    logprobs: TokenLogprobs | None


class TensorEvent(NamedTuple):
    """One emitted tensor (a waveform chunk, an image)."""

    choice: int
    signal: str
    tensor: HostTensor


class FinishedEvent(NamedTuple):
    """A choice is complete: all that it emitted came before. `num_cached_tokens` prompt tokens were not computed."""

    choice: int
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int


class Failure(NamedTuple):
    """The whole request has failed; the last event of its stream. `status` is the HTTP status that fits, `code` the
    machine-readable reason, `param` the field at fault."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


ABORTED = Failure(499, "request_aborted", "The request was aborted.")
Event = PreparedEvent | TokenEvent | TensorEvent | FinishedEvent | Failure


class RefusedError(Exception):
    """A request that is not taken on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RequestStream:
    """Events of one request. `request` is without words once its prompts are prepared. `waiting[i]`: choice i has
    emitted nothing yet. `rids[i]`: its id on the wire, empty until it is started. `num_open`: choices that have not
    finished; 0 too when the request has failed. `on_close` is called with how many have ended, whenever some have; when
    `num_open` becomes 0, `on_end` is called. `sink`: called by `wake`; takes what has come in place of the task that
    waits for it, or says False."""

    __slots__ = (
        "_pending",
        "_waiter",
        "is_dirty",
        "num_open",
        "on_close",
        "on_end",
        "request",
        "rids",
        "sink",
        "times",
        "waiting",
    )

    def __init__(self, request: GenerateRequest, submitted_at: float) -> None:
        self.request = request
        self.times = RequestTimes(request.request_id, submitted_at)
        self.num_open = request.num_results
        self.waiting = [True] * request.num_results
        self.rids = [""] * request.num_results
        self.is_dirty = False
        self.sink: Callable[[], bool] | None = None
        self.on_close: Callable[[int], object] | None = None
        self.on_end: list[Callable[[], object]] = []
        self._pending: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None

    def has_only_tokens(self) -> bool:
        return all(type(event) is TokenEvent for event in self._pending)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def push(self, event: Event) -> None:
        self._pending.append(event)

    def close(self, num_choices: int) -> None:
        """So many choices have ended."""
        self.num_open -= num_choices
        if self.on_close is not None:
            self.on_close(num_choices)
        if not self.num_open:
            for callback in self.on_end:
                callback()
            self.on_end.clear()

    def wake(self) -> None:
        self.is_dirty = False
        if self.sink is not None and self.sink():
            return
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take_now(self) -> list[Event]:
        """What has come since the last call, without waiting."""
        events, self._pending = self._pending, []
        return events

    def more(self) -> asyncio.Future[None]:
        """Done when something has come. One caller at a time, and only while something will come (`num_open`)."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        if self._pending:
            waiter.set_result(None)
        return waiter

    async def take(self) -> list[Event]:
        """What has come since the last call, waiting for at least one event; empty when nothing will come any more.
        One caller at a time."""
        if not self._pending and self.num_open:
            await self.more()
        return self.take_now()

    async def __aiter__(self) -> AsyncIterator[Event]:
        while events := await self.take():
            for event in events:
                yield event
