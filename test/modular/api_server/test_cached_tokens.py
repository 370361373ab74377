"""`cached_tokens` in usage, as the official client sees it, and what else shows of a prefix cache."""

from collections.abc import Iterator

import openai
import pytest
from support.running_front import MODEL, RunningFront

from mstar.communication.messages import OpenRequest

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(front: RunningFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=front.base_url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        yield client


def usage_of_stream(stream: openai.Stream) -> openai.types.CompletionUsage:
    (usage,) = [chunk.usage for chunk in stream if chunk.usage is not None]
    return usage


def test_whole_and_streamed(client: openai.OpenAI, front: RunningFront):
    front.worker.num_cached = lambda _: 3
    options = {"include_usage": True}
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES).usage
    text = client.completions.create(model=MODEL, prompt=[5] * 7).usage
    assert text.prompt_tokens == 7
    streams = [
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, stream_options=options),
        client.completions.create(model=MODEL, prompt=[5] * 7, stream=True, stream_options=options),
    ]
    assert [usage.prompt_tokens_details.cached_tokens for usage in (chat, text)] == [3, 3]
    assert [usage_of_stream(stream) for stream in streams] == [chat, text]


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_add_up_and_choices_share_theirs(client: openai.OpenAI, front: RunningFront, stream: bool):
    """Of a prompt with several choices, the first computes what the others may find: found is what it found."""
    seen: list[int] = []

    def cached(opening: OpenRequest) -> int:
        length = opening.prompt_ids.shape[0]
        seen.append(length)
        return 8 if seen.count(length) == 2 else {4: 0, 9: 5, 16: 8}[length]

    front.worker.num_cached = cached
    prompts = [[5] * 16, [5] * 9, [5] * 4]
    asked = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 2}
    if stream:
        usage = usage_of_stream(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    else:
        usage = client.completions.create(**asked).usage
    assert sorted(seen) == [4, 4, 9, 9, 16, 16]
    assert (usage.prompt_tokens, usage.completion_tokens) == (29, 12)
    assert usage.prompt_tokens_details.cached_tokens == 8 + 5 + 0


def test_the_non_standard_fields_go_through_the_client(client: openai.OpenAI, front: RunningFront):
    extra = {"priority": -3, "cache_salt": "mine", "timeout": 60}
    client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
    client.completions.create(model=MODEL, prompt="a", extra_body=extra)
    assert [(o.priority, o.cache_salt) for o in front.openings()[-2:]] == [(-3, "mine")] * 2
    for field, wrong in (("priority", 2**31), ("cache_salt", ""), ("timeout", 0)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="a", extra_body={field: wrong})
        assert caught.value.param == field


def test_hits_and_evictions_reach_metrics_unchanged(front: RunningFront):
    state = front.parts.handle._workers.states[0]
    reported = {
        "mstar_prefix_hit_tokens_total": 12.0,
        'mstar_evictions_total{kind="offload"}': 3.0,
        'mstar_pages{pool="kv",state="cached"}': 5.0,
        'mstar_pages{pool="kv.host",state="free"}': 7.0,
    }
    beat = front.worker.beat
    front.worker.beat = lambda *_: None  # type: ignore[method-assign]
    try:
        front.call(lambda: setattr(state, "gauges", reported))
        text = front.http.get("/metrics").text
    finally:
        front.worker.beat = beat  # type: ignore[method-assign]
    for name, value in reported.items():
        assert f"{name} {value}" in text
    assert "# TYPE mstar_prefix_hit_tokens_total counter" in text
    assert "# TYPE mstar_evictions_total counter" in text
