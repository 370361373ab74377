"""Whether a request is taken on, and how many tokens it is granted. Pure decisions; front loop only."""

from __future__ import annotations

from mstar.conductor.events import Failure, RefusedError
from mstar.conductor.request import GenerateRequest

MAX_CHARS_PER_TOKEN = 256
"""No tokenizer in use has longer tokens; a text beyond this times the context is refused without tokenizing it."""


def context_length_failure(max_seq_len: int, num_prompt: str, detail: str) -> Failure:
    return Failure(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {max_seq_len} tokens, but the prompt has {num_prompt} tokens{detail}.",
        param="messages",
    )


def check_text_length(request: GenerateRequest, max_seq_len: int) -> None:
    """Refuses, before any work, a prompt that cannot fit whatever its tokens are.

    Raises:
        RefusedError: 400 `context_length_exceeded`.
    """
    for prompt in request.prompts:
        if prompt.token_ids is not None:
            at_least = len(prompt.token_ids)
        else:
            num_chars = len(prompt.text or "") + sum(len(message.content) for message in prompt.messages)
            at_least = num_chars // MAX_CHARS_PER_TOKEN
        if at_least >= max_seq_len:
            raise RefusedError(_named(context_length_failure(max_seq_len, f"at least {at_least}", ""), request))


def grant_tokens(request: GenerateRequest, num_prompt: int, max_seq_len: int, max_total: int | None) -> int:
    """Output tokens granted to a prompt of `num_prompt` tokens. `max_total`: what the caches hold for one request.

    Raises:
        RefusedError: 400, because prompt or prompt and output together do not fit.
    """
    asked = request.max_tokens
    wanted = 0 if asked is None or request.clamps_max_tokens else asked
    if num_prompt >= max_seq_len:
        raise RefusedError(_named(context_length_failure(max_seq_len, str(num_prompt), ""), request))
    if num_prompt + wanted > max_seq_len:
        detail = f" and max_tokens asks for {wanted} more"
        raise RefusedError(_named(context_length_failure(max_seq_len, str(num_prompt), detail), request))
    limit = max_seq_len if max_total is None else min(max_seq_len, max_total)
    if num_prompt >= limit or num_prompt + wanted > limit:
        needs = f"{num_prompt} prompt tokens" + (f" and {wanted} output tokens" if wanted else "")
        raise RefusedError(
            Failure(
                400,
                "request_too_large",
                f"This deployment's caches hold at most {limit} tokens of one request, but this one needs {needs}.",
                param=_prompt_field(request),
            )
        )
    rest = limit - num_prompt
    return rest if asked is None else min(asked, rest)


def _prompt_field(request: GenerateRequest) -> str:
    return "messages" if request.prompts[0].kind == "chat" else "prompt"


def _named(failure: Failure, request: GenerateRequest) -> Failure:
    return failure._replace(param=_prompt_field(request))
