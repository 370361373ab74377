"""Faults that a prompt asks for: a token id that stands twice in a row in it. No torch.

Only the soak's own model cards know them, so the product has no switch for faults. A fault that needs the pair in one
forward does not happen when the pair is cut in two; the request is then an ordinary one.
"""

from __future__ import annotations

from enum import IntEnum

NUM_RESERVED = 8
"""Ids at the end of a vocabulary that no ordinary prompt has: the faults' and the composite model's media token."""
MARK = "injected"
"""A word of every message of a fault."""
SLOW_S = 0.3


class Fault(IntEnum):
    """Values are offsets from the first reserved id. `forward`, `memory` (a forward at any size), `memory_of_many` (a
    forward of several rows) and `slow` happen in the forward that has the pair; `prepare` and `stop` in host hooks of
    the language model; `row` in hooks of the nodes around it."""

    forward = 0
    memory = 1
    memory_of_many = 2
    slow = 3
    prepare = 4
    stop = 5
    row = 6


def first_reserved(vocab_size: int) -> int:
    return vocab_size - NUM_RESERVED


def trigger(fault: Fault, vocab_size: int) -> list[int]:
    """What a prompt has in it to bring the fault about."""
    return [first_reserved(vocab_size) + fault] * 2
