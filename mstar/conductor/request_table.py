"""The conductor's ledger: one `RequestRecord` per choice that runs on the workers. Front loop only; sends nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mstar.communication.messages import FinishReason, OpenRequest
from mstar.conductor.events import RequestStream
from mstar.conductor.request_times import ChoiceTimes

EmitKey = tuple[int, str]
"""(rank, signal): emits are counted per worker, because each worker reports its own total."""


@dataclass(slots=True)
class PartitionProgress:
    """Where one partition of a request stands. `ranks`: where it is started, and has ended when all of them say so.
    `waiting`: those whose `WalkDone` is still due. `asks_model`: after
    each walk the model names the next one; otherwise the walks started are all there are. `limits`: loop limits that
    came with the walks."""

    ranks: tuple[int, ...]
    asks_model: bool
    walks: tuple[str, ...]
    waiting: set[int] = field(init=False)
    limits: dict[str, int] = field(default_factory=dict)
    walks_done: tuple[str, ...] = ()
    is_done: bool = False
    reason: FinishReason = "length"

    def __post_init__(self) -> None:
        self.waiting = set(self.ranks)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One choice on the workers. `ranks` hold state of it. `received` and `expected` count emits; the request is
    complete when every partition is done and they agree. Times are of the conductor's clock, in seconds."""

    rid: str
    stream: RequestStream
    choice: int
    num_prompt_tokens: int
    step_metadata: Mapping[str, int | float | str | bool]
    partitions: dict[str, PartitionProgress]
    ranks: tuple[int, ...]
    opening: OpenRequest | None = None
    """What the workers are still to be told, for a request that spans several of them."""
    num_opened: int = 0
    """How many of `ranks`, in order, have promised room."""
    received: dict[EmitKey, int] = field(default_factory=dict)
    expected: dict[EmitKey, int] = field(default_factory=dict)
    times: ChoiceTimes = field(init=False)
    last_emit_at: float | None = None
    is_stopped: bool = False
    """The client's stop string was found: what its text partition still emits is dropped."""
    is_walked: bool = False
    """Every partition is done; only emits may be missing."""
    num_computed_tokens: int = 0
    """Prompt tokens that were computed, 0 while unknown."""

    def __post_init__(self) -> None:
        self.times = ChoiceTimes(self.rid)

    def has_all_emits(self) -> bool:
        return all(self.received.get(key, 0) >= count for key, count in self.expected.items())

    @property
    def num_received(self) -> int:
        return sum(self.received.values())

    @property
    def num_cached_tokens(self) -> int:
        computed = self.num_computed_tokens
        return max(0, self.num_prompt_tokens - computed) if computed else 0


class RequestTable:
    """Records by id. Ids off the wire may be unknown: their request ended."""

    def __init__(self) -> None:
        self.by_rid: dict[str, RequestRecord] = {}

    def __len__(self) -> int:
        return len(self.by_rid)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(list(self.by_rid.values()))

    def add(self, record: RequestRecord) -> None:
        if record.rid in self.by_rid:
            raise ValueError(f"request {record.rid} is in the table already")
        self.by_rid[record.rid] = record

    def get(self, rid: str) -> RequestRecord | None:
        return self.by_rid.get(rid)

    def pop(self, rid: str) -> RequestRecord | None:
        return self.by_rid.pop(rid, None)

    def on_rank(self, rank: int) -> list[RequestRecord]:
        return [record for record in self.by_rid.values() if rank in record.ranks]
