"""`CacheHoldings`: what requests hold in one cache, from the time they are known until they leave.

Loop thread, host integers: promises, adopted and sealed pages, preempted requests. What pages contain changes only by
the device operations queued here, in order. Steps are `PagedKV`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from mstar.engine.device_ops import NO_PAGES, DeviceOp
from mstar.engine.resources.base import OpenConfig
from mstar.engine.resources.cache_policy import CachePolicy
from mstar.engine.resources.cache_stream import CacheStreams
from mstar.engine.resources.cpu_page_pool import CPUPagePool
from mstar.engine.resources.page_arena import PageArena
from mstar.engine.resources.page_keys import chain_keys, salted

Preempted = Literal["offload", "recompute"]
"""Where a preempted request's cache has gone: to the host's memory, or nowhere, to be computed again."""

ReadTokenIds = Callable[[int, int, int], np.ndarray]
"""(handle, begin, end): ids of a row's tokens at these positions, prompt and drawn ones: int32 [end - begin]."""

_ANY_NUMBER = np.iinfo(np.int32).max


class _Stored(NamedTuple):
    """A preempted cache: `length` tokens of it are in `host_pages`."""

    kind: Preempted
    length: int
    host_pages: np.ndarray


class CacheHoldings:
    """`policy` and `read_token_ids` (set where pages of drawn tokens are sealed too) are settled at load. `ops`: where
    device operations are queued.

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
        self.host = host
        self.policy = policy
        self.read_token_ids: ReadTokenIds | None = None
        self._ops = ops
        self.targets = np.zeros(num_handles, np.int32)
        self.num_adopted = np.zeros(num_handles, np.int32)
        self.num_adopted_total = 0
        self.num_preempted: dict[Preempted, int] = {"offload": 0, "recompute": 0}
        self._streams = streams
        self._configs: dict[int, OpenConfig] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._stored: dict[int, _Stored] = {}
        self._sealed = np.zeros(num_handles, np.int32)
        self._sealable = np.zeros(num_handles, np.int32)
        self._computed = np.zeros(num_handles, np.int32)

    # a request comes and goes

    def introduce(self, handle: int, config: OpenConfig) -> None:
        """Chain the keys of the prompt's pages, once."""
        if self.arena.held[handle] or handle in self._stored:
            raise RuntimeError(f"handle {handle} still holds pages")
        self._configs[handle] = config
        prompt = config.prompt_ids
        unnamed = self.policy.reads_inputs and config.has_inputs and not config.media
        root = self.policy.root
        if root is None or prompt is None or unnamed:
            return
        keys = chain_keys(salted(root, config.cache_salt), prompt, self._streams.page_size, config.media)
        self._keys[handle] = keys
        self._sealable[handle] = len(keys) if self.read_token_ids is None else _ANY_NUMBER

    def reserve(self, handle: int) -> bool:
        """Adopt what there is of the prompt and promise the rest; False: not now, and nothing has changed.

        What is promised cannot lead to a deadlock: a request that may grow beyond it can be preempted and come back.
        """
        config = self._configs[handle]
        most = self._pages_for(config.max_total_tokens)
        first = self._pages_for(min(self._num_prompt(handle) + 1, config.max_total_tokens))
        host = self.host
        if self.policy.recompute or (host is not None and host.arena.promise(handle, most)):
            most = first
        if self._adopt(handle, most):
            return True
        if host is not None:
            host.arena.promise(handle, 0)
        return False

    def lacking(self, handle: int) -> int:
        """Pages by which `reserve` falls short now."""
        config, host = self._configs[handle], self.host
        pages = self._pages_for(config.max_total_tokens)
        if self.policy.recompute or (host is not None and host.arena.covers(handle, pages)):
            pages = self._pages_for(min(self._num_prompt(handle) + 1, config.max_total_tokens))
        return max(self.arena.lacking(handle, pages, self._match(handle)), 0)

    def withdraw(self, handle: int) -> None:
        """Undo `reserve`."""
        self._release(handle)
        if self.host is not None:
            self.host.arena.promise(handle, 0)
        self.num_adopted_total -= int(self.num_adopted[handle])
        self.num_adopted[handle] = 0

    def close(self, handle: int) -> None:
        """Forget the handle, however far it has come."""
        self._release(handle)
        stored = self._stored.pop(handle, None)
        if self.host is not None:
            self.host.arena.forget(handle, NO_PAGES if stored is None else stored.host_pages)
        self._configs.pop(handle, None)
        self._keys.pop(handle, None)
        for column in (self.targets, self.num_adopted, self._sealable, self._computed):
            column[handle] = 0

    # pages that others may use

    def extend(self, handle: int) -> int:
        """Adopt what others have sealed meanwhile, right behind the row's length; returns the tokens gained."""
        length = int(self._streams.lengths[handle])
        if handle in self._stored or length != self.arena.held[handle] * self._streams.page_size:
            return 0
        self._adopt(handle, int(self.arena.promised[handle]))
        return int(self._streams.lengths[handle]) - length

    def seal(self, handles: np.ndarray, ends: np.ndarray) -> None:
        """Rows have computed their tokens up to `ends` int32 [rows], and may have gone on since."""
        full = np.minimum(ends // self._streams.page_size, self._sealable[handles])
        due = (full > self._sealed[handles]).nonzero()[0]
        for index in due.tolist():
            self._seal(int(handles[index]), int(full[index]))

    # preemption

    def reclaimable(self, handle: int) -> int:
        """By how many pages preempting the request would raise what is unpromised; 0: it cannot be preempted."""
        if handle in self._stored or not (self.policy.recompute or self._host_promised(handle)):
            return 0
        return self.arena.num_sole(self._pages(handle)) + self.arena.owed(handle)

    def preempt(self, handle: int) -> Preempted:
        """Take the row's pages and its promise away. Raises `RuntimeError` for a row that could not come back."""
        if handle in self._stored or not (self.policy.recompute or self._host_promised(handle)):
            raise RuntimeError(f"handle {handle} cannot be preempted")
        length = int(self._streams.lengths[handle])
        host_pages = self._offload(handle, length)
        if host_pages is not None:
            stored = _Stored("offload", length, host_pages)
        else:
            stored = _Stored("recompute", 0, NO_PAGES)
            if length >= self._num_prompt(handle):  # before that, its prompt simply goes on
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
        return self.arena.covers(handle, self._resumed_pages(handle), self._match(handle))

    def resume(self, handle: int) -> bool:
        """Bring a preempted row back; False: no room now, and nothing has changed."""
        stored = self._stored.get(handle)
        if stored is None:
            return True
        if not self._adopt(handle, self._resumed_pages(handle)):
            return False
        del self._stored[handle]
        if stored.host_pages.size and self.host is not None:
            held = int(self.arena.held[handle])
            row, rest = np.array([handle]), np.array([stored.host_pages.size - held], np.int32)
            acquired = self.arena.acquire(row, rest)
            assert acquired.refused is None, "promised pages are never refused"
            self._streams.append(row, np.array([held]), rest, acquired.pages)
            self._streams.lengths[handle] = stored.length
            self._ops.append(DeviceOp("reload", stored.host_pages[held:], acquired.pages))
            self.host.arena.give_back(row, np.array([stored.host_pages.size], np.int32), stored.host_pages)
        return True

    def _offload(self, handle: int, length: int) -> np.ndarray | None:
        """Order the copy of a row's pages to the host; None where there is nothing to copy or no room for it."""
        count = self._pages_for(length)
        if self.host is None or not count:
            return None
        acquired = self.host.arena.acquire(np.array([handle]), np.array([count], np.int32))
        if acquired.refused is not None:
            return None
        self._ops.append(DeviceOp("offload", self._pages(handle)[:count], acquired.pages))
        return acquired.pages

    def _resumed_pages(self, handle: int) -> int:
        """What a preempted row is promised when it comes back: what it must hold, and room for its next token."""
        needed = max(self._stored[handle].length, int(self.targets[handle]), self._num_prompt(handle))
        return self._pages_for(max(needed, min(needed + 1, self._configs[handle].max_total_tokens)))

    # one row

    def _adopt(self, handle: int, num_pages: int) -> bool:
        """Promise `num_pages` and make what is indexed behind the row's pages its own."""
        adopted = self._match(handle)
        if not self.arena.promise(handle, num_pages, adopted):
            return False
        if adopted.size:
            end = int(self.arena.held[handle])
            begin = end - adopted.size
            self._streams.table[handle, begin:end] = adopted
            self._sealed[handle] = end
            self._streams.lengths[handle] = end * self._streams.page_size
            first = max(begin * self._streams.page_size, int(self._computed[handle]))
            gained = max(end * self._streams.page_size - first, 0)
            self.num_adopted[handle] += gained
            self.num_adopted_total += gained
        return True

    def _match(self, handle: int) -> np.ndarray:
        """Indexed pages behind the row's own, as far as the row may adopt: its last prompt token is computed always,
        and so is what no target asks for."""
        keys = self._keys.get(handle)
        if not keys:
            return NO_PAGES
        stored, target = self._stored.get(handle), int(self.targets[handle])
        if stored is not None and stored.kind == "offload":
            most = stored.length
        else:
            most = target or self._num_prompt(handle) - 1
        end = min(most // self._streams.page_size, len(keys))
        return self.arena.index.match(keys, int(self.arena.held[handle]), end)

    def _seal(self, handle: int, num_full: int) -> None:
        keys = self._keys[handle]
        if num_full > len(keys):
            self._extend_keys(handle, keys, num_full)
        for index in range(int(self._sealed[handle]), num_full):
            page = int(self._streams.table[handle, index])
            self.arena.seal(page, keys[index], keys[index - 1] if index else None)
        self._sealed[handle] = num_full

    def _extend_keys(self, handle: int, keys: list[bytes], num_pages: int) -> None:
        root = self.policy.root
        assert self.read_token_ids is not None and root is not None
        config, page_size = self._configs[handle], self._streams.page_size
        begin = len(keys) * page_size
        parent = keys[-1] if keys else salted(root, config.cache_salt)
        ids = self.read_token_ids(handle, begin, num_pages * page_size)
        keys.extend(chain_keys(parent, ids, page_size, config.media, begin))

    def _release(self, handle: int) -> None:
        held = int(self.arena.held[handle])
        self.arena.forget(handle, self._streams.clear(handle, held))
        self._sealed[handle] = 0

    def _pages(self, handle: int) -> np.ndarray:
        return self._streams.table[handle, : int(self.arena.held[handle])].copy()

    def _host_promised(self, handle: int) -> bool:
        return self.host is not None and bool(self.host.arena.promised[handle])

    def _num_prompt(self, handle: int) -> int:
        prompt = self._configs[handle].prompt_ids
        return 0 if prompt is None else prompt.size

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._streams.page_size)
