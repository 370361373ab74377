"""Prompts as a text, token ids, or a list of either: from a request's field to the conductor's `PromptInput`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mstar.api_server.errors import bad_request
from mstar.conductor.admission import check_prompt_length
from mstar.conductor.model_facts import ModelFacts
from mstar.conductor.request import PromptInput
from mstar.model.base import PromptKind

PROMPT_KINDS = "it must be a text, its token ids, or a list of either, and not empty"


def prompt_kind(prompt: Any) -> str | None:
    """By the first element: else every element would be tried as every kind. The tags are no identifiers, so that no
    error's field name has them."""
    if isinstance(prompt, str):
        return "a text"
    match prompt:
        case [str(), *_]:
            return "some texts"
        case [list(), *_]:
            return "lists of ids"
        case [int(), *_]:
            return "token ids"
        case _:
            return None


def prompt_inputs(
    given: str | list[int] | list[str] | list[list[int]], kind: PromptKind, facts: ModelFacts
) -> tuple[PromptInput, ...]:
    """One for each prompt in `given`, which is not empty.

    Raises:
        RefusedError: 400, an empty text, too many tokens, or an id beyond the vocabulary.
    """
    return tuple(_prompt_input(one, kind, facts) for one in _each(given))


def _each(given: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(given, str) or isinstance(given[0], int):
        return [given]  # type: ignore[list-item]
    return given  # type: ignore[return-value]


def _prompt_input(one: str | list[int], kind: PromptKind, facts: ModelFacts) -> PromptInput:
    if isinstance(one, str):
        prompt = PromptInput(kind=kind, text=one)
        if not one:
            raise bad_request(f"The {prompt.sent_as} is empty.", prompt.sent_as)
        return prompt
    prompt = PromptInput(kind=kind, token_ids=tuple(one))
    check_prompt_length(prompt, facts.max_seq_len)
    for token in one:
        vocabulary_id(token, facts, prompt.sent_as)
    return prompt


def vocabulary_id(token: int, facts: ModelFacts, field: str) -> int:
    """Raises `RefusedError` (400) for an id beyond the vocabulary."""
    if not 0 <= token < facts.vocab_size:
        raise bad_request(f"{field}: token id {token} is outside the vocabulary of {facts.vocab_size}.", field)
    return token
