"""`PagedKV`: keys and values of a node's requests in pages, K and V separate per layer.

Control plane (loop thread): pages and lengths per handle, all by columns; what requests hold between steps is
`holdings`. Data plane (executor): the page tensors, and the device operations ordered for them. It computes no
attention: `Attention` does, over the fields staged here (`<key>.block_table`, `.kv_lens`, `.slots`), and `Positions` at
`.positions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mstar.engine.device_ops import NO_PAGES, DeviceOp
from mstar.engine.execution import AdmitOutcome
from mstar.engine.host_columns import to_device
from mstar.engine.resources.base import OpenConfig, Resource, StepContext, Transaction, Work
from mstar.engine.resources.cache_holdings import CacheHoldings
from mstar.engine.resources.cache_policy import NO_REUSE, CachePolicy
from mstar.engine.resources.cache_stream import CacheStream, CacheStreams, token_positions
from mstar.engine.resources.cpu_page_pool import CPUPagePool
from mstar.engine.resources.page_arena import PageArena
from mstar.engine.resources.page_tensors import zeros
from mstar.engine.spec import PagedKVSpec
from mstar.engine.staging import StagingField, StepShape
from mstar.engine.step import KVStep, Rows


class LayerPages(NamedTuple):
    """One layer's cache: each `[pages, page_size, kv_heads, head_dim]`."""

    k: Tensor
    v: Tensor


class KVFacts(NamedTuple):
    """Of one step: whether it extends the rows, and their lengths after it, int32 [rows]."""

    write: bool
    ends: np.ndarray


def page_bytes(spec: PagedKVSpec, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers, K and V."""
    return 2 * spec.num_layers * spec.page_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class PagedKV(Resource[KVStep]):
    """`num_pages` includes the sink page. A row holds at most `max_seq_len` tokens. `num_host_pages`: room on the host
    for preempted rows."""

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
        num_host_pages: int = 0,
        policy: CachePolicy = NO_REUSE,
    ) -> None:
        self.key = spec.key
        self.spec = spec
        self.max_seq_len = max_seq_len
        self._ops: list[DeviceOp] = []
        self._poison = poison
        self.arena = PageArena(num_pages, capacity + 1, self._poison_pages if poison else None)
        self.streams = CacheStreams(capacity + 1, -(-max_seq_len // spec.page_size), spec.page_size)
        shape = (spec.num_layers, num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
        self._k = zeros(shape, dtype, device)
        self._v = zeros(shape, dtype, device)
        self._host = CPUPagePool(num_host_pages, capacity + 1, self._k) if num_host_pages else None
        self.holdings = CacheHoldings(self.arena, self.streams, self._host, policy, self._ops)
        """What requests hold here between steps."""
        self.writing = True
        """Whether the running forward extends the rows (executor)."""
        if poison:
            self._fill_nan(np.arange(num_pages))

    @property
    def lengths(self) -> np.ndarray:
        """int32 [capacity + 1]: tokens in each row's cache, as of the last advance."""
        return self.streams.lengths

    @property
    def targets(self) -> np.ndarray:
        """int32 [capacity + 1]: tokens that a row's cache must hold before the row's own next step."""
        return self.holdings.targets

    @property
    def num_pages_total(self) -> int:
        """Pages that requests can own (without the sink)."""
        return self.arena.allocator.num_pages - 1

    def stream(self, handle: int) -> CacheStream:
        """The row's pages and length now."""
        held = int(self.arena.held[handle])
        return CacheStream(handle, int(self.lengths[handle]), self.streams.table[handle, :held].copy())

    def introduce(self, handle: int, config: OpenConfig) -> None:
        self.holdings.introduce(handle, config)

    def reserve(self, handle: int) -> bool:
        return self.holdings.reserve(handle)

    def withdraw(self, handle: int) -> None:
        self.holdings.withdraw(handle)

    def open(self, handle: int, config: OpenConfig) -> None:
        """What a row holds from its prompt on is there already."""

    def close(self, handle: int) -> None:
        self.holdings.close(handle)

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
            return AdmitOutcome(tuple(handles[acquired.refused].tolist()), self.key, acquired.missing)
        self.streams.append(handles, held, counts, acquired.pages)

        def undo() -> None:
            self.streams.cut(handles, held, counts)
            self.arena.give_back(handles, counts, acquired.pages)

        txn.undo(undo)
        return AdmitOutcome()

    def plan(self, step: KVStep, ctx: StepContext) -> KVFacts:
        handles, spans, _ = ctx.rows
        n = handles.size
        lengths = self.lengths[handles]
        self.streams.copy_rows(handles, ctx.staging[self.key + ".block_table"][:n])
        positions = lengths if ctx.single else token_positions(lengths, spans)
        ctx.staging[self.key + ".positions"][: ctx.num_tokens] = positions
        slots = ctx.staging[self.key + ".slots"]
        if not step.write:
            ctx.staging[self.key + ".kv_lens"][:n] = lengths
            slots[:] = -1
            return KVFacts(False, lengths)
        ends = lengths + spans
        ctx.staging[self.key + ".kv_lens"][:n] = ends
        token_handles = handles if ctx.single else handles.repeat(spans)
        slots[: ctx.num_tokens] = self.streams.slots(token_handles, positions)
        return KVFacts(True, ends)

    def capturable(self, plan: KVFacts, captured: KVFacts) -> bool:
        return plan.write == captured.write

    def advance(self, step: KVStep, ctx: StepContext, txn: Transaction) -> None:
        if not step.write:
            return
        handles, spans, _ = ctx.rows
        before = self.lengths[handles]
        self.lengths[handles] = before + spans

        def undo() -> None:
            self.lengths[handles] = before

        txn.undo(undo)

    def publish(self, step: KVStep, rows: Rows, plan: KVFacts, keep: np.ndarray | None) -> None:
        if step.write and keep is None:
            self.holdings.keys.seal(rows.handles, plan.ends)
        elif step.write:
            self.holdings.keys.seal(rows.handles[keep], plan.ends[keep])

    def layer(self, index: int) -> LayerPages:
        if not 0 <= index < self.spec.num_layers:
            raise LookupError(f"resource {self.key!r} has {self.spec.num_layers} layers, layer {index} was asked")
        return LayerPages(self._k[index], self._v[index])

    def staging_fields(self) -> Sequence[StagingField]:
        return (
            StagingField(self.key + ".block_table", "int32", "row", 0, self._table_width),
            StagingField(self.key + ".kv_lens", "int32", "row", 1),
            StagingField(self.key + ".slots", "int32", "token", 0),
            StagingField(self.key + ".positions", "int32", "token", 0),
        )

    def drain_work(self) -> Sequence[Work]:
        if not self._ops:
            return ()
        work = [partial(self._carry_out, op) for op in self._ops]
        self._ops.clear()
        return work

    def begin_forward(self, plan: KVFacts, staging: Mapping[str, Tensor]) -> None:
        self.writing = plan.write
        if self._poison:  # what padding rows wrote must reach nobody
            self._fill_nan(np.zeros(1, np.int64))

    def gauges(self) -> Mapping[str, float]:
        arena = self.arena
        states = {"free": arena.num_free, "owned": arena.num_owned, "cached": arena.num_cached}
        pages = {f'mstar_pages{{pool="{self.key}",state="{state}"}}': float(count) for state, count in states.items()}
        if self._host is not None:
            host = self._host.arena
            for state, count in (("free", host.num_free), ("owned", host.num_owned)):
                pages[f'mstar_pages{{pool="{self.key}.host",state="{state}"}}'] = float(count)
        return pages

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.page_size)

    def _table_width(self, shape: StepShape) -> int:
        return min(shape.pages, self.streams.max_pages)

    def _carry_out(self, op: DeviceOp) -> None:
        if op.kind == "poison":
            self._fill_nan(op.dst)
            return
        assert self._host is not None
        copy = self._host.store if op.kind == "offload" else self._host.load
        copy(self._k, self._v, op.src, op.dst)

    def _poison_pages(self, pages: np.ndarray) -> None:
        self._ops.append(DeviceOp("poison", NO_PAGES, pages))

    def _fill_nan(self, pages: np.ndarray) -> None:
        index = to_device(pages.astype(np.int64), self._k.device)
        self._k.index_fill_(1, index, float("nan"))
        self._v.index_fill_(1, index, float("nan"))
