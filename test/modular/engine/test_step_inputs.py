"""Tensor inputs of a step: stacked, ragged, lists, live values, absent ones; made only when read."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mstar.communication.tensor_store import TensorStore
from mstar.engine.execution import StepPart
from mstar.engine.step_inputs import find_inputs, ragged_inputs, row_shapes, stacked_inputs
from mstar.graph.protocol import LIVE_COLUMN, NO_TENSOR, ReadyKey, TakenRows

LIVE = torch.tensor([100, 101, 102, 103])


def part(begin: int, rows: int, ids: dict | None = None, lists: dict | None = None) -> StepPart:
    taken = TakenRows(ReadyKey("n", "w"), list(range(rows)), ids or {}, lists or {}, [0] * rows, [False] * rows)
    return StepPart(taken, begin, begin + rows)


def resolved(*parts: StepPart, store: TensorStore) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    found = find_inputs(parts, store)
    rows = parts[-1].end
    ragged = {name: list(value) for name, value in ragged_inputs(found, lambda: LIVE[:rows]).items()}
    return dict(stacked_inputs(found, lambda: LIVE[:rows])), ragged


def test_rows_of_one_batch_are_a_view_and_others_a_copy():
    store = TensorStore()
    batch = torch.arange(12.0).view(4, 3)
    ids = store.put_batch(batch).tolist()
    other = store.put(torch.tensor([7.0, 8.0, 9.0]))
    tensors, ragged = resolved(part(0, 3, {"x": ids[1:], "y": [ids[3], other, ids[0]]}), store=store)
    assert not ragged
    assert torch.equal(tensors["x"], batch[1:]) and tensors["x"].data_ptr() == batch[1].data_ptr()
    assert torch.equal(tensors["y"], torch.stack([batch[3], torch.tensor([7.0, 8.0, 9.0]), batch[0]]))


def test_rows_of_different_shape_are_ragged():
    store = TensorStore()
    ids = [store.put(torch.full((n, 2), float(n))) for n in (1, 3)]
    tensors, ragged = resolved(part(0, 2, {"x": ids}), store=store)
    assert not tensors
    assert [tuple(row.shape) for row in ragged["x"]] == [(1, 2), (3, 2)]


def test_lists_are_one_tensor_per_row_even_when_equally_long():
    store = TensorStore()
    ids = store.put_batch(torch.arange(5)).tolist()
    tensors, ragged = resolved(part(0, 3, {}, {"frames": [ids[:2], ids[3:], []]}), store=store)
    assert not tensors
    assert [row.tolist() for row in ragged["frames"]] == [[0, 1], [3, 4], []]
    assert [row.tolist() for row in resolved(part(0, 1, {}, {"f": [[ids[4], ids[0]]]}), store=store)[1]["f"]] == [
        [4, 0]
    ]


def test_live_and_absent_values():
    store = TensorStore()
    one = store.put(torch.tensor(5))
    ids = {
        "live": [LIVE_COLUMN] * 3,
        "none": [NO_TENSOR] * 3,
        "mixed": [LIVE_COLUMN, one, NO_TENSOR],
    }
    tensors, ragged = resolved(part(0, 3, ids), store=store)
    assert tensors["live"].tolist() == [100, 101, 102]
    assert "none" not in tensors and "none" not in ragged
    assert [row.tolist() for row in ragged["mixed"]] == [100, 5, []]


def test_two_parts_share_columns_by_name():
    store = TensorStore()
    ids = store.put_batch(torch.arange(4.0)).tolist()
    decode = part(0, 2, {"token": [LIVE_COLUMN] * 2, "both": ids[:2]})
    prefill = part(2, 2, {"both": ids[2:], "media": ids[:2]}, {"list": [ids[:1], ids[:2]]})
    tensors, ragged = resolved(decode, prefill, store=store)
    assert tensors["both"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert [row.tolist() for row in ragged["token"]] == [100, 101, [], []]
    assert [row.tolist() for row in ragged["media"]] == [[], [], 0.0, 1.0]
    assert [row.tolist() for row in ragged["list"]] == [[], [], [0.0], [0.0, 1.0]]


def test_shapes_for_can_batch():
    store = TensorStore()
    ids = store.put_batch(torch.zeros(2, 5)).tolist()
    wide = store.put(torch.zeros(2, 2))
    found = find_inputs(
        (part(0, 2, {"x": ids, "y": [wide, NO_TENSOR], "t": [LIVE_COLUMN] * 2}, {"l": [ids, []]}),), store
    )
    assert row_shapes(found, 2) == [{"x": (5,), "y": (2, 2), "t": (), "l": (2, 5)}, {"x": (5,), "t": (), "l": (0,)}]


def test_a_row_alone_may_be_stacked_where_all_rows_are_not():
    store = TensorStore()
    ids = [store.put(torch.zeros(n)) for n in (1, 2)]
    value = find_inputs((part(0, 2, {"x": ids}, {"l": [ids[:1], ids[:1]]}),), store)
    assert not value["x"].uniform
    assert value["x"].narrow(slice(1, 2)).uniform
    assert not value["l"].narrow(slice(1, 2)).uniform


def test_nothing_is_assembled_before_it_is_read(monkeypatch: pytest.MonkeyPatch):
    store = TensorStore()
    ids = [store.put(torch.zeros(3)) for _ in range(2)]
    stacked = stacked_inputs(find_inputs((part(0, 2, {"x": ids}),), store), lambda: LIVE)
    calls: list[int] = []
    stack = torch.stack

    def counting(tensors: list[Tensor]) -> Tensor:
        calls.append(len(tensors))
        return stack(tensors)

    monkeypatch.setattr(torch, "stack", counting)
    assert "x" in stacked and len(stacked) == 1 and not calls
    assert stacked["x"] is stacked["x"]
    assert calls == [2]
    assert np.array_equal(stacked["x"], np.zeros((2, 3)))
