"""Which bytes of a fixed range are free: first fit, neighbours joined again when freed. Pure integers, one thread."""

from __future__ import annotations

from bisect import bisect_left


class Extents:
    """Free extents of `[0, size)`. Sizes are the caller's; give multiples of an alignment to keep starts aligned."""

    __slots__ = ("_sizes", "_starts", "_taken", "num_free", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_free = size
        self._starts = [0]
        self._sizes = [size]
        self._taken: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        """Nothing is taken."""
        return self.num_free == self.size

    def take(self, size: int) -> int | None:
        """Start of `size` bytes that are the caller's now, or None where no free extent is long enough."""
        for i, free in enumerate(self._sizes):
            if free >= size:
                start = self._starts[i]
                if free == size:
                    del self._starts[i], self._sizes[i]
                else:
                    self._starts[i] += size
                    self._sizes[i] -= size
                self._taken[start] = size
                self.num_free -= size
                return start
        return None

    def give_back(self, start: int) -> None:
        """Frees what `take` returned.

        Raises:
            KeyError: nothing that was taken begins there.
        """
        size = self._taken.pop(start)
        self.num_free += size
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == start + size:
            size += self._sizes[i]
            del self._starts[i], self._sizes[i]
        if i and self._starts[i - 1] + self._sizes[i - 1] == start:
            self._sizes[i - 1] += size
        else:
            self._starts.insert(i, start)
            self._sizes.insert(i, size)

    def free_extents(self) -> list[tuple[int, int]]:
        """(start, size), by start."""
        return list(zip(self._starts, self._sizes, strict=True))
