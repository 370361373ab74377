"""`EncoderCache`: features of media, by digest and `cache_salt`, beyond the request that encoded them.

Control plane (loop thread): which media are known, who uses them, what is thrown away. Data plane (executor): the
feature tensors, kept by `complete`. A request is never refused or delayed by what is cached: its own features are in
its signals once it has encoded, and the cache holds only what fits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from mstar.communication.messages import MediaSpan
from mstar.engine.layer_handles import PendingMedia
from mstar.engine.resources.base import OpenConfig, Resource, StepContext, Transaction
from mstar.engine.resources.page_keys import salted
from mstar.engine.spec import EncoderCacheSpec
from mstar.engine.step import EncodeStep, Rows


@dataclass(slots=True, eq=False)
class _Entry:
    """Features of one medium. `users`: rows that read or make it. `cached`: others find it. `features` is set on the
    executor by the row that encodes it, before any step that reads it is run."""

    digest: bytes
    num_bytes: int
    users: int = 0
    cached: bool = False
    features: Tensor | None = None


@dataclass(slots=True)
class _Row:
    """`entries`: of `media`, one by one, equal media sharing one; decided when its first step is planned.
    `pending[i]`: what it encodes itself, as (place among the row's media tokens, medium). `steps` planned so far."""

    media: tuple[MediaSpan, ...]
    entries: list[_Entry] = field(default_factory=list)
    pending: list[tuple[int, MediaSpan, _Entry]] = field(default_factory=list)
    steps: int = 0


@dataclass(frozen=True, slots=True)
class _RowFacts:
    handle: int
    step: int
    entries: tuple[_Entry, ...]
    pending: tuple[tuple[int, MediaSpan, _Entry], ...]


@dataclass(slots=True)
class EncodeFacts:
    """Of one step. `completed`: rows whose features are all there since it, written by the forward."""

    rows: tuple[_RowFacts, ...]
    completed: list[_RowFacts]


class EncoderCache(Resource[EncodeStep]):
    """`max_bytes`: of features that are kept for later requests. The layer handle is the cache itself
    (`mstar.engine.layer_handles.EncoderCacheHandle`)."""

    def __init__(
        self, spec: EncoderCacheSpec, *, capacity: int, max_bytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.key = spec.key
        self.spec = spec
        self._max_bytes = max_bytes
        self._token_bytes = spec.width * dtype.itemsize
        self._rows: list[_Row | None] = [None] * (capacity + 1)
        self._cached: OrderedDict[bytes, _Entry] = OrderedDict()  # the one unused for longest is first
        self._cached_bytes = 0
        self._num_hits = self._num_misses = 0
        self._facts = EncodeFacts((), [])
        self._nothing = torch.empty(0, spec.width, dtype=dtype, device=device)

    # control plane

    def introduce(self, handle: int, config: OpenConfig) -> None:
        media, salt = config.media, config.cache_salt
        if salt:
            media = tuple(msgspec.structs.replace(span, digest=salted(span.digest, salt)) for span in media)
        self._rows[handle] = _Row(media)

    def open(self, handle: int, config: OpenConfig) -> None:
        """What it needs of a request is known by then."""

    def close(self, handle: int) -> None:
        row, self._rows[handle] = self._rows[handle], None
        if row is not None:
            self._release(row)
            self._evict()

    def pending_grids(self, handles: np.ndarray) -> Sequence[Sequence[tuple[int, int, int]]]:
        """Of `EncoderCacheHandle`."""
        grids: list[list[tuple[int, int, int]]] = []
        for handle in handles.tolist():
            row = self._row(handle)
            if not row.steps:
                self._decide(row)
            grids.append([span.grid for _, span, _ in row.pending])
        return grids

    def plan(self, step: EncodeStep, ctx: StepContext) -> EncodeFacts:
        facts: list[_RowFacts] = []
        for handle in ctx.rows.handles.tolist():
            row = self._row(handle)
            if not row.steps:
                self._decide(row)
            facts.append(_RowFacts(handle, row.steps, tuple(row.entries), tuple(row.pending)))
        return EncodeFacts(tuple(facts), [])

    def advance(self, step: EncodeStep, ctx: StepContext, txn: Transaction) -> None:
        rows = [self._row(handle) for handle in ctx.rows.handles.tolist()]
        for row in rows:
            row.steps += 1

        def undo() -> None:
            for row in rows:
                row.steps -= 1

        txn.undo(undo)

    def publish(self, step: EncodeStep, rows: Rows, plan: EncodeFacts, keep: np.ndarray | None) -> None:
        kept = set(rows.handles.tolist() if keep is None else rows.handles[keep].tolist())
        for facts in plan.completed:
            row = self._rows[facts.handle]
            if facts.handle not in kept or row is None or not row.entries:
                continue
            self._num_misses += len(row.pending)
            self._num_hits += len(row.entries) - len(row.pending)
            for _, _, entry in row.pending:
                self._remember(entry)
            self._release(row)
        self._evict()

    def narrow(self, plan: EncodeFacts, begin: int, end: int) -> EncodeFacts:
        return EncodeFacts(plan.rows[begin:end], plan.completed)

    def gauges(self) -> Mapping[str, float]:
        return {
            f'mstar_encoder_cache_bytes{{cache="{self.key}",state="cached"}}': float(self._cached_bytes),
            f'mstar_encoder_cache_media_total{{cache="{self.key}",result="hit"}}': float(self._num_hits),
            f'mstar_encoder_cache_media_total{{cache="{self.key}",result="miss"}}': float(self._num_misses),
        }

    # data plane

    def layer(self, index: int) -> EncoderCache:
        return self

    def begin_forward(self, plan: EncodeFacts, staging: Mapping[str, Tensor]) -> None:
        self._facts = plan

    def pending(self) -> Sequence[PendingMedia]:
        """Of `EncoderCacheHandle`."""
        return [
            PendingMedia(index, first, span.length, span.grid, row.step)
            for index, row in enumerate(self._facts.rows)
            for first, span, _ in row.pending
        ]

    def complete(self, features: Sequence[Tensor | None]) -> list[Tensor]:
        """Of `EncoderCacheHandle`."""
        given = iter(features)
        completed: list[Tensor] = []
        for row in self._facts.rows:
            own = [next(given) for _ in row.pending]
            for (_, _, entry), made in zip(row.pending, own, strict=True):
                if made is not None:
                    entry.features = made.clone()  # often a piece of a larger tensor, which it would keep alive
            parts = [entry.features for entry in row.entries]
            there = [part for part in parts if part is not None]
            if all(made is not None for made in own) and len(there) == len(parts) and there:
                self._facts.completed.append(row)
                completed.append(torch.cat(there))
            else:
                completed.append(self._nothing)
        return completed

    # entries

    def _row(self, handle: int) -> _Row:
        row = self._rows[handle]
        if row is None:
            raise LookupError(f"handle {handle} encodes media, but is not known to resource {self.key!r}")
        return row

    def _decide(self, row: _Row) -> None:
        """What is cached now is used; the rest is the row's to encode, equal media once."""
        self._release(row)
        own: dict[bytes, _Entry] = {}
        first = 0
        for span in row.media:
            entry = self._cached.get(span.digest) or own.get(span.digest)
            if entry is None:
                entry = own[span.digest] = _Entry(span.digest, span.length * self._token_bytes)
                row.pending.append((first, span, entry))
            elif entry.cached:
                self._cached.move_to_end(span.digest)
            entry.users += 1
            row.entries.append(entry)
            first += span.length

    def _release(self, row: _Row) -> None:
        """The row needs no features any more. Entries that are not cached go with it: a step that is in flight for it
        nevertheless holds them in its facts."""
        for entry in row.entries:
            entry.users -= 1
        row.entries = []
        row.pending = []

    def _remember(self, entry: _Entry) -> None:
        if entry.digest in self._cached or entry.num_bytes > self._max_bytes:
            return
        entry.cached = True
        self._cached[entry.digest] = entry
        self._cached_bytes += entry.num_bytes

    def _evict(self) -> None:
        """The longest unused first; never what a row uses."""
        if self._cached_bytes <= self._max_bytes:
            return
        for entry in [entry for entry in self._cached.values() if not entry.users]:
            del self._cached[entry.digest]
            entry.cached = False
            self._cached_bytes -= entry.num_bytes
            if self._cached_bytes <= self._max_bytes:
                return
