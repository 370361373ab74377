"""Whether a request is taken on, and how many tokens it is granted. Pure decisions; front loop only."""

from __future__ import annotations

from mstar.conductor.events import Failure, RefusedError
from mstar.conductor.request import GenerateRequest, PromptInput
from mstar.model.base import Content

MAX_CHARS_PER_TOKEN = 256
"""No tokenizer in use has longer tokens; a text beyond this times the context is refused without tokenizing it."""


def check_length(request: GenerateRequest, max_seq_len: int) -> None:
    """Refuses, before any work, what cannot fit whatever its tokens are.

    Raises:
        RefusedError: 400 `context_length_exceeded`.
    """
    for prompt in request.prompts:
        check_prompt_length(prompt, max_seq_len)
    wanted = _wanted(request)
    if wanted >= max_seq_len:
        raise RefusedError(_too_long(max_seq_len, "at least 1 token", request.max_tokens_name, wanted))


def check_choices(request: GenerateRequest, most: int) -> None:
    """Refuses a request with more choices than may ever be live at once.

    Raises:
        RefusedError: 400 `too_many_choices`.
    """
    if request.num_results > most:
        message = f"{request.num_results} choices are more than the {most} that this server runs and queues at once."
        field = "n" if request.num_choices > 1 else request.prompts[0].sent_as
        raise RefusedError(Failure(400, "too_many_choices", message, param=field))


def check_prompt_length(prompt: PromptInput, max_seq_len: int) -> None:
    """As `check_length`, for one prompt."""
    if prompt.token_ids is not None:
        at_least = len(prompt.token_ids)
    else:
        num_chars = len(prompt.text or "") + sum(_num_chars(message.content) for message in prompt.messages)
        at_least = num_chars // MAX_CHARS_PER_TOKEN
    if at_least >= max_seq_len:
        raise RefusedError(_too_long(max_seq_len, f"at least {at_least} tokens", prompt.sent_as))


def grant_tokens(request: GenerateRequest, num_prompt: int, max_seq_len: int, max_total: int | None) -> int:
    """Output tokens granted to a prompt of `num_prompt` tokens. `max_total`: what the caches hold for one request.

    Raises:
        RefusedError: 400, because prompt or prompt and output together do not fit.
    """
    asked, wanted = request.max_tokens, _wanted(request)
    field = request.prompts[0].sent_as
    if num_prompt >= max_seq_len:
        raise RefusedError(_too_long(max_seq_len, f"{num_prompt} tokens", field))
    if num_prompt + wanted > max_seq_len:
        raise RefusedError(_too_long(max_seq_len, f"{num_prompt} tokens", request.max_tokens_name, wanted))
    limit = max_seq_len if max_total is None else min(max_seq_len, max_total)
    if num_prompt >= limit or num_prompt + wanted > limit:
        needs = f"{num_prompt} prompt tokens" + (f" and {wanted} output tokens" if wanted else "")
        raise RefusedError(
            Failure(
                400,
                "request_too_large",
                f"This deployment's caches hold at most {limit} tokens of one request, but this one needs {needs}.",
                param=field if num_prompt >= limit else request.max_tokens_name,
            )
        )
    rest = limit - num_prompt
    return rest if asked is None else min(asked, rest)


def _wanted(request: GenerateRequest) -> int:
    """Output tokens that have to fit."""
    return 0 if request.max_tokens is None or request.clamps_max_tokens else request.max_tokens


def _num_chars(content: Content) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(part) for part in content if isinstance(part, str))


def _too_long(max_seq_len: int, prompt_has: str, field: str, num_wanted: int = 0) -> Failure:
    wants = f" and {field} asks for {num_wanted} more" if num_wanted else ""
    message = f"This model's maximum context length is {max_seq_len} tokens, but the prompt has {prompt_has}{wants}."
    return Failure(400, "context_length_exceeded", message, field)
