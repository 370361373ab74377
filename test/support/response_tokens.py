"""Token ids of what a server answered, from the logprobs that it gave with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from mstar.api_server.token_text import TokenTexts


class ResponseTokens:
    """`stops`: ids that end a response; it does not show them."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[int]) -> None:
        self._texts = TokenTexts(tokenizer)
        self._num_tokens = tokenizer.get_vocab_size()
        self._stops = list(stops)

    def of_choice(self, choice: Mapping[str, Any], expected: Sequence[int]) -> list[int]:
        """Of a choice of a chat or a completion that was asked for logprobs."""
        logprobs = choice["logprobs"]
        shown = logprobs["tokens"] if "tokens" in logprobs else [bytes(one["bytes"]) for one in logprobs["content"]]
        return self.ids_of(shown, choice["finish_reason"], expected)

    def ids_of(self, shown: Sequence[str | bytes], finish_reason: str, expected: Sequence[int]) -> list[int]:
        """From the texts or the bytes of the tokens, and the stop token that is not among them. Where one belongs to
        several ids the expected one is taken, if it is among them."""
        ids = [
            expected[i] if i < len(expected) and self._matches(expected[i], one) else self._id_of(one)
            for i, one in enumerate(shown)
        ]
        if finish_reason == "stop":
            at = len(ids)
            ids.append(expected[at] if at < len(expected) and expected[at] in self._stops else self._stops[0])
        return ids

    def _matches(self, token: int, shown: str | bytes) -> bool:
        if isinstance(shown, bytes):
            return self._texts.token_bytes(token) == shown
        return self._texts.text_and_bytes(token)[0] == shown

    def _id_of(self, shown: str | bytes) -> int:
        for token in range(self._num_tokens):
            if self._matches(token, shown):
                return token
        raise AssertionError(f"no token is {shown!r}")
