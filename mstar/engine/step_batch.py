"""Arithmetic on `NodeBatch`: parts joined, rows merged and cut. Loop thread, host integers; asks nobody anything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from mstar.engine.submodule import NodeBatch

NOT_GIVEN = -1
"""In a token column: the node said nothing about the token."""


def join_spans(batches: Sequence[NodeBatch]) -> np.ndarray:
    """int32 [rows of all parts]: what the rows compute."""
    if len(batches) == 1:
        return np.asarray(batches[0].spans, np.int32)
    return np.concatenate([batch.spans for batch in batches], dtype=np.int32)


def join_parts(batches: Sequence[NodeBatch], token_columns: Sequence[str]) -> NodeBatch:
    """The batches of a step's parts, one after the other; every one of `token_columns` is there."""
    if len(batches) == 1 and not token_columns:
        return batches[0]
    spans = join_spans(batches)
    token_ids = [batch.token_ids for batch in batches if batch.token_ids is not None]
    kept = None
    if any(batch.kept is not None for batch in batches):
        kept = np.concatenate(
            [np.ones(len(batch.spans), np.bool_) if batch.kept is None else batch.kept for batch in batches]
        )
    columns = {
        name: np.concatenate([_column(batch, name) for batch in batches if batch.token_ids is not None])
        for name in (token_columns if token_ids else ())
    }
    return NodeBatch(spans, np.concatenate(token_ids) if token_ids else None, kept, columns)


def merge_rows(pieces: Sequence[tuple[np.ndarray, NodeBatch]], token_columns: Sequence[str]) -> NodeBatch:
    """One batch of rows that were asked about separately: each piece's batch belongs to the rows at its positions
    (int64, rising; together they are 0, 1, 2, ...). With a declined row only the spans are of use."""
    joined = join_parts([batch for _, batch in pieces], token_columns)
    places = np.concatenate([index for index, _ in pieces])
    rows = np.argsort(places)
    spans = joined.spans[rows]
    kept = None if joined.kept is None else joined.kept[rows]
    if joined.token_ids is None or spans.min() < 0:
        return NodeBatch(spans, None, kept)
    tokens = np.argsort(np.repeat(places, joined.spans), kind="stable")
    columns = {name: values[tokens] for name, values in (joined.token_columns or {}).items()}
    return NodeBatch(spans, joined.token_ids[tokens], kept, columns)


def cut_parts(batches: Sequence[NodeBatch], limits: Sequence[np.ndarray | None]) -> Sequence[NodeBatch]:
    """Of each row the first tokens, as many as its part's `limits` int32 [rows of the part] allow (None: all)."""
    return [
        batch if most is None else _cut_rows(batch, np.minimum(batch.spans, most))
        for batch, most in zip(batches, limits, strict=True)
    ]


def _cut_rows(batch: NodeBatch, spans: np.ndarray) -> NodeBatch:
    """The first `spans[i]` int32 of each row's tokens."""
    if batch.token_ids is None:
        return batch._replace(spans=spans)
    begins = accumulate(batch.spans.tolist(), initial=0)
    pieces = [slice(begin, begin + count) for begin, count in zip(begins, spans.tolist(), strict=False)]
    columns = {name: _pick(values, pieces) for name, values in (batch.token_columns or {}).items()}
    return NodeBatch(spans, _pick(batch.token_ids, pieces), batch.kept, columns)


def _pick(values: np.ndarray, pieces: Sequence[slice]) -> np.ndarray:
    return values[pieces[0]] if len(pieces) == 1 else np.concatenate([values[piece] for piece in pieces])


def _column(batch: NodeBatch, name: str) -> np.ndarray:
    given = None if batch.token_columns is None else batch.token_columns.get(name)
    assert batch.token_ids is not None
    return np.full(len(batch.token_ids), NOT_GIVEN, np.int32) if given is None else given
