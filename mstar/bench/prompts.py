"""Prompts of a text workload: from a JSONL file, or made of random words in a wanted length.

A made prompt is a function of (seed, kind, index) alone, and no two share a beginning, so that no server's prefix cache
helps. Its words are each one token in the usual byte-pair vocabularies.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

# fmt: off
WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "government", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business",
    "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end",
    "member", "law", "car", "city", "name", "president", "team", "minute", "idea", "body", "information", "back",
    "parent", "face", "level", "office", "door", "health", "person", "art", "war", "history", "party", "result",
    "change", "morning", "reason", "research", "girl", "guy", "moment", "air", "teacher", "force", "education",
)
# fmt: on


class ChatTurn(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True):
    """A line of a prompt file: `prompt` or `messages`, and how many tokens to ask for (None: the run's number)."""

    prompt: str | None = None
    messages: tuple[ChatTurn, ...] = ()
    max_tokens: int | None = None

    def turns(self) -> tuple[ChatTurn, ...]:
        return self.messages or (ChatTurn("user", self.prompt or ""),)

    def text(self) -> str:
        """The prompt of a text completion: a conversation's contents, a line each."""
        return "\n".join(turn.content for turn in self.messages) if self.prompt is None else self.prompt


MakePrompt = Callable[[int], Prompt]


def read_prompts(file: Path) -> list[Prompt]:
    """Raises `ValueError` naming the line that is no prompt."""
    decoder = msgspec.json.Decoder(Prompt)
    prompts: list[Prompt] = []
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompt = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}:{number}: {error}") from error
        if prompt.prompt is None and not prompt.messages:
            raise ValueError(f'{file}:{number}: a line is {{"prompt": "..."}} or {{"messages": [...]}}')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{file} holds no prompt")
    return prompts


def from_file(prompts: Sequence[Prompt], seed: int) -> MakePrompt:
    """Prompts of a file in a shuffled order, over and over."""
    order = list(prompts)
    random.Random(seed).shuffle(order)
    return lambda index: order[index % len(order)]


def of_words(num_words: int, seed: int, kind: str = "") -> MakePrompt:
    """Prompts of `num_words` words each; other ones for another `kind`."""

    def make(index: int) -> Prompt:
        return Prompt(prompt=" ".join(random.Random(f"{seed}/{kind}/{index}").choices(WORDS, k=num_words)))

    return make


def words_for(num_tokens: int, probes: Sequence[tuple[int, int]]) -> int:
    """Words whose prompt has `num_tokens` tokens, by two probes (words, prompt tokens): the chat template and the
    tokenizer add a constant and a factor."""
    (words_a, tokens_a), (words_b, tokens_b) = probes
    per_word = (tokens_b - tokens_a) / (words_b - words_a)
    if per_word <= 0:
        return num_tokens
    return max(1, round(words_b + (num_tokens - tokens_b) / per_word))
