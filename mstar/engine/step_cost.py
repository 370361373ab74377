"""`StepCost`: how long a step takes on this machine, as far as it can be foretold.

Plain arithmetic, on any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds. A step with prompts takes `base_s`, and for each chunk of n tokens of a row that has c in its cache
    n `token_s` + c `context_s` + n (c + n / 2) `pair_s`: it reads the cache once, each token meets all of it, and those
    before it in the chunk as well. A step of n decode rows takes `decode_base_s` + n `decode_row_s`, and for the caches
    what chunks of one token do."""

    base_s: float
    token_s: float
    context_s: float
    pair_s: float
    decode_base_s: float
    decode_row_s: float

    def decode_s(self, num_rows: int, contexts: int) -> float:
        """Decode rows alone, which read `contexts` tokens of cache together."""
        return self.decode_base_s + num_rows * self.decode_row_s + contexts * (self.context_s + self.pair_s)

    def mixed_s(self, num_tokens: int, contexts: int) -> float:
        """What a step with prompts takes before the first token of a prompt: itself, and `num_tokens` rows of one token
        each that read `contexts` tokens together."""
        return self.base_s + num_tokens * self.token_s + contexts * (self.context_s + self.pair_s)

    def chunk_s(self, num_tokens: int, start: int) -> float:
        """What a chunk adds to a step, with `start` tokens of its row in the cache."""
        each = self.token_s + (start + num_tokens / 2) * self.pair_s
        return start * self.context_s + num_tokens * each

    def chunk_tokens(self, seconds: float, start: int) -> int:
        """The most tokens whose `chunk_s` is within `seconds`."""
        seconds -= start * self.context_s
        if seconds <= 0:
            return 0
        # pair/2 n² + (token + start pair) n = seconds, in the form that stays exact when pair is small
        linear = self.token_s + start * self.pair_s
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 2 * self.pair_s * seconds)))
