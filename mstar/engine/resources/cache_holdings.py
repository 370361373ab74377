"""`CacheHoldings`: what requests hold in one cache, from the time they are known until they leave.

Loop thread, host integers: promises, adopted pages, preempted requests. What pages contain changes only by the device
operations queued here, in order. Steps are `PagedKV`'s.
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

Preempted = Literal["offload", "recompute"]
"""Where a preempted request's cache has gone: to the host's memory, or nowhere, to be computed again."""


class _Stored(NamedTuple):
    """A preempted cache: `length` tokens of it are in `host_pages`."""

    kind: Preempted
    length: int
    host_pages: np.ndarray


class _Size(NamedTuple):
    """Tokens of a request: of its prompt, and the most it may ever hold. `spans_workers`: as in `OpenConfig`."""

    num_prompt: int
    most: int
    spans_workers: bool


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
        self.num_preempted: dict[Preempted, int] = {"offload": 0, "recompute": 0}
        self._streams = streams
        self._host = host
        self._ops = ops
        self._sizes: dict[int, _Size] = {}
        self._stored: dict[int, _Stored] = {}
        self._computed = np.zeros(num_handles, np.int32)

    # a request comes and goes

    def introduce(self, handle: int, config: OpenConfig) -> None:
        if self.arena.held[handle] or handle in self._sizes:
            raise RuntimeError(f"handle {handle} has not been closed")
        num_prompt = 0 if config.prompt_ids is None else config.prompt_ids.size
        self._sizes[handle] = _Size(num_prompt, config.max_total_tokens, config.spans_workers)
        self.keys.introduce(handle, config, self.policy)

    def reserve(self, handle: int) -> bool:
        """Adopt what there is of the prompt and promise the rest; False: not now, and nothing has changed.

        What is promised cannot lead to a deadlock: a request that may outgrow its promise can be preempted and come
        back, and one that cannot be is promised all that it may ever hold. Requests that span workers are all of one
        kind here, whatever the host has room for: one that can be preempted would wait here for one that cannot be,
        which waits for the first elsewhere.
        """
        num_prompt, most, spans_workers = self._sizes[handle]
        first = self._pages_for(min(num_prompt + 1, most))
        if self.policy.recompute:
            return self._adopt(handle, first)
        host = None if self._host is None or spans_workers else self._host.arena
        if host is None or not host.promise(handle, self._pages_for(most)):
            return self._adopt(handle, self._pages_for(most))
        if self._adopt(handle, first):
            return True
        host.promise(handle, 0)
        return False

    def lacking(self, handle: int, without: Sequence[int] = ()) -> int:
        """Pages by which `reserve` falls short now, or would with those of `without` preempted that can be: what they
        share counts once, and not where `handle` would take it over."""
        num_prompt, most, spans_workers = self._sizes[handle]
        pages = self._pages_for(most)
        host = None if self._host is None or spans_workers else self._host.arena
        if self.policy.recompute or (host is not None and host.covers(handle, pages)):
            pages = self._pages_for(min(num_prompt + 1, most))
        return max(self.arena.lacking(handle, pages, self._match(handle), self._leaving(without)), 0)

    def withdraw(self, handle: int) -> None:
        """Undo `reserve`."""
        self._release(handle)
        if self._host is not None:
            self._host.arena.promise(handle, 0)
        self.num_adopted_total -= int(self.num_adopted[handle])
        self.num_adopted[handle] = 0

    def close(self, handle: int) -> None:
        """Forget the handle, however far it has come."""
        self._release(handle)
        stored = self._stored.pop(handle, None)
        if self._host is not None:
            self._host.arena.forget(handle, NO_PAGES if stored is None else stored.host_pages)
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
        if handle in self._stored or handle not in self._sizes or not self._may_grow(handle):
            return 0
        return self.arena.num_sole(self._pages(handle)) + self.arena.owed(handle)

    def unused(self, handle: int) -> int:
        """As `reclaimable`, of a request that has computed nothing: it loses nothing, whatever its nodes."""
        if handle in self._stored or handle not in self._sizes or not self._is_unused(handle):
            return 0
        return self.arena.num_sole(self._pages(handle)) + self.arena.owed(handle)

    def reclaimable_together(self, handles: Sequence[int]) -> int:
        """By how many pages preempting all of them that can be would raise what is unpromised: more than one by one
        where they share pages."""
        return self.arena.gain(self._leaving(handles))

    def preempt(self, handle: int) -> Preempted:
        """Take the row's pages and its promise away. Raises `RuntimeError` for a row that could not come back."""
        if handle in self._stored or not (self._may_grow(handle) or self._is_unused(handle)):
            raise RuntimeError(f"handle {handle} cannot be preempted")
        length = int(self._streams.lengths[handle])
        host_pages = self._offload(handle, length)
        if host_pages is None:
            stored = _Stored("recompute", 0, NO_PAGES)
            if length >= self._sizes[handle].num_prompt:  # before that, its prompt simply goes on
                self.targets[handle] = max(length, int(self.targets[handle]))
        else:
            stored = _Stored("offload", length, host_pages)
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
        return self.arena.covers(handle, self._pages_to_resume(handle), self._match(handle))

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

    def _offload(self, handle: int, length: int) -> np.ndarray | None:
        """Order the copy of a row's pages to the host; None where there is nothing to copy or no room for it."""
        count = self._pages_for(length)
        if self._host is None or not count:
            return None
        acquired = self._host.arena.acquire(np.array([handle]), np.array([count], np.int32))
        if acquired.refused is not None:
            return None
        self._ops.append(DeviceOp("offload", self._pages(handle)[:count], acquired.pages))
        return acquired.pages

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

    def _pages_to_resume(self, handle: int) -> int:
        """What a preempted row is promised when it comes back: what it must hold, and room for its next token."""
        num_prompt, most, _ = self._sizes[handle]
        if not self._may_grow(handle):
            return self._pages_for(most)
        needed = max(self._stored[handle].length, int(self.targets[handle]), num_prompt)
        return self._pages_for(max(needed, min(needed + 1, most)))

    def _is_unused(self, handle: int) -> bool:
        return bool(self._streams.lengths[handle] <= self.num_adopted[handle])

    def _may_grow(self, handle: int) -> bool:
        """It was promised room to begin, not to end: what it computes survives a preemption."""
        return self.policy.recompute or (self._host is not None and bool(self._host.arena.promised[handle]))

    # one row

    def _adopt(self, handle: int, num_pages: int) -> bool:
        """Promise `num_pages` and make what is indexed behind the row's pages its own."""
        adopted = self._match(handle)
        if not self.arena.promise(handle, num_pages, adopted):
            return False
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

    def _match(self, handle: int) -> np.ndarray:
        """What the row may adopt: its last prompt token is always computed, and it comes back to where it was."""
        stored, target = self._stored.get(handle), int(self.targets[handle])
        if stored is not None and stored.kind == "offload":
            return self.keys.match(handle, stored.length)
        return self.keys.match(handle, target or self._sizes[handle].num_prompt - 1)

    def _release(self, handle: int) -> None:
        self.arena.forget(handle, self._streams.clear(handle, int(self.arena.held[handle])))
        self.keys.released(handle)

    def _leaving(self, handles: Sequence[int]) -> list[tuple[int, np.ndarray]]:
        """Those that can be preempted, with their pages."""
        able = [handle for handle in handles if self.reclaimable(handle) or self.unused(handle)]
        return [(handle, self._pages(handle)) for handle in able]

    def _pages(self, handle: int) -> np.ndarray:
        return self._streams.table[handle, : int(self.arena.held[handle])].copy()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._streams.page_size)
