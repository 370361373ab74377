"""The asyncio client against a running server: the same answers, many at once, and connections that close."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from support.running_front import MODEL, RunningFront

from mstar.client import AsyncClient, BadRequestError, FinishEvent, StreamError, TextEvent, UsageEvent

KEY = "sesame"
REPLY = " The capital\u2028of France\u0085is Paris.\n    indented 你好 😀 naïve."


@asynccontextmanager
async def connected(front: RunningFront) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(front.base_url, api_key=KEY, timeout_s=20) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not become true in time")


def run(front: RunningFront, body: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with connected(front) as client:
            await body(client)

    asyncio.run(whole())


def test_answers_and_streams_at_once(front: RunningFront):
    async def body(client: AsyncClient) -> None:
        async def streamed() -> str:
            text = ""
            async with client.stream_chat("hi") as stream:
                assert stream.request_id
                async for event in stream:
                    match event:
                        case TextEvent(text=piece):
                            text += piece
                        case FinishEvent(reason=reason):
                            assert reason == "stop"
                        case UsageEvent(usage=usage):
                            assert usage.completion_tokens > 4
            return text

        texts = await asyncio.gather(*(streamed() for _ in range(8)))
        answers = await asyncio.gather(*(client.chat("hi", temperature=0) for _ in range(4)))
        assert texts == [REPLY] * 8 and [answer.text for answer in answers] == [REPLY] * 4
        assert (await client.complete("a", max_tokens=200)).text == REPLY
        assert await client.detokenize(await client.tokenize("naïve 😀")) == "naïve 😀"
        assert (await client.models())[0].id == MODEL

    run(front, body)


def test_errors(front: RunningFront):
    async def body(client: AsyncClient) -> None:
        with pytest.raises(BadRequestError) as bad:
            await client.chat("hi", temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(BadRequestError):
            async for _ in client.stream_chat("hi", temperature=3):
                pass

    run(front, body)


def test_leaving_a_stream_ends_the_request(front: RunningFront):
    token = front.tokenizer.encode("hi").ids[0]
    front.worker.script = lambda _: iter(lambda: token, None)
    front.call(lambda: setattr(front.worker, "step_s", 0.01))

    async def body(client: AsyncClient) -> None:
        async with client.stream_chat("hi") as stream:
            async for _ in stream:
                assert front.worker.num_open == 1
                break
        await until(lambda: front.worker.num_open == 0)
        async for _ in client.stream_chat("hi"):
            assert front.worker.num_open == 1
            break
        gc.collect()
        await until(lambda: front.worker.num_open == 0)
        task = asyncio.create_task(client.chat("hi"))
        await until(lambda: front.worker.num_open == 1)
        task.cancel()
        await until(lambda: front.worker.num_open == 0)
        async with client.stream_chat("hi") as stream:
            assert stream.request_id and await client.abort(stream.request_id) == 1
            with pytest.raises(StreamError):
                async for _ in stream:
                    pass

    run(front, body)
