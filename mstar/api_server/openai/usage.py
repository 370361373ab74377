"""Token usage of a request, as OpenAI counts it. Pure.

Prompt tokens count once per prompt, however many choices it has. Completion tokens count end tokens, but not tokens
whose text a stop string cut off. Reasoning tokens are completion tokens too.
"""

from __future__ import annotations

from typing import Any

from mstar.conductor.events import FinishedEvent


class Usage:
    """Grows with every choice that finishes."""

    def __init__(self, num_choices: int, *, counts_reasoning: bool = False) -> None:
        """`num_choices` per prompt. `counts_reasoning`: the model tells its reasoning apart."""
        self._num_choices = num_choices
        self._counts_reasoning = counts_reasoning
        self._num_reasoning_tokens = 0
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_completion_tokens = 0

    def add(self, event: FinishedEvent, num_tokens: int, num_reasoning_tokens: int = 0) -> None:
        """Tokens that a prompt found in the cache are those that its first choice did not compute: the least."""
        prompt = event.choice // self._num_choices
        cached = min(event.num_cached_tokens, self._prompts.get(prompt, (0, event.num_cached_tokens))[1])
        self._prompts[prompt] = (event.num_prompt_tokens, cached)
        self._num_completion_tokens += num_tokens
        self._num_reasoning_tokens += num_reasoning_tokens

    def as_json(self) -> dict[str, Any]:
        num_prompt = sum(num for num, _ in self._prompts.values())
        num_cached = sum(cached for _, cached in self._prompts.values())
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        if self._counts_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning_tokens}
        return usage
