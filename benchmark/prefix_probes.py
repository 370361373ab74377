"""Single questions about what a server reuses of earlier prompts, for `benchmark.prefix_reuse`: the same prompt again,
and a system prompt that several requests share. Prompts are token ids, so their lengths are exact.

A model with recurrent states can go on only from where it kept one; what a server reuses of these says where it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmark.local_server import LocalServer

REPEATED_LENGTHS = (300, 1, 64, 65, 128, 1000, 2000)
SHARED_TOKENS = 600
OWN_TOKENS = 100
SHARING = 5


class Asked(NamedTuple):
    """A prompt's tokens, those that the server took from its cache, and the most that it could have."""

    num_tokens: int
    cached: int
    reusable: int


def before_last(num_tokens: int, page: int) -> int:
    """Tokens of full pages that a prompt may find; its last token is always computed."""
    return (num_tokens - 1) // page * page


def drawn(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Ordinary tokens: the first and the last tenth of a vocabulary may be special ones."""
    low, high = vocab_size // 10, vocab_size * 9 // 10
    return np.random.default_rng(seed).integers(low, high, num_tokens).tolist()


def ask_repeated(server: LocalServer, vocab_size: int, page: int, lengths: Sequence[int]) -> list[Asked]:
    """Each prompt twice; what the second time found."""
    found: list[Asked] = []
    for index, length in enumerate(lengths):
        ids = drawn(length, vocab_size, seed=9000 + index)
        server.complete(ids, 2)
        found.append(Asked(length, server.complete(ids, 2).cached_tokens, before_last(length, page)))
    return found


def ask_shared(server: LocalServer, vocab_size: int, page: int) -> list[Asked]:
    """`SHARING` prompts, one after the other, with one beginning and ends of their own."""
    shared = drawn(SHARED_TOKENS, vocab_size, seed=9100)
    found: list[Asked] = []
    for index in range(SHARING):
        ids = [*shared, *drawn(OWN_TOKENS, vocab_size, seed=9101 + index)]
        cached = server.complete(ids, 2).cached_tokens
        found.append(Asked(len(ids), cached, SHARED_TOKENS // page * page if index else 0))
    return found


def summarize_repeated(asked: Sequence[Asked], page: int) -> dict[str, Any]:
    computed = [one.num_tokens - one.cached for one in asked]
    return {
        **{f"cached of {one.num_tokens}": one.cached for one in asked},
        "most computed again": max(computed),
        "goals": {
            "a repeated prompt computes at most one page": max(computed) <= page,
            "and finds all full pages before its last token": all(one.cached == one.reusable for one in asked),
        },
    }


def summarize_shared(asked: Sequence[Asked]) -> dict[str, Any]:
    return {
        "shared tokens": SHARED_TOKENS,
        **{f"cached by request {index}": one.cached for index, one in enumerate(asked, start=1)},
        "goals": {
            "the third request with one beginning reuses it to the page": all(
                one.cached >= one.reusable for one in asked[2:]
            )
        },
    }
