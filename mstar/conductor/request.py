"""`GenerateRequest`: what the HTTP side asks of the conductor, validated and frozen. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import BaseModel

from mstar.communication.messages import SamplingParams
from mstar.model.base import ChatMessage, NoParameters, PromptKind

MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt. At most one of `messages`, `text`, `token_ids` is set; `inputs` are arrays by signal name."""

    kind: PromptKind
    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    continue_final_message: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    template_variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sent_as(self) -> str:
        """The field of a request that has it."""
        return {"chat": "messages", "embedding": "input"}.get(self.kind, "prompt")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """`num_choices` results for each of `prompts`; choice `p * num_choices + i` is the i-th of prompt p.

    `sampling` is the same for all choices, except that the conductor sets `seed` (from `seed` and i) and `max_tokens`.
    `max_tokens=None` grants the rest of the context. `clamps_max_tokens`: the client did not ask for `max_tokens`, so
    it may be cut to the rest of the context instead of refusing the request; else `max_tokens_name` is the field that
    the client used. `request_id` is the client's name for the request, for logs; it need not be unique. A lower
    `priority` is served sooner. Prompts of different `cache_salt` share no cached prefix. `timeout_s`: longest time
    from submission to the end (None: the server's).
    """

    request_id: str
    prompts: tuple[PromptInput, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    num_choices: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    clamps_max_tokens: bool = False
    max_tokens_name: str = "max_tokens"
    parameters: BaseModel = field(default_factory=NoParameters)
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None

    @property
    def num_results(self) -> int:
        return len(self.prompts) * self.num_choices

    def without_words(self) -> GenerateRequest:
        """The same request for the time when its prompts are prepared: they keep their kind only. What a client sent,
        files of media above all, is not held for as long as its answer takes."""
        return replace(self, prompts=tuple(PromptInput(prompt.kind) for prompt in self.prompts))


def choice_seed(seed: int, index: int) -> int:
    """Seed of choice `index` of a request with `seed`: 63 bits, a bijective mix of (seed + index * odd constant), so
    that the choices of one request never share a seed. Finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK_64
    return (z ^ (z >> 31)) >> 1
