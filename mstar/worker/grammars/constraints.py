"""What a constrained text may go on with: one matcher per request, and the masks of a step.

Plain types and the row's own arithmetic, on the worker's loop thread; no xgrammar, which only requests that ask for it
pay for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

TOKEN_LIMIT_NS = 250_000_000
"""Processor time that one token of one text may cost. A sound grammar takes a thousandth; the time of an ambiguous one
grows with the text, and would stop everybody."""
TOO_AMBIGUOUS = "the grammar is too ambiguous: what may follow this text takes too long to find"
NOTHING_FITS = "the grammar leaves nothing that this text could go on with or end at"
FAULTS_OF_GRAMMARS = frozenset({TOO_AMBIGUOUS, NOTHING_FITS})
"""Of requests that fail with these the client's grammar is the reason."""


class GrammarError(ValueError):
    """No text can be constrained like that; the message is meant for the client."""


class HopelessGrammarError(GrammarError):
    """Trying it again would cost as much as this time."""


class CompilerLostError(RuntimeError):
    """What compiles grammars has gone, for reasons of its own; the message is meant for the client."""


class Matcher(Protocol):
    """Follows one text; see `xgrammar.GrammarMatcher`."""

    def accept_token(self, token_id: int, /) -> bool: ...
    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int = 0, /) -> bool: ...
    def is_terminated(self) -> bool: ...


class Constraint:
    """One request's text. `end_ids` end it; `min_tokens` tokens come before one of them does, if the grammar has so
    many. `ends_alone`: nobody else ends the text with such a token.

    `is_over`: the text is complete, and what else is drawn is not looked at.
    """

    __slots__ = ("_end_bits", "_end_words", "_matcher", "_min_tokens", "_num_tokens", "ends_alone", "is_over")

    def __init__(self, matcher: Matcher, end_ids: Sequence[int], min_tokens: int, *, ends_alone: bool) -> None:
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.ends_alone = ends_alone
        self.is_over = False
        words: dict[int, int] = {}
        for token in end_ids:
            words[token // 32] = words.get(token // 32, 0) | 1 << token % 32
        self._end_words = np.array(list(words), np.int64)
        self._end_bits = np.array(list(words.values()), np.uint32).view(np.int32)

    def accept(self, token: int) -> str:
        """The token was drawn. Returns why the request fails; empty: it goes on."""
        began = time.thread_time_ns()
        if not self._matcher.accept_token(token):
            return "a token was drawn that the grammar does not allow"
        self._num_tokens += 1
        self.is_over = self._matcher.is_terminated()
        return TOO_AMBIGUOUS if time.thread_time_ns() - began > TOKEN_LIMIT_NS else ""

    def fill(self, bits: np.ndarray, index: int) -> str:
        """Write what may be drawn next into row `index` of `bits` int32 `[rows, words]`. Returns as `accept`."""
        began = time.thread_time_ns()
        row = bits[index]
        if not self._matcher.fill_next_token_bitmask(bits, index):
            row.fill(-1)  # it allows everything, and has written nothing
        if self._num_tokens < self._min_tokens or self.ends_alone:
            ends = row[self._end_words]
            row[self._end_words] &= ~self._end_bits
            if not row.any():
                row[self._end_words] = ends
        if not row.any():
            row.fill(-1)  # the row has failed; the sampler need not find out by itself
            return NOTHING_FITS
        return TOO_AMBIGUOUS if time.thread_time_ns() - began > TOKEN_LIMIT_NS else ""
