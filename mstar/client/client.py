"""The synchronous client. May be used from several threads; a stream belongs to one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import httpx

from mstar.client import calls
from mstar.client.answers import ChatCompletion, Completion, ModelEntry
from mstar.client.calls import Call, Messages, Prompt, SinglePrompt
from mstar.client.embeddings import Embeddings
from mstar.client.errors import StatusError, UnreadableAnswerError, status_error, stream_error
from mstar.client.events import Event, UsageEvent
from mstar.client.generation import Generation
from mstar.client.settings import DEFAULT_URL, JSON_TYPE, READ_TIMEOUT_S, Settings, no_answer
from mstar.client.sse import DONE, EventSplitter

T = TypeVar("T")


class EventStream:
    """Events of one answer, as they come: iterate over it once. The connection is closed when the iteration ends, also
    by `break`, and the server then stops working on the request; or when a `with` around it does.

    `request_id` is the server's name for the request, once the stream has begun.
    """

    def __init__(
        self, begin: Callable[[], httpx.Response], decode: Callable[[bytes], Iterator[Event]], url: str
    ) -> None:
        self._begin = begin
        self._decode = decode
        self._url = url
        self._response: httpx.Response | None = None
        self.request_id: str | None = None

    def __enter__(self) -> EventStream:
        """Sends the request; raises what the server refuses it with."""
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Event]:
        response = self._open()
        splitter, is_done = EventSplitter(), False
        try:
            for piece in response.iter_bytes():
                for name, data in splitter.feed(piece):
                    if name == "error":
                        raise stream_error(data, self.request_id)
                    if data == DONE:
                        is_done = True  # the body's own end follows, and the connection can be used again
                        break
                    for event in self._decode(data):
                        is_done = is_done or isinstance(event, UsageEvent)
                        yield event
        except httpx.HTTPError as error:
            raise no_answer(error, self._url) from error
        finally:
            response.close()
        if not is_done:
            raise UnreadableAnswerError("the stream broke off before its end")

    def close(self) -> None:
        """Ends the request, if it still runs."""
        if self._response is not None:
            self._response.close()

    def _open(self) -> httpx.Response:
        if self._response is None:
            self._response = self._begin()
            self.request_id = self._response.headers.get("x-request-id")
        return self._response


class Client:
    """Talks to one server. Fields of a request that are no parameter of a method, `temperature=0` for example, are
    given by name and sent as they are.

    Raises `ClientError`: its classes are in `mstar.client.errors`.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float | None = READ_TIMEOUT_S,
        max_retries: int = 0,
        longest_wait_s: float = 60.0,
    ) -> None:
        """`timeout_s`: longest silence of the server; how long a request may take there is its field `timeout`.
        `max_retries`: repetitions of a request that is refused with 429 or 503, when the server says, if that is
        within `longest_wait_s`."""
        self._settings = Settings(url.rstrip("/"), api_key, timeout_s, max_retries, longest_wait_s)
        self._http = httpx.Client(**self._settings.httpx_arguments())
        self._model: str | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def chat(self, messages: Messages, **fields: Any) -> ChatCompletion:
        """Answer a conversation. The model is the served one if `model` is not given."""
        return self._call(calls.chat(messages, fields))

    def stream_chat(self, messages: Messages, **fields: Any) -> EventStream:
        """As `chat`, in events."""
        return self._stream(calls.stream_chat(messages, fields))

    def complete(self, prompt: Prompt, **fields: Any) -> Completion:
        """Continue a text, or token ids, or each of several."""
        return self._call(calls.complete(prompt, fields))

    def stream_completion(self, prompt: Prompt, **fields: Any) -> EventStream:
        """As `complete`, in events."""
        return self._stream(calls.stream_completion(prompt, fields))

    def generate(
        self, prompt: SinglePrompt | None = None, *, messages: Messages | None = None, **fields: Any
    ) -> Generation:
        """All that the model emits for a text, token ids or a conversation: text with its token ids, and tensors."""
        return self._call(calls.generate(prompt, messages, fields))

    def stream_generate(
        self, prompt: SinglePrompt | None = None, *, messages: Messages | None = None, **fields: Any
    ) -> EventStream:
        """As `generate`, in events."""
        return self._stream(calls.stream_generate(prompt, messages, fields))

    def embed(self, inputs: Prompt, **fields: Any) -> Embeddings:
        """Vectors of a text, of token ids, or of each of several."""
        return self._call(calls.embed(inputs, fields))

    def tokenize(self, prompt: str | None = None, *, messages: Messages | None = None, **fields: Any) -> list[int]:
        """Token ids of a text, or of a conversation through the chat template."""
        return self._call(calls.tokenize(prompt, messages, fields))

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._call(calls.detokenize(tokens))

    def models(self) -> tuple[ModelEntry, ...]:
        """What is served; the first entry has the model's own name."""
        return self._call(calls.models())

    def model(self, name: str) -> ModelEntry:
        return self._call(calls.model(name))

    def health(self) -> str:
        """Raises `UnavailableError` where a worker is not well."""
        return self._call(calls.health())

    def ready(self) -> str:
        """Raises `UnavailableError` where no requests are taken."""
        return self._call(calls.ready())

    def abort(self, request_id: str) -> int:
        """End a running request, by its answer's id or its request id; how many had it."""
        return self._call(calls.abort(request_id))

    def served_model(self) -> str:
        """The model's name, asked for once."""
        if self._model is None:
            names = [entry.id for entry in self.models()]
            if not names:
                raise UnreadableAnswerError("the server lists no model")
            self._model = names[0]
        return self._model

    def _call(self, call: Call[T]) -> T:
        response = self._send(call, streams=False)
        return call.decode(response.content)

    def _stream(self, call: Call[Iterator[Event]]) -> EventStream:
        return EventStream(lambda: self._send(call, streams=True), call.decode, self._settings.url)

    def _send(self, call: Call[T], *, streams: bool) -> httpx.Response:
        """An answer with a good status; what comes of its body is still to be read where it `streams`."""
        if call.lacks_model:
            call = call.with_model(self.served_model())
        body = call.body()
        num_tries = 0
        while True:
            num_tries += 1
            try:
                return self._send_once(call.method, call.path, body, streams=streams)
            except StatusError as error:
                wait_s = self._settings.wait_s(error, num_tries)
                if wait_s is None:
                    raise
            time.sleep(wait_s)

    def _send_once(self, method: str, path: str, body: bytes | None, *, streams: bool) -> httpx.Response:
        headers = None if body is None else JSON_TYPE
        try:
            request = self._http.build_request(method, path, content=body, headers=headers)
            response = self._http.send(request, stream=True)
            if streams and response.status_code == httpx.codes.OK:
                return response
            try:
                response.read()
            finally:
                response.close()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise no_answer(error, self._settings.url) from error
        if response.status_code != httpx.codes.OK:
            raise status_error(response.status_code, response.headers, response.content)
        return response
