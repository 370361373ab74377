"""The cache of media features: who encodes what, what others find, what is thrown away and what is not."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mstar.communication.messages import MediaSpan, SamplingParams
from mstar.engine.resources.base import OpenConfig, StepContext
from mstar.engine.resources.encoder_cache import EncodeFacts, EncoderCache
from mstar.engine.spec import EncoderCacheSpec
from mstar.engine.staging import StepShape
from mstar.engine.step import EncodeStep, Rows
from mstar.engine.transaction import Transaction

WIDTH = 4
STEP = EncodeStep()


def value_of(digest: int, length: int) -> torch.Tensor:
    return torch.full((length, WIDTH), float(digest)) + torch.arange(length)[:, None] / 100


class Rig:
    """Media are (number, tokens); their features follow from both."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.cache = EncoderCache(
            EncoderCacheSpec("enc", WIDTH), capacity=6, max_bytes=max_bytes, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.media: dict[int, Sequence[tuple[int, int]]] = {}

    def open(self, handle: int, *media: tuple[int, int], salt: str = "") -> None:
        spans = tuple(MediaSpan(0, length, digest.to_bytes(4, "big"), (1, 1, length)) for digest, length in media)
        self.cache.introduce(handle, OpenConfig(SamplingParams(), np.zeros(2, np.int32), 4, spans, cache_salt=salt))
        self.media[handle] = media

    def context(self, *handles: int) -> tuple[Rows, StepContext]:
        rows = Rows(np.array(handles, np.int64), np.zeros(len(handles), np.int32))
        return rows, StepContext(rows, 0, False, {}, StepShape(len(handles), 0, 0))

    def plan(self, *handles: int) -> tuple[EncodeFacts, Transaction]:
        _, ctx = self.context(*handles)
        txn = Transaction()
        facts = self.cache.plan(STEP, ctx)
        self.cache.advance(STEP, ctx, txn)
        return facts, txn

    def forward(self, facts: EncodeFacts, ended: bool = True) -> tuple[list[int], list[torch.Tensor]]:
        """Numbers of the media encoded, and what each row gets."""
        self.cache.begin_forward(facts, {})
        encoded: list[int] = []
        features: list[torch.Tensor | None] = []
        for pending in self.cache.pending():
            media = self.media[facts.rows[pending.row].handle]
            first = [sum(length for _, length in media[:index]) for index in range(len(media))]
            number, length = media[first.index(pending.first)]
            assert pending.length == length and pending.grid == (1, 1, length)
            encoded.append(number)
            features.append(value_of(number, length) if ended else None)
        return encoded, self.cache.complete(features)

    def publish(self, facts: EncodeFacts, keep: Sequence[bool] | None = None) -> None:
        rows, _ = self.context(*(row.handle for row in facts.rows))
        self.cache.publish(STEP, rows, facts, None if keep is None else np.array(keep))

    def encode(self, *handles: int) -> list[int]:
        """One whole step; returns the numbers of what was encoded."""
        facts, txn = self.plan(*handles)
        txn.commit()
        encoded, rows = self.forward(facts)
        for handle, row in zip(handles, rows, strict=True):
            torch.testing.assert_close(row, torch.cat([value_of(*medium) for medium in self.media[handle]]))
        self.publish(facts)
        return encoded

    def pending(self, *handles: int) -> list[int]:
        return [sum(grid[2] for grid in grids) for grids in self.cache.pending_grids(np.array(handles, np.int64))]


def test_equal_media_are_encoded_once_in_a_request_and_over_requests() -> None:
    rig = Rig()
    rig.open(0, (1, 3), (2, 2), (1, 3))
    assert rig.pending(0) == [5]
    assert rig.encode(0) == [1, 2]
    rig.open(1, (2, 2), (3, 1))
    assert rig.pending(0, 1) == [0, 1]
    assert rig.encode(1) == [3]
    rig.cache.close(0)
    rig.open(0, (3, 1), (1, 3))
    assert rig.encode(0) == []


def test_media_are_shared_under_the_same_salt_only() -> None:
    rig = Rig()
    rig.open(0, (1, 3), (1, 3), salt="a")
    assert rig.encode(0) == [1]
    rig.open(1, (1, 3))
    rig.open(2, (1, 3), salt="b")
    assert rig.pending(1, 2) == [3, 3]
    rig.open(3, (1, 3), salt="a")
    assert rig.encode(3) == []


def test_nothing_is_found_before_it_is_published() -> None:
    rig = Rig()
    for handle in range(3):
        rig.open(handle, (1, 3))
    first, _ = rig.plan(0)
    assert rig.pending(1) == [3]
    rig.forward(first)
    assert rig.pending(1) == [3]
    rig.publish(first)
    assert rig.pending(1) == [0]  # it has not begun yet


def test_of_a_failed_row_nothing_is_kept() -> None:
    rig = Rig()
    rig.open(0, (1, 3))
    rig.open(1, (2, 2))
    facts, _ = rig.plan(0, 1)
    rig.forward(facts)
    rig.publish(facts, [False, True])
    rig.open(2, (1, 3), (2, 2))
    assert rig.encode(2) == [1]


def test_what_a_row_encodes_is_fixed_from_its_first_step_on() -> None:
    """Although another request publishes the same medium meanwhile, and it is thrown away again."""
    rig = Rig(max_bytes=3 * WIDTH * 4)
    rig.open(0, (1, 3))
    first, txn = rig.plan(0)
    txn.commit()
    assert rig.forward(first, ended=False)[1][0].numel() == 0
    rig.publish(first)
    rig.open(1, (1, 3))
    assert rig.encode(1) == [1]
    assert rig.pending(0) == [3]
    second, _ = rig.plan(0)
    assert rig.forward(second)[0] == [1]
    rig.publish(second)
    rig.open(2, (1, 3))
    assert rig.pending(2) == [0]


def test_a_step_that_is_taken_back_has_not_happened() -> None:
    rig = Rig()
    rig.open(0, (1, 3))
    rig.open(1, (1, 3))
    _, txn = rig.plan(0)
    txn.rollback()
    rig.encode(1)
    assert rig.encode(0) == []  # decided anew


def test_the_longest_unused_go_first_and_nothing_in_use_goes() -> None:
    rig = Rig(max_bytes=6 * WIDTH * 4)
    for number in (1, 2):
        rig.open(0, (number, 3))
        rig.encode(0)
        rig.cache.close(0)
    rig.open(0, (1, 3))
    rig.encode(0)  # read again: 2 is older now
    rig.cache.close(0)
    rig.open(1, (2, 3))
    in_use, _ = rig.plan(1)  # and in use
    rig.open(0, (3, 3))
    rig.encode(0)
    rig.cache.close(0)
    assert rig.forward(in_use)[0] == []
    rig.publish(in_use)
    for number, cached in ((1, False), (2, True), (3, True)):
        rig.open(0, (number, 3))
        assert rig.pending(0) == [0 if cached else 3]
        rig.cache.close(0)


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    rig = Rig(max_bytes=2 * WIDTH * 4)
    rig.open(0, (1, 3), (2, 2))
    assert rig.encode(0) == [1, 2]
    rig.open(1, (1, 3), (2, 2))
    assert rig.pending(1) == [3]


def test_a_step_in_flight_for_a_row_that_has_ended_gets_nothing_and_harms_nobody() -> None:
    rig = Rig()
    rig.open(0, (1, 3))
    first, _ = rig.plan(0)
    ahead, _ = rig.plan(0)
    rig.forward(first)
    rig.publish(first)
    late, _ = rig.plan(0)
    encoded, (nothing,) = rig.forward(late)
    assert encoded == [] and nothing.shape == (0, WIDTH)
    rig.publish(late)
    rig.forward(ahead)
    rig.publish(ahead, [False])
    assert len(rig.cache._cached) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_and_users_stay_right_whatever_happens(data: st.DataObject) -> None:
    limit = data.draw(st.integers(0, 12)) * WIDTH * 4
    rig = Rig(limit)
    live: dict[int, list[tuple[EncodeFacts, Transaction]]] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["open", "step", "undo", "close"]))
        free = [handle for handle in range(4) if handle not in live]
        if action == "open" and free:
            numbers = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
            rig.open(free[0], *((number, number) for number in numbers))
            live[free[0]] = []
        elif live:
            handle = data.draw(st.sampled_from(sorted(live)))
            if action == "close":
                rig.cache.close(handle)
                del live[handle]
            elif rig.cache._rows[handle].steps and not rig.cache._rows[handle].entries:
                continue  # it has its features
            else:
                facts, txn = rig.plan(handle)
                if action == "undo":
                    txn.rollback()
                    continue
                ended = data.draw(st.booleans())
                _, (row,) = rig.forward(facts, ended)
                if row.numel():
                    torch.testing.assert_close(row, torch.cat([value_of(*medium) for medium in rig.media[handle]]))
                rig.publish(facts, [data.draw(st.booleans())])
        cache = rig.cache
        rows = [row for row in cache._rows if row is not None]
        for entry in cache._cached.values():
            assert entry.features is not None and entry.cached
            assert entry.users == sum(own is entry for row in rows for own in row.entries)
        assert cache._cached_bytes == sum(entry.num_bytes for entry in cache._cached.values())
        unused = sum(entry.num_bytes for entry in cache._cached.values() if not entry.users)
        assert cache._cached_bytes <= limit or not unused
