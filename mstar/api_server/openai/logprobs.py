"""Logprobs in the two shapes that OpenAI's API has. Pure functions on notes of tokens.

JSON has no infinity: a token that cannot occur has `IMPOSSIBLE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mstar.api_server.token_text import TokenTexts
from mstar.communication.messages import TokenLogprobs

IMPOSSIBLE = -9999.0
NOT_ASKED = TokenLogprobs(0.0, (), ())
"""Of a token whose note is kept for another reason."""


class TokenNote(NamedTuple):
    """What is kept of a token until its text is shown. `start`: where its text begins, in characters of the whole."""

    token: int
    logprobs: TokenLogprobs
    start: int


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def chat_logprobs(notes: Sequence[TokenNote], texts: TokenTexts, num_top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry per token with the `num_top` most likely tokens beside it."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = texts.text_and_bytes(token)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}

    content = [
        {
            **entry(note.token, note.logprobs.logprob),
            "top_logprobs": [
                entry(token, logprob)
                for token, logprob in zip(
                    note.logprobs.top_ids[:num_top], note.logprobs.top_logprobs[:num_top], strict=True
                )
            ],
        }
        for note in notes
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(notes: Sequence[TokenNote], texts: TokenTexts, num_top: int, offset: int) -> dict[str, Any]:
    """`logprobs` of a text completion; `offset`: characters of the choice's text before these tokens. The most likely
    tokens are a map by text, which also holds the sampled token."""
    tokens: list[str] = []
    chosen: list[float] = []
    tops: list[dict[str, float]] = []
    offsets: list[int] = []
    for note in notes:
        text, _ = texts.text_and_bytes(note.token)
        top = {text: finite(note.logprobs.logprob)}
        for token, logprob in zip(note.logprobs.top_ids[:num_top], note.logprobs.top_logprobs[:num_top], strict=True):
            top.setdefault(texts.text_and_bytes(token)[0], finite(logprob))
        tokens.append(text)
        chosen.append(finite(note.logprobs.logprob))
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}
