"""A fault as a test declares it: where it strikes, which calls, how often, and what then happens.

Nothing here touches the product: the other files of this package put themselves in front of its hooks, stages, frames
and files, ask `Fault.strike` at each call, and let what it does happen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

HOOKS = ("prepare_batch", "prepare_inputs", "declare_step", "can_batch", "forward_batched", "check_stop")
"""Of a node, as a place of a fault names them."""
STAGES = ("admit", "plan", "advance", "settle", "publish")
"""Of a resource."""


class Injected(RuntimeError):
    """What a fault raises unless it says otherwise: no code of the product expects it."""


def raise_injected() -> None:
    raise Injected("broken on purpose")


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("out of memory on purpose")


def lose_the_device() -> None:
    """What torch raises when a device has been left unusable by work that was launched on it."""
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Call(NamedTuple):
    """One call of a place. `rids`: requests whose rows it is about; of a forward, those of its step. `num_rows`: rows
    of this call, which for a forward may be only some of the step's."""

    walk: str
    rids: tuple[str, ...]
    num_rows: int


@dataclass
class Fault:
    """Strikes calls of `place` (a hook, or a stage) from the `after`-th matching one on, `times` times (None: every
    one). `rid`: only where a row of this request takes part; `walk`: only in this walk; `min_rows`: only calls of so
    many rows. `struck`: the calls that it struck."""

    place: str
    rid: str | None = None
    walk: str | None = None
    after: int = 0
    times: int | None = 1
    min_rows: int = 0
    effect: Callable[[], None] = raise_injected
    struck: list[Call] = field(default_factory=list)
    num_matched: int = 0

    def __post_init__(self) -> None:
        if self.place not in (*HOOKS, *STAGES):
            raise ValueError(f"{self.place!r} is no place of a fault: {', '.join((*HOOKS, *STAGES))}")

    def strike(self, call: Call) -> None:
        """The effect happens, if this call is one to strike."""
        if self.rid is not None and self.rid not in call.rids:
            return
        if (self.walk is not None and self.walk != call.walk) or call.num_rows < self.min_rows:
            return
        self.num_matched += 1
        if self.num_matched <= self.after or (self.times is not None and len(self.struck) >= self.times):
            return
        self.struck.append(call)
        self.effect()

    @property
    def rids(self) -> set[str]:
        """Requests that took part in a call that was struck."""
        return {rid for call in self.struck for rid in call.rids}


def strike_all(faults: Sequence[Fault], place: str, call: Call) -> None:
    for fault in faults:
        if fault.place == place:
            fault.strike(call)
