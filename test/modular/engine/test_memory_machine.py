"""Pages, promises, prefix index and host pool together, with and without recurrent states beside them: whatever
requests do, accounts balance after each operation, no row ever reads another's contents or goes on from another's
state, and everything that was let in runs to its end."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.memory_rig import Armed, MemoryRig

from mstar.communication.messages import MediaSpan

NUM_PAGES, NUM_HANDLES = 11, 6
IMAGE = MediaSpan(1, 2, b"image")
STARTS = [[], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9]]
TAILS = st.lists(st.integers(1, 2), min_size=1, max_size=5)


class MemoryMachine(RuleBasedStateMachine):
    """`armed`: a step that is planned and not submitted. At most two are in flight behind it. `num_slots`: of states
    beside the cache."""

    num_slots: Sequence[int] = (0,)

    def __init__(self) -> None:
        super().__init__()
        self.rig = MemoryRig()
        self.armed: Armed | None = None

    @initialize(
        reuse=st.integers(0, 3),
        recompute=st.booleans(),
        host=st.sampled_from([0, 3, 9, 24]),
        slots=st.integers(0, 3),
        interval=st.sampled_from([0, 0, 4, 7]),
    )
    def configure(self, reuse: int, recompute: bool, host: int, slots: int, interval: int) -> None:
        num_slots = self.num_slots[slots % len(self.num_slots)]
        self.rig = MemoryRig(
            num_pages=NUM_PAGES,
            num_host_pages=host,
            reuse=reuse > 0,
            recompute=recompute,
            reuse_generated=reuse == 3,
            reads_inputs=num_slots > 0,
            num_slots=num_slots,
            num_host_slots=min(host, 3) if num_slots else 0,
            snapshot_interval=interval,
        )

    # who is where

    def idle(self) -> list[int]:
        """Admitted rows that no step holds and that have all their pages."""
        rows = self.rig.rows.items()
        settled = [h for h, row in rows if row.admitted and not row.in_steps and not row.dead]
        return [h for h in settled if not self.rig.holdings.is_preempted(h)]

    def victims(self) -> list[int]:
        return [h for h in self.idle() if self.rig.holdings.reclaimable(h)]

    def preempted(self) -> list[int]:
        return [h for h in self.rig.rows if self.rig.holdings.is_preempted(h)]

    def waiting(self) -> list[int]:
        return [h for h, row in self.rig.rows.items() if not row.admitted]

    def able(self) -> list[int]:
        return [h for h in self.rig.rows if self.rig.wanted(h) > 0]

    # requests

    @precondition(lambda self: len(self.rig.rows) < NUM_HANDLES)
    @rule(
        start=st.sampled_from(STARTS),
        tail=TAILS,
        drawn=st.integers(1, 9),
        at_once=st.integers(0, 4),
        image=st.integers(0, 4),
    )
    def introduce(self, start: list[int], tail: list[int], drawn: int, at_once: int, image: int) -> None:
        """With `image` 0 it brings one: token ids alone do not rebuild what it computes."""
        handle = min(set(range(NUM_HANDLES)) - set(self.rig.rows))
        most = len(start) + len(tail) + drawn
        self.rig.introduce(handle, [*start, *tail], most, media=() if image else (IMAGE,), has_inputs=not image)
        if at_once:
            self.reserve_one(handle)

    @precondition(lambda self: self.rig.rows and len(self.rig.rows) < NUM_HANDLES)
    @rule(data=st.data(), longer=st.booleans())
    def introduce_again(self, data: st.DataObject, longer: bool) -> None:
        """The same prompt once more, or the next turn of the same conversation."""
        like = self.rig.rows[data.draw(st.sampled_from(sorted(self.rig.rows)))]
        prompt = like.ids[: min(like.num_prompt + 2 if longer else like.num_prompt, 32)]
        handle = min(set(range(NUM_HANDLES)) - set(self.rig.rows))
        self.rig.introduce(handle, prompt, len(prompt) + 3)
        self.reserve_one(handle)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        self.reserve_one(data.draw(st.sampled_from(self.waiting())))

    def reserve_one(self, handle: int) -> None:
        row, before = self.rig.rows[handle], self.rig.arena.num_unpromised
        row.admitted = self.rig.kv.reserve(handle)
        if not row.admitted:
            assert self.rig.arena.num_unpromised == before and not self.rig.arena.held[handle]
        length = self.rig.length(handle)
        assert length % 4 == 0 and length < row.num_prompt and length == self.rig.holdings.num_adopted[handle]

    @precondition(lambda self: any(not row.in_steps for row in self.rig.rows.values()))
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        able = [h for h, row in self.rig.rows.items() if not row.in_steps]
        finished = [h for h in able if self.rig.rows[h].dead or (h in self.idle() and not self.rig.wanted(h))]
        self.rig.close(data.draw(st.sampled_from(finished or able)))

    # steps

    @precondition(lambda self: self.armed is None and len(self.rig.flying) < 2 and self.able())
    @rule(data=st.data(), cut=st.booleans(), everybody=st.booleans())
    def arm(self, data: st.DataObject, cut: bool, everybody: bool) -> None:
        rows = self.able()
        if not everybody:
            rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        spans = {h: data.draw(st.integers(1, self.rig.wanted(h))) if cut else self.rig.wanted(h) for h in rows}
        armed = self.rig.arm(spans)
        if not isinstance(armed, Armed):
            assert armed.missing > 0 and set(armed.refused) <= set(rows)
            armed = self.make_room(spans, armed.missing)
        self.armed = armed

    def make_room(self, spans: dict[int, int], missing: int) -> Armed | None:
        """Rows outside a refused step give up as many pages as it lacks: then it is admitted."""
        for handle in self.victims():
            if handle not in spans and missing > 0:
                missing -= self.preempt_one(handle)
        again = self.rig.arm(spans)
        assert isinstance(again, Armed) == (missing <= 0), (again, missing)
        return again if isinstance(again, Armed) else None

    @precondition(lambda self: self.armed is None and self.able())
    @rule(times=st.integers(1, 4))
    def run(self, times: int) -> None:
        """Whole steps of all rows, each published before the next."""
        for _ in range(times):
            spans = {h: self.rig.wanted(h) for h in self.able()}
            armed = self.rig.arm(spans) if spans else None
            if not isinstance(armed, Armed):
                return
            self.rig.submit(armed)
            while self.rig.flying:
                self.rig.publish()
            self.balanced()

    @precondition(lambda self: self.armed is not None)
    @rule(submit=st.integers(0, 3), data=st.data(), fail=st.integers(0, 6))
    def end_transaction(self, submit: int, data: st.DataObject, fail: int) -> None:
        armed, self.armed = self.armed, None
        assert armed is not None
        if submit:
            if not fail:
                self.rig.rows[data.draw(st.sampled_from(armed.rows.handles.tolist()))].failing = True
            self.rig.submit(armed)
        else:
            self.rig.abandon(armed)

    @precondition(lambda self: self.rig.flying)
    @rule()
    def publish(self) -> None:
        self.rig.publish()

    @precondition(lambda self: self.armed is not None)
    @rule(data=st.data(), stops=st.integers(0, 3))
    def stop(self, data: st.DataObject, stops: int) -> None:
        """What a step writes for a row that has stopped before it is not to be used."""
        assert self.armed is not None
        if not stops:
            handles: Sequence[int] = self.armed.rows.handles.tolist()
            self.rig.rows[data.draw(st.sampled_from(handles))].dead = True

    # pages change hands

    @precondition(lambda self: self.victims())
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.preempt_one(data.draw(st.sampled_from(self.victims())))

    def preempt_one(self, handle: int) -> int:
        gained, before = self.rig.holdings.reclaimable(handle), self.rig.arena.num_unpromised
        self.rig.holdings.preempt(handle)
        assert self.rig.arena.num_unpromised - before == gained
        return gained

    @precondition(lambda self: self.victims())
    @rule(data=st.data())
    def preempt_together(self, data: st.DataObject) -> None:
        """What several give, and what one in line then lacks, is known before: they may share pages."""
        holdings, arena = self.rig.holdings, self.rig.arena
        victims = data.draw(st.lists(st.sampled_from(self.victims()), min_size=1, unique=True))
        before, gained = arena.num_unpromised, holdings.reclaimable_together(victims)
        lacking = {handle: self.lacking(handle, victims) for handle in self.waiting()}
        slots_then = self.rig.slots.available(victims) if self.rig.pool is not None else 0
        for handle in victims:
            holdings.preempt(handle)
        assert arena.num_unpromised - before == gained
        assert self.rig.pool is None or self.rig.slots.available() == slots_then
        assert {handle: self.lacking(handle) for handle in lacking} == lacking
        for handle, short in lacking.items():
            assert holdings.reserve(handle) == (not any(short))
            if not any(short):
                holdings.withdraw(handle)

    def lacking(self, handle: int, without: Sequence[int] = ()) -> tuple[int, int]:
        """Pages and slots."""
        slots = self.rig.slots.lacking(handle, without) if self.rig.pool is not None else 0
        return self.rig.holdings.lacking(handle, without), slots

    @precondition(lambda self: self.preempted())
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.preempted()))
        able, before = self.rig.holdings.can_resume(handle), self.rig.arena.num_unpromised
        assert self.rig.holdings.resume(handle) == able
        if not able:
            assert self.rig.arena.num_unpromised == before and not self.rig.arena.held[handle]

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(self.idle()))
        before = self.rig.length(handle)
        gained = self.rig.holdings.extend(handle)
        assert self.rig.length(handle) == before + gained and gained % 4 == 0

    @rule()
    def carry_out(self) -> None:
        """The device catches up, also while a step is armed."""
        self.rig.run_ops()

    @invariant()
    def balanced(self) -> None:
        self.rig.check()
        if not self.rig.reuse:
            assert self.rig.arena.num_cached == 0

    def teardown(self) -> None:
        if self.armed is not None:
            self.rig.abandon(self.armed)
        self.rig.finish_all()
        self.rig.check()
        assert self.rig.arena.num_free + self.rig.arena.num_cached == NUM_PAGES
        if self.rig.host is not None:
            assert self.rig.host.arena.num_unpromised == self.rig.host.num_pages


class MemoryAndStatesMachine(MemoryMachine):
    num_slots = (1, 2, 4, 9)


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(stateful_step_count=50)
TestMemoryAndStates = MemoryAndStatesMachine.TestCase
TestMemoryAndStates.settings = settings(stateful_step_count=60, max_examples=2 * settings().max_examples)
