"""`CacheHoldings`: what requests hold in one cache, from the time they are known until they leave.

Loop thread, host integers: promises, adopted pages, preempted requests; and, where recurrent states go with the cache,
those: both are adopted, lost and brought back together. What pages contain changes only by the device operations queued
here, in order. Steps are `PagedKV`'s and `RecurrentStatePool`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from mstar.engine.device_ops import NO_PAGES, DeviceOp
from mstar.engine.resources.base import OpenConfig
from mstar.engine.resources.cache_policy import CachePolicy
from mstar.engine.resources.cache_stream import CacheStreams
from mstar.engine.resources.cpu_page_pool import CPUPagePool
from mstar.engine.resources.page_arena import PageArena
from mstar.engine.resources.row_keys import RowKeys
from mstar.engine.resources.state_holdings import StateHoldings

Preempted = Literal["offload", "recompute"]
"""Where a preempted request's cache has gone: to the host's memory, or nowhere, to be computed again."""


class _Stored(NamedTuple):
    """A preempted cache: `length` tokens of it are in `host_pages`, and the state behind them in `host_slots` (of none,
    where no states go with the cache)."""

    kind: Preempted
    length: int
    host_pages: np.ndarray
    host_slots: np.ndarray = NO_PAGES


class _Size(NamedTuple):
    """Tokens of a request: of its prompt, and the most it may ever hold. `rebuilds`: token ids rebuild its cache.
    `spans_workers`: as in `OpenConfig`."""

    num_prompt: int
    most: int
    rebuilds: bool
    spans_workers: bool


class _Match(NamedTuple):
    """Indexed `pages` that a row may adopt, with the `snapshot` behind the last of them; `num_found` of them there are,
    those without a snapshot behind them included."""

    pages: np.ndarray
    snapshot: bytes | None
    num_found: int


class CacheHoldings:
    """`policy` is settled at load. `ops`: where device operations are queued.

    `targets` int32 [handles]: tokens that a row's cache must hold before the row's own next step (0: whatever it
    holds). `num_adopted` int32 [handles]: prompt tokens that a row never had to compute.
    """

    def __init__(
        self,
        arena: PageArena,
        streams: CacheStreams,
        host: CPUPagePool | None,
        policy: CachePolicy,
        ops: list[DeviceOp],
    ) -> None:
        num_handles = arena.held.size
        self.arena = arena
        self.policy = policy
        self.keys = RowKeys(arena, streams)
        self.targets = np.zeros(num_handles, np.int32)
        self.num_adopted = np.zeros(num_handles, np.int32)
        self.num_adopted_total = 0
        self.states: StateHoldings | None = None
        self.num_preempted: dict[Preempted, int] = {"offload": 0, "recompute": 0}
        self._streams = streams
        self._host = host
        self._ops = ops
        self._sizes: dict[int, _Size] = {}
        self._stored: dict[int, _Stored] = {}
        self._computed = np.zeros(num_handles, np.int32)

    def attach(self, states: StateHoldings) -> None:
        """From now on a row's tokens are its pages and its state. Load time, once.

        Raises:
            ValueError: another state pool goes with the cache already.
        """
        if self.states is not None:
            raise ValueError(f"resources {self.states.key!r} and {states.key!r} are states beside the same cache")
        self.states = states
        self.arena.index.on_evict = states.slots.drop

    # a request comes and goes

    def introduce(self, handle: int, config: OpenConfig) -> None:
        if self.arena.held[handle] or handle in self._sizes:
            raise RuntimeError(f"handle {handle} has not been closed")
        num_prompt = 0 if config.prompt_ids is None else config.prompt_ids.size
        rebuilds = self.policy.recompute and not (self.policy.reads_inputs and config.has_inputs)
        self._sizes[handle] = _Size(num_prompt, config.max_total_tokens, rebuilds, config.spans_workers)
        self.keys.introduce(handle, config, self.policy)
        if self.states is not None:
            self.states.introduce(handle, num_prompt)

    def tokens_to_cut(self, handles: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """int32 [rows]: tokens from `lengths` to where the row's chunk has to end; None: nowhere, whatever the row."""
        return None if self.states is None else self.states.tokens_to_cut(handles, lengths)

    def reserve(self, handle: int) -> bool:
        """Adopt what there is of the prompt and promise the rest; False: not now, and nothing has changed.

        What is promised cannot lead to a deadlock: a request that may outgrow its promise can be preempted and come
        back, and one that cannot be is promised all that it may ever hold. Requests that span workers are all of one
        kind here, whatever the host has room for: one that can be preempted would wait here for one that cannot be,
        which waits for the first elsewhere.
        """
        num_prompt, most, rebuilds, spans_workers = self._sizes[handle]
        first = self._pages_for(min(num_prompt + 1, most))
        if rebuilds:
            return self._adopt(handle, first)
        if spans_workers or not self._promise_host(handle, self._pages_for(most)):
            return self._adopt(handle, self._pages_for(most))
        if self._adopt(handle, first):
            return True
        self._promise_host(handle, 0)
        return False

    def available(self, without: Sequence[int] = ()) -> int:
        """Pages that are unpromised, or would be with those of `without` preempted that can be."""
        return self.arena.num_unpromised + self.reclaimable_together(without)

    def lacking(self, handle: int, without: Sequence[int] = ()) -> int:
        """Pages by which `reserve` falls short now, or would with those of `without` preempted that can be: what they
        share counts once, and not where `handle` would take it over."""
        num_prompt, most, rebuilds, spans_workers = self._sizes[handle]
        pages = self._pages_for(most)
        if rebuilds or (not spans_workers and self._host_covers(handle, pages)):
            pages = self._pages_for(min(num_prompt + 1, most))
        leaving = [(one, self._pages(one)) for one in self.leaving(without)]
        return max(self.arena.lacking(handle, pages, self._match(handle).pages, leaving), 0)

    def withdraw(self, handle: int) -> None:
        """Undo `reserve`."""
        self._release(handle)
        self._promise_host(handle, 0)
        self.num_adopted_total -= int(self.num_adopted[handle])
        self.num_adopted[handle] = 0

    def close(self, handle: int) -> None:
        """Forget the handle, however far it has come."""
        self._release(handle)
        stored = self._stored.pop(handle, None)
        if self._host is not None:
            self._host.arena.forget(handle, NO_PAGES if stored is None else stored.host_pages)
        if self.states is not None:
            self.states.close(handle)
            if self.states.host is not None:
                self.states.host.forget(handle, NO_PAGES if stored is None else stored.host_slots)
        self._sizes.pop(handle, None)
        self.keys.close(handle)
        for column in (self.targets, self.num_adopted, self._computed):
            column[handle] = 0

    def extend(self, handle: int) -> int:
        """Adopt what others have sealed meanwhile, right behind the row's length; returns the tokens gained."""
        length = int(self._streams.lengths[handle])
        if handle in self._stored or length != self.arena.held[handle] * self._streams.page_size:
            return 0
        self._adopt(handle, int(self.arena.promised[handle]))
        return int(self._streams.lengths[handle]) - length

    # preemption

    def reclaimable(self, handle: int) -> int:
        """By how many pages preempting the request would raise what is unpromised; 0: it cannot be preempted."""
        return self._gain(handle) if self._is_here(handle) and self._may_grow(handle) else 0

    def unused(self, handle: int) -> int:
        """As `reclaimable`, of a request that has computed nothing: it loses nothing, whatever its nodes."""
        return self._gain(handle) if self._is_here(handle) and self._is_unused(handle) else 0

    def reclaimable_together(self, handles: Sequence[int]) -> int:
        """By how many pages preempting all of them that can be would raise what is unpromised: more than one by one
        where they share pages."""
        return self.arena.gain([(handle, self._pages(handle)) for handle in self.leaving(handles)])

    def leaving(self, handles: Sequence[int]) -> list[int]:
        """Those of `handles` that can be preempted."""
        return [handle for handle in handles if self.reclaimable(handle) or self.unused(handle)]

    def preempt(self, handle: int) -> Preempted:
        """Take the row's pages and its promise away. Raises `RuntimeError` for a row that could not come back."""
        if handle in self._stored or not (self._may_grow(handle) or self._is_unused(handle)):
            raise RuntimeError(f"handle {handle} cannot be preempted")
        length = int(self._streams.lengths[handle])
        stored = self._offload(handle, length)
        if stored is None:
            stored = _Stored("recompute", 0, NO_PAGES)
            if length >= self._sizes[handle].num_prompt:  # before that, its prompt simply goes on
                self.targets[handle] = max(length, int(self.targets[handle]))
        self._stored[handle] = stored
        self._computed[handle] = max(length, int(self._computed[handle]))
        self.num_preempted[stored.kind] += 1
        self._release(handle)
        return stored.kind

    def is_preempted(self, handle: int) -> bool:
        return handle in self._stored

    def can_resume(self, handle: int) -> bool:
        """Whether `resume` finds room now."""
        if handle not in self._stored:
            return True
        if self.states is not None and not self.states.covers(handle):
            return False
        return self.arena.covers(handle, self._pages_to_resume(handle), self._match(handle).pages)

    def resume(self, handle: int) -> bool:
        """Bring a preempted row back; False: no room now, and nothing has changed."""
        stored = self._stored.get(handle)
        if stored is None:
            return True
        if not self._adopt(handle, self._pages_to_resume(handle)):
            return False
        del self._stored[handle]
        if stored.host_pages.size:
            self._reload(handle, stored)
        return True

    def _offload(self, handle: int, length: int) -> _Stored | None:
        """Order the copy of a row's pages and state to the host; None where there is nothing to copy or no room."""
        count = self._pages_for(length)
        if self._host is None or not count:
            return None
        row, counts = np.array([handle]), np.array([count], np.int32)
        acquired = self._host.arena.acquire(row, counts)
        if acquired.refused is not None:
            return None
        slots = NO_PAGES if self.states is None else self.states.offload(handle)
        if slots is None:
            self._host.arena.give_back(row, counts, acquired.pages)
            return None
        self._ops.append(DeviceOp("offload", self._pages(handle)[:count], acquired.pages))
        return _Stored("offload", length, acquired.pages, slots)

    def _reload(self, handle: int, stored: _Stored) -> None:
        """Order the copy of what the row has not adopted. Its host pages are free at once: whoever gets them writes
        later."""
        assert self._host is not None
        held = int(self.arena.held[handle])
        row, rest = np.array([handle]), np.array([stored.host_pages.size - held], np.int32)
        acquired = self.arena.acquire(row, rest)
        assert acquired.refused is None, "promised pages are never refused"
        self._streams.append(row, np.array([held]), rest, acquired.pages)
        self._streams.lengths[handle] = stored.length
        self._ops.append(DeviceOp("reload", stored.host_pages[held:], acquired.pages))
        self._host.arena.give_back(row, np.array([stored.host_pages.size], np.int32), stored.host_pages)
        if self.states is not None:
            self.states.reload(handle, stored.host_slots)

    def _pages_to_resume(self, handle: int) -> int:
        """What a preempted row is promised when it comes back: what it must hold, and room for its next token."""
        num_prompt, most, *_ = self._sizes[handle]
        if not self._may_grow(handle):
            return self._pages_for(most)
        needed = max(self._stored[handle].length, int(self.targets[handle]), num_prompt)
        return self._pages_for(max(needed, min(needed + 1, most)))

    def _is_unused(self, handle: int) -> bool:
        return bool(self._streams.lengths[handle] <= self.num_adopted[handle])

    def _may_grow(self, handle: int) -> bool:
        """It was promised room to begin, not to end: what it computes survives a preemption."""
        if self._sizes[handle].rebuilds:
            return True
        return self._host is not None and bool(self._host.arena.promised[handle])

    def _is_here(self, handle: int) -> bool:
        """The request is known, and its pages have not been taken."""
        return handle in self._sizes and handle not in self._stored

    def _gain(self, handle: int) -> int:
        return self.arena.num_sole(self._pages(handle)) + self.arena.owed(handle)

    def _host_covers(self, handle: int, num_pages: int) -> bool:
        """Whether `_promise_host` would be granted."""
        if self._host is None or not self._host.arena.covers(handle, num_pages):
            return False
        return self.states is None or (self.states.host is not None and self.states.host.covers(handle, 1))

    def _promise_host(self, handle: int, num_pages: int) -> bool:
        """Replace what the host is promised to have room for: so many pages, and the state that goes with them. False,
        and no change, when it has not."""
        if self._host is None or not self._host_covers(handle, num_pages):
            return False
        self._host.arena.promise(handle, num_pages)
        if self.states is not None and self.states.host is not None:
            self.states.host.promise(handle, min(num_pages, 1))
        return True

    # one row

    def _adopt(self, handle: int, num_pages: int) -> bool:
        """Promise `num_pages` and make what is indexed behind the row's pages its own, with the state behind them."""
        adopted, snapshot, num_found = self._match(handle)
        states = self.states
        if states is not None and not states.covers(handle):
            return False
        if not self.arena.promise(handle, num_pages, adopted):
            return False
        if states is not None:
            length = int(self._streams.lengths[handle]) + adopted.size * self._streams.page_size
            states.found(handle, length, length + (num_found - adopted.size) * self._streams.page_size)
            states.take(handle, snapshot)
        if adopted.size:
            page_size = self._streams.page_size
            end = int(self.arena.held[handle])
            begin = end - adopted.size
            self._streams.table[handle, begin:end] = adopted
            self._streams.lengths[handle] = end * page_size
            self.keys.adopted(handle, end)
            gained = max(end * page_size - max(begin * page_size, int(self._computed[handle])), 0)
            self.num_adopted[handle] += gained
            self.num_adopted_total += gained
        return True

    def _match(self, handle: int) -> _Match:
        """What the row may adopt: its last prompt token is always computed, and it comes back to where it was. Where
        states go with the cache, up to the deepest snapshot: only there both are known."""
        stored, target = self._stored.get(handle), int(self.targets[handle])
        offloaded = stored is not None and stored.kind == "offload"
        if stored is not None and offloaded:
            limit = stored.length
        else:
            limit = target or self._sizes[handle].num_prompt - 1
        pages = self.keys.match(handle, limit)
        if self.states is None or offloaded:
            return _Match(pages, None, pages.size)
        count, key = self.states.deepest(handle, int(self.arena.held[handle]), pages.size)
        return _Match(pages[:count], key, pages.size)

    def _release(self, handle: int) -> None:
        self.arena.forget(handle, self._streams.clear(handle, int(self.arena.held[handle])))
        self.keys.released(handle)
        if self.states is not None:
            self.states.release(handle)

    def _pages(self, handle: int) -> np.ndarray:
        return self._streams.table[handle, : int(self.arena.held[handle])].copy()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._streams.page_size)
