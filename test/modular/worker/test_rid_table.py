"""Handles and the tables keyed by them."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mstar.worker.rid_table import HandleMap, RidTable, TableFull, UnknownHandle


def test_handles_are_small_and_the_last_released_comes_first() -> None:
    table = RidTable(3)
    assert [table.intern(rid) for rid in ("a", "b", "c")] == [0, 1, 2]
    assert table.intern("b") == 1
    with pytest.raises(TableFull, match="3 requests"):
        table.intern("d")
    assert table.release(0) == "a"
    assert table.release(2) == "c"
    assert table.intern("d") == 2
    assert table.intern("e") == 0
    assert table.handles(["b", "d", "e"]) == [1, 2, 0]
    assert (len(table), table.capacity) == (3, 3)


def test_handles_below_first_name_no_request() -> None:
    table = RidTable(2, first=1)
    assert [table.intern("a"), table.intern("b")] == [1, 2]
    with pytest.raises(TableFull):
        table.intern("c")
    with pytest.raises(UnknownHandle):
        table.rid(0)


def test_unknown_from_the_wire_is_none_and_from_here_an_error() -> None:
    table = RidTable(4)
    a = table.intern("a")
    assert table.handle("x") is None
    assert table.handles(["a", "x", "a"]) == [a, None, a]
    assert table.rids([a, a]) == ["a", "a"]
    assert table.rids([]) == []
    for bad in (1, 3, 4, 99, -1, -4):
        assert not table.is_live(bad)
        with pytest.raises(UnknownHandle, match=str(bad)):
            table.rid(bad)
        with pytest.raises(UnknownHandle, match=str(bad)):
            table.rids([a, bad])
        with pytest.raises(UnknownHandle):
            table.release(bad)
    assert table.is_live(a)
    table.release(a)
    assert not table.is_live(a)
    with pytest.raises(UnknownHandle):
        table.release(a)


@pytest.mark.parametrize(("capacity", "first"), [(0, 0), (-1, 0), (1, -1)])
def test_sizes_are_checked(capacity: int, first: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        RidTable(capacity, first)


def test_release_purges_every_map_but_only_of_its_handle() -> None:
    table = RidTable(2)
    rows: HandleMap[str] = table.handle_map("rows")
    counts: HandleMap[int] = table.handle_map("counts")
    a, b = table.intern("a"), table.intern("b")
    rows[a], rows[b], counts[a] = "row of a", "row of b", 1
    assert a in rows
    table.release(a)
    assert a not in rows
    assert rows.get(a) is None
    assert counts.get(a) is None
    assert dict(rows.items()) == {b: "row of b"}
    assert table.intern("c") == a
    with pytest.raises(UnknownHandle, match=r"rows: nothing for handle 0 .request c."):
        rows[a]
    late: HandleMap[int] = table.handle_map("late")
    late[a] = 3
    table.release(a)
    assert len(late) == 0
    assert list(late.values()) == []


def test_what_is_purged_is_disposed_of_once() -> None:
    table = RidTable(2)
    disposed: list[str] = []
    rows: HandleMap[str] = table.handle_map("rows", disposed.append)
    a, b = table.intern("a"), table.intern("b")
    rows[a], rows[b] = "row of a", "row of b"
    table.release(a)
    assert disposed == ["row of a"]
    assert rows.pop(b) == "row of b"
    table.release(b)
    assert disposed == ["row of a"], "what was taken out belongs to whoever took it"


def test_a_map_takes_no_value_for_a_dead_handle() -> None:
    table = RidTable(2)
    rows: HandleMap[str] = table.handle_map("rows")
    with pytest.raises(UnknownHandle):
        rows[0] = "nobody"
    a = table.intern("a")
    rows[a] = "a"
    assert rows.pop(a) == "a"
    assert rows.pop(a) is None
    table.release(a)
    with pytest.raises(UnknownHandle):
        rows[a] = "late"


class RidTableMachine(RuleBasedStateMachine):
    """Live handles never alias, and what was said of a released one is gone."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.table = RidTable(5, first=2)
        self.maps: list[HandleMap[str]] = [self.table.handle_map("first")]
        self.expected: dict[str, int] = {}
        self.stored: dict[tuple[int, int], str] = {}

    @rule(target=live, rid=st.sampled_from([f"r{i}" for i in range(8)]))
    def intern(self, rid: str) -> object:
        if rid in self.expected:
            assert self.table.intern(rid) == self.expected[rid]
            return multiple()
        if len(self.expected) == 5:
            with pytest.raises(TableFull):
                self.table.intern(rid)
            return multiple()
        handle = self.table.intern(rid)
        assert handle not in self.expected.values()
        assert all(handle not in side for side in self.maps)
        self.expected[rid] = handle
        return rid

    @rule(rid=live, index=st.integers(0, 3))
    def store(self, rid: str, index: int) -> None:
        if index == len(self.maps):
            self.maps.append(self.table.handle_map(f"map {index}"))
        elif index < len(self.maps):
            handle = self.expected[rid]
            self.maps[index][handle] = rid
            self.stored[index, handle] = rid

    @rule(rid=consumes(live))
    def release(self, rid: str) -> None:
        handle = self.expected.pop(rid)
        assert self.table.release(handle) == rid
        self.stored = {key: value for key, value in self.stored.items() if key[1] != handle}

    @invariant()
    def agrees(self) -> None:
        handles = list(self.expected.values())
        assert len(set(handles)) == len(handles) == len(self.table)
        assert all(2 <= handle < 7 for handle in handles)
        assert [handle for handle in range(9) if self.table.is_live(handle)] == sorted(handles)
        assert self.table.rids(handles) == list(self.expected)
        assert self.table.handles([f"r{i}" for i in range(8)]) == [self.expected.get(f"r{i}") for i in range(8)]
        held = {(i, handle): value for i, side in enumerate(self.maps) for handle, value in side.items()}
        assert held == self.stored


TestRidTableMachine = RidTableMachine.TestCase
