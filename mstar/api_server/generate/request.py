"""From the body of `/generate` to the request for the conductor. Pure; raises `RefusedError` naming the field."""

from __future__ import annotations

from collections.abc import Sequence

from mstar.api_server.errors import bad_request
from mstar.api_server.generate.schema import GenerateBody
from mstar.api_server.openai.adapter import TextRequest, text_request, tool_mappings
from mstar.api_server.openai.chat_messages import chat_messages
from mstar.api_server.openai.prompts import prompt_inputs
from mstar.conductor.handle import ModelFacts
from mstar.conductor.request import PromptInput

OF_MESSAGES = ("tools", "chat_template_kwargs")


def from_generate(body: GenerateBody, facts: ModelFacts, request_id: str, media: Sequence[bytes] = ()) -> TextRequest:
    """`media`: the files of `chat_media(body.messages)`."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Give either prompt or messages.", "prompt")
    if body.messages is not None:
        prompt = PromptInput(
            kind="chat",
            messages=chat_messages(body.messages, media),
            tools=tool_mappings(body.tools or ()),
            template_variables=body.chat_template_kwargs or {},
        )
    else:
        assert body.prompt is not None
        for name in OF_MESSAGES:
            if getattr(body, name):
                raise bad_request(f"{name} needs messages.", name)
        [prompt] = prompt_inputs(body.prompt, "completion", facts)
    return text_request(
        body, facts, request_id, (prompt,), body.max_tokens, "max_tokens", body.logprobs, None, clamps=False
    )
