"""`PagedKV`: keys and values of a node's requests in pages, K and V separate per layer.

Control plane (loop thread): pages and lengths per handle, all by columns. Data plane (executor): the page tensors. It
computes no attention: `Attention` does, over the fields staged here (`<key>.block_table`, `.kv_lens`, `.slots`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.engine.execution import AdmitOutcome
from mstar.engine.resources.base import OpenConfig, Resource, StepContext, Transaction, Work
from mstar.engine.resources.cache_stream import CacheStream, CacheStreams, token_positions
from mstar.engine.resources.page_arena import PageArena
from mstar.engine.spec import PagedKVSpec
from mstar.engine.staging import StagingField, StepShape
from mstar.engine.step import KVStep, Rows


class LayerPages(NamedTuple):
    """One layer's cache: each `[pages, page_size, kv_heads, head_dim]`."""

    k: Tensor
    v: Tensor


def page_bytes(spec: PagedKVSpec, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, K and V."""
    return 2 * spec.num_layers * spec.page_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class PagedKV(Resource[KVStep]):
    """`num_pages` includes the sink page. A row holds at most `max_seq_len` tokens."""

    def __init__(
        self,
        spec: PagedKVSpec,
        *,
        num_pages: int,
        capacity: int,
        max_seq_len: int,
        dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ) -> None:
        self.key = spec.key
        self.spec = spec
        self.max_seq_len = max_seq_len
        self.arena = PageArena(num_pages, capacity + 1)
        self.streams = CacheStreams(capacity + 1, -(-max_seq_len // spec.page_size), spec.page_size)
        self.targets = np.zeros(capacity + 1, np.int32)
        """int32 [capacity + 1]: tokens that a row's cache must hold before the row's own next step."""
        shape = (spec.num_layers, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        self._k = _zeros(shape, dtype, device)
        self._v = _zeros(shape, dtype, device)
        self.writing = True
        """Whether the running forward extends the rows (executor)."""
        self._poison = poison
        self._work: list[Work] = []
        if poison:
            self._fill_nan(np.arange(num_pages, dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        """int32 [capacity + 1]: tokens in each row's cache, as of the last advance."""
        return self.streams.lengths

    @property
    def num_pages_total(self) -> int:
        """Pages that requests can own (without the sink)."""
        return self.arena.allocator.num_pages - 1

    def stream(self, handle: int) -> CacheStream:
        """The row's pages and length now."""
        held = int(self.arena.held[handle])
        return CacheStream(handle, int(self.lengths[handle]), self.streams.table[handle, :held].copy())

    def open(self, handle: int, config: OpenConfig) -> None:
        if self.lengths[handle] or self.arena.held[handle]:
            raise RuntimeError(f"handle {handle} is opened in {self.key!r} while it still holds a cache")

    def close(self, handle: int) -> None:
        pages = self.streams.clear(handle, int(self.arena.held[handle]))
        self.targets[handle] = 0
        freed = self.arena.forget(handle, pages)
        if self._poison and freed.size:
            self._work.append(partial(self._fill_nan, freed.astype(np.int64)))

    def reserve(self, handle: int, num_tokens: int) -> bool:
        return self.arena.promise(handle, self._pages_for(num_tokens))

    def most_tokens(self) -> int:
        return min(self.max_seq_len, self.num_pages_total * self.spec.page_size)

    def num_pages(self, step: KVStep, rows: Rows) -> int:
        if not rows.handles.size:
            return 0
        after = self.lengths[rows.handles] + rows.spans if step.write else self.lengths[rows.handles]
        return self._pages_for(int(after.max()))

    def admit(self, step: KVStep, ctx: StepContext, txn: Transaction) -> AdmitOutcome:
        if not step.write:
            return AdmitOutcome()
        handles, spans, _ = ctx.rows
        held = self.arena.held[handles]
        after = self.lengths[handles] + spans
        short = (after > held * self.spec.page_size).nonzero()[0]
        if not short.size:
            return AdmitOutcome()
        handles, held = handles[short], held[short]
        counts = -(-after[short] // self.spec.page_size) - held
        acquired = self.arena.acquire(handles, counts)
        if acquired.refused is not None:
            return AdmitOutcome(tuple(handles[acquired.refused].tolist()), self.key)
        self.streams.append(handles, held, counts, acquired.pages)

        def undo() -> None:
            self.streams.cut(handles, held, counts)
            self.arena.give_back(handles, counts, acquired.pages)

        txn.undo(undo)
        return AdmitOutcome()

    def plan(self, step: KVStep, ctx: StepContext) -> bool:
        handles, spans, _ = ctx.rows
        n = handles.size
        lengths = self.lengths[handles]
        table = ctx.staging[self.key + ".block_table"]
        table[:n] = self.streams.table[handles, : table.shape[1]]
        slots = ctx.staging[self.key + ".slots"]
        if not step.write:
            ctx.staging[self.key + ".kv_lens"][:n] = lengths
            slots[:] = -1
            return False
        np.add(lengths, spans, out=ctx.staging[self.key + ".kv_lens"][:n], casting="unsafe")
        if ctx.single:
            slots[:n] = self.streams.slots(handles, lengths)
        else:
            positions = token_positions(lengths, spans)
            slots[: ctx.num_tokens] = self.streams.slots(np.repeat(handles, spans), positions)
        return True

    def capturable(self, plan: bool, captured: bool) -> bool:
        return plan == captured

    def advance(self, step: KVStep, ctx: StepContext, txn: Transaction) -> None:
        if not step.write:
            return
        handles, spans, _ = ctx.rows
        before = self.lengths[handles]
        self.lengths[handles] = before + spans

        def undo() -> None:
            self.lengths[handles] = before

        txn.undo(undo)

    def layer(self, index: int) -> LayerPages:
        if not 0 <= index < self.spec.num_layers:
            raise LookupError(f"resource {self.key!r} has {self.spec.num_layers} layers, layer {index} was asked")
        return LayerPages(self._k[index], self._v[index])

    def staging_fields(self) -> Sequence[StagingField]:
        return (
            StagingField(self.key + ".block_table", "int32", "row", 0, self._table_width),
            StagingField(self.key + ".kv_lens", "int32", "row", 1),
            StagingField(self.key + ".slots", "int32", "token", 0),
        )

    def drain_work(self) -> Sequence[Work]:
        if not self._work:
            return ()
        work, self._work = self._work, []
        return work

    def begin_forward(self, plan: bool, staging: Mapping[str, Tensor]) -> None:
        self.writing = plan
        if self._poison:  # what padding rows wrote must reach nobody
            self._fill_nan(np.zeros(1, np.int64))

    def gauges(self) -> Mapping[str, float]:
        allocator = self.arena.allocator
        return {
            f'mstar_pages{{pool="{self.key}",state="free"}}': float(allocator.num_free),
            f'mstar_pages{{pool="{self.key}",state="owned"}}': float(allocator.num_owned),
        }

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.page_size)

    def _table_width(self, shape: StepShape) -> int:
        return min(shape.pages, self.streams.max_pages)

    def _fill_nan(self, pages: np.ndarray) -> None:
        index = torch.from_numpy(pages).to(self._k.device)
        self._k.index_fill_(1, index, float("nan"))
        self._v.index_fill_(1, index, float("nan"))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of a pool. On a CPU the memory is taken page by page as it is first written: numpy asks the kernel for
    zeroed pages, where `torch.zeros` would write all of them at start-up."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)
