"""From the body of `/generate` to the request for the conductor. Pure; raises `RefusedError` naming the field."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.api_server.generate.schema import GenerateBody
from mstar.api_server.openai.adapter import TextRequest, text_request
from mstar.api_server.openai.chat_messages import conversation_of
from mstar.api_server.openai.prompts import prompt_inputs
from mstar.conductor.model_facts import ModelFacts


def from_generate(body: GenerateBody, facts: ModelFacts, request_id: str, media: Sequence[bytes] = ()) -> TextRequest:
    """`media`: the files of `chat_media(body.messages)`."""
    prompt = conversation_of(body, media)
    if prompt is None:
        assert body.prompt is not None
        [prompt] = prompt_inputs(body.prompt, "completion", facts)
    return text_request(
        body, facts, request_id, (prompt,), body.max_tokens, "max_tokens", body.logprobs, None, clamps=False
    )
