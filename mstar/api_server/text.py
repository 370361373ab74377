"""From token ids to the text that a client sees: incremental detokenization, end tokens and stop strings, per choice.

Front loop only. Joined, what `ChoiceText` releases is the text of all its tokens up to the end, whatever way the tokens
came in: no character is split, nothing of a stop string is shown, no leading space is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Generic, NamedTuple, TypeVar

from tokenizers import Tokenizer

from mstar.api_server.stop_strings import StopAutomaton, StopMatcher

REPLACEMENT = "\ufffd"
PRIMING_TOKENS = 8
"""So many last tokens of the prompt are decoded in front of a continuation: a decoder may drop a space at the very
beginning of a text."""
T = TypeVar("T")


class Detokenizer:
    """Text of a growing list of ids. Only a window of it is decoded, which begins at the last but one place where a
    token ended with a whole character. Text that ends in an incomplete character waits for the next token.

    `tokenizers.DecodeStream` does the same, but fails on decoders with byte fallback when the bytes are no UTF-8.
    """

    __slots__ = ("_decode", "_ids", "_shown", "_start", "_told")

    def __init__(self, tokenizer: Tokenizer | None, prompt_tail: Sequence[int] = ()) -> None:
        """`tokenizer`: None, then no token has a text."""
        self._decode = _no_text if tokenizer is None else tokenizer.decode
        self._ids = list(prompt_tail)
        self._start = 0
        self._told = len(self._ids)
        self._shown = self._decode(self._ids) if self._ids else ""

    def push(self, token: int) -> str:
        ids = self._ids
        ids.append(token)
        text = self._decode(ids[self._start :])
        shown = self._shown
        if len(text) <= len(shown) or text[-1] == REPLACEMENT:
            return ""
        self._start = self._told
        self._told = len(ids)
        self._shown = self._decode(ids[self._start :])
        return text[len(shown) :]

    def flush(self) -> str:
        """The text ends here: releases what waited, without the character that will not be completed."""
        text = self._decode(self._ids[self._start :])[len(self._shown) :]
        return text.rstrip(REPLACEMENT)


def _no_text(ids: Sequence[int]) -> str:
    return ""


class Piece(NamedTuple, Generic[T]):
    """Text that may be shown now, and the notes of the tokens that it completes."""

    text: str
    notes: list[T]


class ChoiceText(Generic[T]):
    """The text of one choice. Each token may carry a note (its logprobs), which is released with the token's text.

    `num_tokens`: tokens that count, end tokens included, without those whose text a stop string cut off. `is_stopped`:
    a stop string was found; later tokens are ignored. `num_told`: characters that the tokens so far have, whether they
    may be shown or not.
    """

    __slots__ = ("_detokenizer", "_ends", "_matcher", "_num_shown", "_waiting", "is_stopped", "num_tokens", "num_told")

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        end_tokens: Container[int] = (),
        stops: StopAutomaton | None = None,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        """`end_tokens`: ids that end a choice; they have no text. `prompt_tail`: last ids of a prompt that the text
        continues."""
        self.num_tokens = 0
        self.is_stopped = False
        self._detokenizer = Detokenizer(tokenizer, prompt_tail[-PRIMING_TOKENS:])
        self._ends = end_tokens
        self._matcher = None if stops is None else StopMatcher(stops)
        self.num_told = 0
        self._num_shown = 0
        self._waiting: deque[tuple[int, T | None]] = deque()

    def push(self, token: int) -> str:
        """One more token, without a note; the text that may be shown now. For choices without notes."""
        if self._matcher is None:
            self.num_tokens += 1
            return "" if token in self._ends else self._detokenizer.push(token)
        return self.push_noted(token, None).text

    def push_noted(self, token: int, note: T | None) -> Piece[T]:
        """One more token with its note."""
        if self.is_stopped:
            return Piece("", [])
        self.num_tokens += 1
        if token in self._ends:
            return Piece("", [])
        self._waiting.append((self.num_told, note))
        return self._release(self._detokenizer.push(token), is_last=False)

    def finish(self) -> Piece[T]:
        """No token follows: releases everything that waited."""
        if self.is_stopped:
            return Piece("", [])
        return self._release(self._detokenizer.flush(), is_last=True)

    def _release(self, text: str, *, is_last: bool) -> Piece[T]:
        matcher = self._matcher
        self.num_told += len(text)
        if matcher is not None:
            text = matcher.feed(text)
            if is_last and not matcher.is_matched:
                text += matcher.flush()
        self._num_shown += len(text)
        notes: list[T] = []
        waiting = self._waiting
        is_cut = matcher is not None and matcher.is_matched
        while waiting and (waiting[0][0] < self._num_shown or (is_last and not is_cut)):
            note = waiting.popleft()[1]
            if note is not None:
                notes.append(note)
        if is_cut:
            self.is_stopped = True
            self.num_tokens -= len(waiting)
            waiting.clear()
        return Piece(text, notes)
