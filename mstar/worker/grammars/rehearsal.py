"""Whether texts can be followed in time: a rehearsal with random tokens, where nobody waits for it.

Of most ambiguous grammars each further token costs more than the last, so a few dozen tell. xgrammar has no masks ready
for the states of a pattern that repeats something hundreds of times: of such a grammar every token is slow. One that
shows itself only later is ended on the worker's loop, by `mstar.worker.grammars.constraints`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from mstar.worker.grammars.compiler import CompiledGrammar
from mstar.worker.grammars.constraints import TOKEN_LIMIT_NS, TOO_AMBIGUOUS, GrammarError

NUM_TOKENS = 48
LIMIT_NS = TOKEN_LIMIT_NS // 2
ENOUGH_NS = 300_000_000
"""After so long it goes on only while tokens take longer and longer."""
GROWING = 1.5
"""Times the mean; of a time that grows linearly the last is twice the mean."""
SUSTAINED_NS = 5_000_000
"""Mean of all tokens but the slowest, which every stream of the worker would wait for at each of its tokens."""
TOO_SLOW = (
    "what may follow a text of this grammar takes too long to find, at every token; ask for repetitions of up to 100 "
    "times, for a length (minLength, maxLength), or for no upper bound"
)


def rehearse(grammar: CompiledGrammar, end_ids: Sequence[int], vocab_size: int) -> None:
    """Follow texts of random tokens, of processor time as limited as a worker's loop limits it.

    Raises:
        GrammarError: a token took too long.
    """
    draw = random.Random(0)
    bits = np.empty((1, -(-vocab_size // 32)), np.int32)
    matcher, number, spent_ns, slowest_ns = grammar.matcher(end_ids), 0, 0, 0
    while number < NUM_TOKENS:
        number += 1
        began = time.thread_time_ns()
        if not matcher.fill_next_token_bitmask(bits, 0):
            bits.fill(-1)
        took_ns = time.thread_time_ns() - began
        token = _any_token(bits[0], vocab_size, end_ids, draw)
        began = time.thread_time_ns()
        goes_on = token is not None and matcher.accept_token(token)
        took_ns += time.thread_time_ns() - began
        if took_ns > LIMIT_NS:
            raise GrammarError(TOO_AMBIGUOUS)
        spent_ns += took_ns
        slowest_ns = max(slowest_ns, took_ns)
        if spent_ns > ENOUGH_NS and took_ns < GROWING * spent_ns / number:
            break
        if not goes_on:
            matcher = grammar.matcher(end_ids)
    if spent_ns - slowest_ns > SUSTAINED_NS * (number - 1):
        raise GrammarError(TOO_SLOW)


def _any_token(bits: np.ndarray, vocab_size: int, end_ids: Sequence[int], draw: random.Random) -> int | None:
    """Of those that are allowed, but none that ends the text; None if there is no other."""
    is_allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size]
    is_allowed[list(end_ids)] = 0
    allowed = np.flatnonzero(is_allowed)
    return int(draw.choice(allowed)) if len(allowed) else None
