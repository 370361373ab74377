"""A paged cache driven without a model, with or without recurrent states beside it: what a token writes names the whole
row up to it, and so does a state, so wrong pages and wrong states show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from mstar.communication.messages import MediaSpan, SamplingParams
from mstar.engine.execution import AdmitOutcome
from mstar.engine.resources.base import OpenConfig, StepContext
from mstar.engine.resources.cache_policy import CachePolicy
from mstar.engine.resources.paged_kv import KVFacts, PagedKV
from mstar.engine.resources.recurrent_state_pool import RecurrentStatePool, StateDtypes, StateFacts
from mstar.engine.resources.slot_room import SlotRoom
from mstar.engine.spec import PagedKVSpec, RecurrentStateSpec, StateBlock
from mstar.engine.staging import StepShape
from mstar.engine.step import KVStep, RecurrentStep, Rows
from mstar.engine.transaction import Transaction

PAGE = 4
ROOT = b"r" * 16
WRONG = -1.0
"""Written by rows that have failed."""


@dataclass
class Row:
    """`ids`: the prompt and everything that will be drawn. `in_steps`: steps that hold the row."""

    ids: list[int]
    num_prompt: int
    most: int
    order: int
    in_steps: int = 0
    admitted: bool = False
    dead: bool = False
    """It has failed or stopped: it computes nothing any more, and is to be closed."""
    failing: bool = False
    """Its last step fails on the device, which is not known yet."""

    @property
    def config(self) -> OpenConfig:
        return OpenConfig(SamplingParams(), np.array(self.ids[: self.num_prompt], np.int32), self.most)


class Armed(NamedTuple):
    rows: Rows
    ctx: StepContext
    facts: KVFacts
    txn: Transaction
    states: StateFacts | None = None


@dataclass
class MemoryRig:
    """`flying`: submitted steps whose rows are not published yet. The device is immediate; what is ordered for it is
    carried out at the next submit. `num_slots`: of states beside the cache; 0: there are none."""

    num_pages: int = 12
    num_host_pages: int = 0
    reuse: bool = True
    recompute: bool = True
    reuse_generated: bool = False
    reads_inputs: bool = False
    capacity: int = 8
    max_seq_len: int = 64
    num_slots: int = 0
    num_host_slots: int = 0
    snapshot_interval: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    flying: list[Armed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = PagedKV(
            PagedKVSpec("kv", 1, 1, 2, PAGE),
            num_pages=self.num_pages + 1,
            capacity=self.capacity,
            max_seq_len=self.max_seq_len,
            dtype=torch.float64,
            device=torch.device("cpu"),
            poison=True,
            num_host_pages=self.num_host_pages,
            policy=CachePolicy(ROOT if self.reuse else None, self.reads_inputs, self.recompute),
        )
        self.holdings = self.kv.holdings
        self.arena = self.kv.arena
        self.host = self.kv._host
        if self.reuse_generated:
            self.holdings.keys.read_token_ids = lambda h, begin, end: np.array(self.rows[h].ids[begin:end], np.int32)
        self.pool: RecurrentStatePool | None = None
        if self.num_slots:
            self.pool = RecurrentStatePool(
                RecurrentStateSpec("state", "kv", 1, (StateBlock("sum", (2,)),)),
                self.kv,
                num_slots=self.num_slots + 1,
                dtypes=StateDtypes(torch.float64),
                device=torch.device("cpu"),
                poison=True,
                num_host_slots=self.num_host_slots,
                snapshot_interval=self.snapshot_interval,
            )
            self.slots = SlotRoom(self.holdings, self.pool.states)
        self._values: dict[tuple[int, ...], float] = {}
        self._count = 0

    # requests

    def introduce(
        self,
        handle: int,
        prompt: Sequence[int],
        most: int,
        *,
        media: Sequence[MediaSpan] = (),
        spans_workers: bool = False,
        has_inputs: bool = False,
    ) -> Row:
        """Equal prompts draw equal tokens."""
        drawn = [1000 + (sum(prompt) + place) % 7 for place in range(most - len(prompt))]
        row = Row([*prompt, *drawn], len(prompt), most, self._count)
        self._count += 1
        self.rows[handle] = row
        config = row.config._replace(media=tuple(media), spans_workers=spans_workers, has_inputs=has_inputs)
        self.kv.introduce(handle, config)
        return row

    def admit(self, handle: int, prompt: Sequence[int], most: int, *, spans_workers: bool = False) -> bool:
        row = self.introduce(handle, prompt, most, spans_workers=spans_workers)
        row.admitted = self.kv.reserve(handle)
        return row.admitted

    def close(self, handle: int) -> None:
        assert not self.rows.pop(handle).in_steps
        self.kv.close(handle)

    def wanted(self, handle: int) -> int:
        """Tokens that the row could compute in one step."""
        missing, length = self._missing(handle), self.length(handle)
        if missing < 2 or (cuts := self.holdings.tokens_to_cut(np.array([handle]), np.array([length]))) is None:
            return missing
        return min(missing, int(cuts[0]))

    def _missing(self, handle: int) -> int:
        row, length = self.rows[handle], self.length(handle)
        if row.dead or not row.admitted or self.holdings.is_preempted(handle):
            return 0
        if (target := int(self.kv.targets[handle])) > length:
            return target - length
        return row.num_prompt - length if length < row.num_prompt else min(1, row.most - 1 - length)

    def length(self, handle: int) -> int:
        return int(self.kv.lengths[handle])

    # steps

    def arm(self, spans: dict[int, int]) -> Armed | AdmitOutcome:
        """Admit, plan and advance; a refusal is returned."""
        rows = Rows(np.array(list(spans), np.int64), np.array(list(spans.values()), np.int32))
        pages = 16
        staging = {
            "kv.block_table": np.zeros((len(spans), pages), np.int32),
            "kv.kv_lens": np.zeros(len(spans), np.int32),
            "kv.slots": np.zeros(rows.num_tokens, np.int32),
            "kv.positions": np.zeros(rows.num_tokens, np.int32),
            "state.slots": np.zeros(len(spans), np.int32),
            "state.has_state": np.zeros(len(spans), np.int32),
        }
        ctx = StepContext(rows, rows.num_tokens, rows.single, staging, StepShape(len(spans), rows.num_tokens, pages))
        txn = Transaction()
        outcome = self.kv.admit(KVStep(), ctx, txn)
        if not outcome.ok:
            txn.rollback()
            return outcome
        states = None
        if self.pool is not None:
            assert self.pool.admit(RecurrentStep(), ctx, txn).ok
            states = self.pool.plan(RecurrentStep(), ctx)
        facts = self.kv.plan(KVStep(), ctx)
        self.kv.advance(KVStep(), ctx, txn)
        for handle in spans:
            self.rows[handle].in_steps += 1
        return Armed(rows, ctx, facts, txn, states)

    def abandon(self, armed: Armed) -> None:
        armed.txn.rollback()
        for handle in armed.rows.handles.tolist():
            self.rows[handle].in_steps -= 1

    def submit(self, armed: Armed) -> None:
        armed.txn.commit()
        self.run_ops()
        self.flying.append(armed)
        slots = armed.ctx.staging["kv.slots"].tolist()
        for handle, span, end in zip(*map(np.ndarray.tolist, (*armed.rows[:2], armed.facts.ends)), strict=True):
            row = self.rows[handle]
            for position in range(end - span, end):
                value = WRONG if row.dead or row.failing else self.value(row.ids[: position + 1])
                page, offset = divmod(slots.pop(0), PAGE)
                self.kv.layer(0).k[page, offset] = value
                self.kv.layer(0).v[page, offset] = -value
        assert not slots
        if self.pool is not None:
            self._compute_states(self.pool, armed)
        self.check_contents()

    def publish(self) -> None:
        """The oldest submitted step has ended; failing rows did not survive it."""
        armed = self.flying.pop(0)
        handles = armed.rows.handles.tolist()
        keep = np.array([not (self.rows[h].dead or self.rows[h].failing) for h in handles])
        self.kv.publish(KVStep(), armed.rows, armed.facts, None if keep.all() else keep)
        if self.pool is not None and armed.states is not None:
            self.pool.publish(RecurrentStep(), armed.rows, armed.states, None if keep.all() else keep)
        for handle in handles:
            self.rows[handle].in_steps -= 1
            self.rows[handle].dead |= self.rows[handle].failing

    def run(self, spans: dict[int, int]) -> None:
        armed = self.arm(spans)
        assert isinstance(armed, Armed), armed
        self.submit(armed)
        self.publish()

    def run_ops(self) -> None:
        for resource in (self.kv, *(() if self.pool is None else (self.pool,))):
            for work in resource.drain_work():
                work()

    def compute(self, handle: int, num_tokens: int | None = None) -> None:
        """Steps of one row until it has computed its prompt, or so many tokens."""
        goal = self.rows[handle].num_prompt if num_tokens is None else num_tokens
        while self.length(handle) < goal:
            self.run({handle: min(self.wanted(handle), goal - self.length(handle))})

    def _compute_states(self, pool: RecurrentStatePool, armed: Armed) -> None:
        """Each row's state must be what its tokens so far made it, and goes on to what those of the step make it."""
        assert armed.states is not None
        block = pool.layer(0).blocks["sum"]
        slots, known = armed.ctx.staging["state.slots"].tolist(), armed.ctx.staging["state.has_state"].tolist()
        for place, (handle, span, end) in enumerate(
            zip(*map(np.ndarray.tolist, (*armed.rows[:2], armed.facts.ends)), strict=True)
        ):
            row, slot = self.rows[handle], slots[place]
            assert slot and bool(known[place]) == (end > span)
            whole = not (row.dead or row.failing)
            if whole and known[place]:
                assert (block[slot] == self.value(row.ids[: end - span])).all(), (handle, end - span, block[slot])
            block[slot] = self.value(row.ids[:end]) if whole else WRONG
        pool.after_forward(armed.states)

    # what must hold

    def value(self, ids: Sequence[int]) -> float:
        return self._values.setdefault(tuple(ids), float(len(self._values) + 1))

    def check(self) -> None:
        self.arena.check()
        owned = {int(page) for h in self.rows for page in self.kv.stream(h).pages}
        assert self.arena.num_owned == len(owned)
        owed = sum(max(int(p) - int(h), 0) for p, h in zip(self.arena.promised, self.arena.held, strict=True))
        assert self.arena.num_unpromised == self.num_pages - len(owned) - owed >= 0
        if self.host is not None:
            self.host.arena.check()
        if self.pool is not None:
            states = self.pool.states
            states.check()
            assert all(self.rows[handle].in_steps for handle in states._pending), "a snapshot that no step makes"
            if states.host is not None:
                states.host.check()
            for handle in range(self.capacity):
                here = handle in self.rows and self.rows[handle].admitted and not self.holdings.is_preempted(handle)
                assert bool(states.live[handle]) == here
        for handle in range(self.capacity):
            if handle not in self.rows:
                assert not self.arena.held[handle] and not self.kv.targets[handle] and not self.length(handle)

    def check_contents(self) -> None:
        """Every row that is whole reads what it has computed, or what others have computed for it; no page that may be
        adopted is poisoned."""
        armed = {h for step in self.flying for h in step.rows.handles.tolist()}
        k, v = self.kv.layer(0)
        for handle, row in self.rows.items():
            if row.dead or row.failing:
                continue
            length = self.length(handle)
            if handle in armed:
                ends = [step.facts.ends[step.rows.handles == handle] for step in self.flying]
                length = min(length, max(int(end[0]) for end in ends if end.size))
            pages = self.kv.stream(handle).pages
            for position in range(length):
                page, offset = int(pages[position // PAGE]), position % PAGE
                expected = self.value(row.ids[: position + 1])
                assert (k[page, offset] == expected).all() and (v[page, offset] == -expected).all(), (handle, position)
        if self.pool is not None:
            self._check_snapshots(self.pool)
        indexed = np.flatnonzero(self.arena.index.indexed)
        assert not k[indexed].isnan().any() and not (k[indexed] == WRONG).any()

    def _check_snapshots(self, pool: RecurrentStatePool) -> None:
        """Every snapshot is what its key names, as far as a row is there that says so, and its page is indexed."""
        block, snapshots = pool.layer(0).blocks["sum"], pool.states.slots.snapshots
        for key, slot in snapshots:
            assert not block[slot].isnan().any() and not (block[slot] == WRONG).any() and key in self.arena.index
        for handle, row in self.rows.items():
            for num_pages in range(1, len(row.ids) // PAGE + 1):
                key = self.holdings.keys.key(handle, num_pages)
                if key is not None and (slot := snapshots.find(key)) is not None:
                    assert (block[slot] == self.value(row.ids[: num_pages * PAGE])).all(), (handle, num_pages)

    def finish_all(self) -> None:
        """Run every row to its end, oldest first, taking room from younger rows; nothing may be stuck."""
        while self.flying:
            self.publish()
        for handle in [h for h, row in self.rows.items() if row.dead or not row.admitted]:
            self.close(handle)
        while self.rows:
            seniors = sorted(self.rows, key=lambda h: self.rows[h].order)
            moved = [self._advance(handle, seniors[index + 1 :]) for index, handle in enumerate(seniors)]
            assert any(moved), "nobody can go on"

    def _advance(self, handle: int, juniors: list[int]) -> bool:
        row = self.rows.get(handle)
        if row is None:
            return False
        while not self.holdings.resume(handle):
            if not self._take_from(juniors):
                return False
        span = self.wanted(handle)
        if not span:
            self.close(handle)
            return True
        while isinstance(armed := self.arm({handle: span}), AdmitOutcome):
            assert armed.refused == (handle,) and armed.missing > 0
            if not self._take_from(juniors):
                return False
        self.submit(armed)
        self.publish()
        self.check()
        return True

    def _take_from(self, juniors: list[int]) -> bool:
        for junior in reversed(juniors):
            if junior in self.rows and self.holdings.reclaimable(junior):
                self.holdings.preempt(junior)
                return True
        return False
