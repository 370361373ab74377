"""The seeded mixture of requests: what is asked, how the client leaves, and which answers are right.

Asks are drawn anew or again, with beginnings in common, around page borders and up to every limit.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from soak.models import PAGE
from soak.triggers import Fault, first_reserved, trigger

Leaving = Literal["closes", "resets", "half", "delete"]
"""How a client ends what it asked for: closes its connection, resets it, sends half a request, or deletes the
request."""


@dataclass(frozen=True)
class Leave:
    """After `num_deltas` events of the stream, or after `after_s` where that comes first."""

    how: Leaving
    after_s: float
    num_deltas: int


@dataclass(frozen=True)
class Ask:
    """`fields`: the request's body without `model`. `prompts`: token ids of its prompts (of a chat: none). `refused`:
    it cannot be served, and the answer is a 400. `repeats`: its texts are the same every time."""

    route: Literal["completions", "chat/completions"]
    fields: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...] = ()
    refused: bool = False
    repeats: bool = True
    fault: Fault | None = None
    leave: Leave | None = None

    @property
    def streams(self) -> bool:
        return bool(self.fields.get("stream"))

    @property
    def num_choices(self) -> int:
        return self.fields.get("n", 1) * max(1, len(self.prompts))

    def alone(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the same request for the server that answers alone: nothing in it that is not about the
        text."""
        left_out = ("stream", "stream_options", "priority", "cache_salt", "timeout")
        return f"/v1/{self.route}", {name: value for name, value in self.fields.items() if name not in left_out}

    @property
    def key(self) -> str:
        return json.dumps(self.alone(), sort_keys=True)


class Asks:
    """Draws asks. `room`: tokens of the longest request that can be served; `accepts`: optional fields that the server
    knows."""

    def __init__(
        self, rng: random.Random, *, vocab_size: int, room: int, max_seq_len: int, has_chat: bool, accepts: set[str]
    ) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._first_reserved = first_reserved(vocab_size)
        self._max_seq_len = max_seq_len
        self._has_chat = has_chat
        self._accepts = accepts
        self._most = room - (0 if has_chat else 4)
        """The composite model puts up to four places of media in front of the prompt."""
        self._beginnings = [self._ids(rng.choice((PAGE - 1, 2 * PAGE + 3, 5 * PAGE))) for _ in range(3)]
        self._pages = [self._ids(PAGE) for _ in range(3)]
        """In any order: equal pages behind different ones are not the same."""
        self._recent: deque[Ask] = deque(maxlen=60)
        self._answered: deque[tuple[int, ...]] = deque(maxlen=30)

    def answered(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """What a finished request said; later prompts go on from it. Reserved ids are said, never asked."""
        if max(output, default=0) < self._first_reserved:
            self._answered.append((*prompt, *output))

    def draw(self) -> Ask:
        rng = self._rng
        if self._recent and rng.random() < 0.3:
            ask = rng.choice(self._recent)
        else:
            ask = self._fresh()
            self._recent.append(ask)
        return self._sent(ask)

    def long_pair(self) -> list[Ask]:
        """Two requests of four fifths of the pool each."""
        num = int(0.8 * self._most)
        return [self._sent(self._text(self._ids(num - 8), {"max_tokens": 8, "ignore_eos": True})) for _ in range(2)]

    def _fresh(self) -> Ask:
        rng = self._rng
        kind = rng.random()
        if kind < 0.03:
            return self._too_large()
        if kind < 0.10 and self._has_chat:
            words = [" ".join(f"t{token}" for token in self._ids(rng.randint(1, 20))) for _ in range(rng.randint(1, 3))]
            messages = [{"role": "user", "content": content} for content in words]
            return Ask("chat/completions", {"messages": messages, **self._limits(70), **self._sampling()})
        if kind < 0.13:
            prompts = tuple(tuple(self._ids(rng.randint(1, 30))) for _ in range(rng.randint(2, 3)))
            fields = {"prompt": [list(prompt) for prompt in prompts], **self._limits(30), **self._sampling()}
            return self._with_repeats(Ask("completions", fields, prompts))
        ids = self._prompt()
        fault = None
        if rng.random() < 0.06:
            fault = rng.choice(list(Fault))
            at = rng.randint(0, len(ids))
            ids = [*ids[:at], *trigger(fault, self._vocab_size), *ids[at:]][: self._most - 4]
        return replace(self._text(ids, {**self._limits(len(ids)), **self._sampling()}), fault=fault)

    def _text(self, ids: list[int], fields: dict[str, Any]) -> Ask:
        prompt: Any = ids if self._rng.random() < 0.8 else " ".join(f"t{token}" for token in ids)
        return self._with_repeats(Ask("completions", {"prompt": prompt, "temperature": 0, **fields}, (tuple(ids),)))

    @staticmethod
    def _with_repeats(ask: Ask) -> Ask:
        fields = ask.fields
        return replace(ask, repeats=fields.get("temperature", 1) == 0 or "seed" in fields)

    def _sent(self, ask: Ask) -> Ask:
        """What one sending of an ask has of its own: how it streams, how the client leaves, how important it is."""
        rng, fields = self._rng, dict(ask.fields)
        if rng.random() < 0.6:
            fields["stream"] = True
            if rng.random() < 0.7:
                fields["stream_options"] = {"include_usage": True}
        if "priority" in self._accepts and rng.random() < 0.3:
            fields["priority"] = rng.randint(-2, 2)
        if "cache_salt" in self._accepts and rng.random() < 0.15:
            fields["cache_salt"] = rng.choice(("a", "b"))
        if "timeout" in self._accepts and rng.random() < 0.04:
            fields["timeout"] = round(rng.uniform(0.01, 0.6), 3)
        leave = None
        if rng.random() < 0.15 and not ask.refused:
            how: Leaving = rng.choice(("closes", "closes", "resets", "half", "delete", "delete"))
            leave = Leave(how, rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 1.0))), rng.randint(1, 12))
        return self._with_repeats(replace(ask, fields=fields, leave=leave))

    def _ids(self, count: int) -> list[int]:
        return [self._rng.randint(3, min(self._first_reserved - 1, 139)) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self._rng
        kind = rng.random()
        if kind < 0.35:
            ids = self._ids(rng.randint(1, 24))
        elif kind < 0.55:
            ids = self._ids(max(1, PAGE * rng.randint(1, 6) + rng.randint(-1, 1)))
        elif kind < 0.67:
            ids = rng.choice(self._beginnings) + self._ids(rng.randint(1, 20))
        elif kind < 0.78:
            ids = [token for _ in range(rng.randint(1, 4)) for token in rng.choice(self._pages)]
            ids += self._ids(rng.randint(0, 8))
        elif kind < 0.9 and self._answered:
            ids = [*rng.choice(self._answered), *self._ids(rng.randint(1, 12))]
        else:
            ids = self._ids(rng.randint(24, self._most - 4))
        return ids[: self._most - 4]

    def _limits(self, num_prompt: int) -> dict[str, Any]:
        """Lengths; sometimes exactly what is left."""
        rng = self._rng
        left = max(1, self._most - num_prompt)
        if rng.random() < 0.05 and self._has_chat:
            most = left
        else:
            most = min(left, rng.choice((1, 2, rng.randint(3, 16), rng.randint(16, 64), PAGE)))
        fields: dict[str, Any] = {"max_tokens": most, "ignore_eos": rng.random() < 0.7}
        if rng.random() < 0.1:
            fields["min_tokens"] = rng.randint(0, most)
        return fields

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        fields: dict[str, Any] = {"temperature": 0}
        if rng.random() < 0.35:
            fields = {"temperature": rng.choice((0.3, 1.0, 1.5))}
            if rng.random() < 0.9:
                fields["seed"] = rng.randint(0, 2**40)
            fields |= rng.choice(({}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}))
            if rng.random() < 0.2:
                fields["n"] = rng.randint(2, 4)
        if rng.random() < 0.15:
            fields |= rng.choice(({"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.4}))
        if rng.random() < 0.15:
            fields["stop"] = [f"t{token}" for token in self._ids(rng.randint(1, 4))]
        if rng.random() < 0.1:
            fields["stop_token_ids"] = self._ids(3)
        return fields

    def _too_large(self) -> Ask:
        """More than the context, or more than the pool has pages for."""
        rng = self._rng
        prompt, most = rng.choice(
            (
                (self._ids(self._max_seq_len), 1),
                (self._ids(10), self._max_seq_len),
                (self._ids(self._most), 20),
                (self._ids(20), self._most),
            )
        )
        return Ask("completions", {"prompt": prompt, "max_tokens": most}, (tuple(prompt),), refused=True)
