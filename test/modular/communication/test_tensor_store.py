"""The tensor store: views, reference counts, recycling, misuse."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mstar.communication.tensor_store import StoreError, TensorStore


def test_rows_of_a_batch_are_views_of_it() -> None:
    store = TensorStore()
    batch = torch.arange(12.0).reshape(4, 3)
    ids = store.put_batch(batch)
    assert ids.dtype == np.int64
    assert ids.min() > 0
    assert np.diff(ids).tolist() == [1, 1, 1]
    assert torch.equal(store.get(int(ids[2])), batch[2])
    middle = store.gather(ids[1:3].tolist())
    assert middle.data_ptr() == batch[1].data_ptr()
    assert middle.shape == (2, 3)
    assert store.run(ids).data_ptr() == batch.data_ptr()
    assert store.run(ids[::-1]) is None
    assert store.run([]) is None
    assert store.num_live == 4
    assert store.num_bytes == 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_gather_copies_where_there_is_no_run(dtype: torch.dtype) -> None:
    store = TensorStore()
    first, second = torch.arange(8).reshape(4, 2).to(dtype), torch.arange(6).reshape(3, 2).to(dtype)
    a, b = store.put_batch(first), store.put_batch(second)
    one = store.put(torch.tensor([9, 1]).to(dtype))
    assert torch.equal(store.gather(a[[3, 1]]), first[[3, 1]])
    assert torch.equal(store.gather(a[[1, 1]]), first[[1, 1]])
    mixed = store.gather([*a[2:].tolist(), *b[:2].tolist(), one, int(a[0])])
    assert torch.equal(mixed, torch.cat([first[2:], second[:2], torch.tensor([[9, 1]]).to(dtype), first[:1]]))
    assert torch.equal(store.gather([one]), torch.tensor([[9, 1]]).to(dtype))
    assert [t.tolist() for t in store.gather_list([one, int(b[0])])] == [
        torch.tensor([9, 1]).to(dtype).tolist(),
        second[0].tolist(),
    ]


def test_consecutive_ids_of_two_batches_are_no_run() -> None:
    store = TensorStore()
    a, b = store.put(torch.tensor([1.0])), store.put(torch.tensor([2.0]))
    assert b == a + 1
    assert store.run([a, b]) is None
    assert store.gather([a, b]).tolist() == [[1.0], [2.0]]


def test_gather_of_unequal_rows_is_an_error_and_gather_list_is_not() -> None:
    store = TensorStore()
    ids = [store.put(torch.zeros(2)), store.put(torch.zeros(3)), store.put(torch.zeros(2, dtype=torch.int32))]
    for pair in ([ids[0], ids[1]], [ids[0], ids[2]]):
        with pytest.raises(StoreError, match="unequal"):
            store.gather(pair)
    assert [t.shape[0] for t in store.gather_list(ids)] == [2, 3, 2]
    with pytest.raises(StoreError, match="no ids"):
        store.gather([])
    assert store.gather_list([]) == []


def test_scalars_and_empty_tensors() -> None:
    store = TensorStore()
    scalar, empty = store.put(torch.tensor(7)), store.put(torch.empty(0, 4))
    assert store.get(scalar).item() == 7
    assert store.get(empty).shape == (0, 4)
    assert store.put_batch(torch.empty(0, 4)).shape == (0,)
    assert store.num_live == 2


def test_references_and_free() -> None:
    store = TensorStore()
    ids = store.put_batch(torch.zeros(4, 1)).tolist()
    store.retain(ids)
    store.retain([ids[0], ids[0]])
    assert store.num_references(ids[0]) == 3
    assert store.release([ids[1], ids[0]]) == [ids[1]]
    assert store.get(ids[1]).shape == (1,), "released, but not yet freed"
    assert store.free(ids) == 1
    assert store.num_live == 3
    assert store.release([ids[0], ids[2], ids[0]]) == [ids[0], ids[2]]
    store.retain([ids[2]])
    assert store.free([ids[0], ids[2]]) == 1, "one was taken again in between"
    assert store.release([ids[2], ids[3]]) == [ids[2], ids[3]]
    assert store.free([ids[2], ids[3], ids[2]]) == 2
    assert (store.num_live, store.num_bytes) == (0, 0)
    assert (store.retain([]), store.release([]), store.free([])) == (None, [], 0)


def test_ids_come_back_when_the_whole_batch_is_free() -> None:
    store = TensorStore()
    first = store.put_batch(torch.zeros(3, 1))
    store.free(first[:2])
    assert not set(store.put_batch(torch.zeros(3, 1)).tolist()) & set(first.tolist())
    store.free(first[2:])
    assert store.put_batch(torch.zeros(4, 1))[0] == first[0]


def test_columns_grow() -> None:
    store = TensorStore(num_ids=2)
    batches = [store.put_batch(torch.full((n, 1), float(n))) for n in (1, 5, 3, 200, 1)]
    singles = [store.put(torch.tensor([float(i)])) for i in range(300)]
    assert store.gather(np.concatenate(batches)).flatten().tolist() == [1.0] + [5.0] * 5 + [3.0] * 3 + [200.0] * 200 + [
        1.0
    ]
    assert store.gather(singles).flatten().tolist() == [float(i) for i in range(300)]


def test_misuse_raises_and_changes_nothing() -> None:
    store = TensorStore()
    ids = store.put_batch(torch.zeros(2, 1)).tolist()
    dead = store.put(torch.zeros(1))
    store.free([dead])
    for bad in (0, -1, dead, 4095, 4096, 10**9, -(10**9)):
        for call in (store.retain, store.release, store.free, store.gather, store.gather_list, store.run):
            with pytest.raises(StoreError, match=str(bad)):
                call([ids[0], bad])
        with pytest.raises(StoreError):
            store.get(bad)
    with pytest.raises(StoreError, match="without a reference"):
        store.release([ids[0]])
    store.retain(ids)
    with pytest.raises(StoreError, match=str(ids[1])):
        store.release([ids[0], ids[1], ids[1]])
    assert [store.num_references(i) for i in ids] == [1, 1]
    assert store.num_live == 2


class StoreMachine(RuleBasedStateMachine):
    """Against a dictionary of what each id must hold: counts, contents, and that nothing is freed twice or lost."""

    def __init__(self) -> None:
        super().__init__()
        self.store = TensorStore(num_ids=4)
        self.refs: dict[int, int] = {}
        self.values: dict[int, int] = {}
        self.next_value = 0

    @rule(rows=st.integers(0, 6))
    def put_batch(self, rows: int) -> None:
        values = list(range(self.next_value, self.next_value + rows))
        self.next_value += rows
        ids = self.store.put_batch(torch.tensor(values, dtype=torch.int64).reshape(rows, 1)).tolist()
        assert not set(ids) & set(self.refs)
        assert ids == list(range(ids[0], ids[0] + rows)) if ids else True
        self.refs |= dict.fromkeys(ids, 0)
        self.values |= dict(zip(ids, values, strict=True))

    def some(self, data: st.DataObject) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.refs)), max_size=8))

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        ids = self.some(data)
        self.store.retain(ids)
        for tensor_id in ids:
            self.refs[tensor_id] += 1

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = self.some(data)
        left = dict(self.refs)
        for tensor_id in ids:
            left[tensor_id] -= 1
        if min(left.values()) < 0:
            with pytest.raises(StoreError):
                self.store.release(ids)
            return
        self.refs = left
        assert sorted(self.store.release(ids)) == sorted(i for i in set(ids) if left[i] == 0)

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ids = self.some(data)
        gone = {tensor_id for tensor_id in ids if self.refs[tensor_id] == 0}
        assert self.store.free(ids) == len(gone)
        for tensor_id in gone:
            del self.refs[tensor_id], self.values[tensor_id]

    @precondition(lambda self: self.refs)
    @rule(data=st.data())
    def gather(self, data: st.DataObject) -> None:
        ids = self.some(data)
        if ids:
            assert self.store.gather(ids).flatten().tolist() == [self.values[i] for i in ids]
            assert [t.item() for t in self.store.gather_list(ids)] == [self.values[i] for i in ids]

    @invariant()
    def agrees(self) -> None:
        assert self.store.num_live == len(self.refs)
        assert {i: self.store.num_references(i) for i in self.refs} == self.refs
        assert self.store.gather_list(sorted(self.refs)) == [self.values[i] for i in sorted(self.refs)]


TestStoreMachine = StoreMachine.TestCase
