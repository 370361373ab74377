"""Tensors that cannot be fetched: the file of a sender's arena is missing, or shorter than what was promised in it.

The real reader opens, maps and measures real files; a file that is cut is another one under the same name, because the
sender's own map must stay whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.instance import Instance, shared_memory_of

from mstar.communication.address import peer_name
from mstar.communication.arena import SHM_DIR


@contextmanager
def missing_files(instance: Instance, rank: int) -> Iterator[None]:
    """The files of this rank's arena are gone while the block runs; who had mapped them has to open them anew."""
    moved = [(path, path.with_name(f"hidden-{path.name}")) for path in _files(instance, rank)]
    assert moved, f"worker {rank} has no arena"
    _unmap(instance, rank)
    for path, hidden in moved:
        path.rename(hidden)
    try:
        yield
    finally:
        for path, hidden in moved:
            hidden.rename(path)
        _unmap(instance, rank)


@contextmanager
def truncated_files(instance: Instance, rank: int, num_bytes: int) -> Iterator[None]:
    """As `missing_files`, but the files are there and only so long."""
    with missing_files(instance, rank):
        paths = [path.with_name(path.name.removeprefix("hidden-")) for path in _files(instance, rank)]
        for path in paths:
            path.write_bytes(b"")
            os.truncate(path, num_bytes)
        try:
            yield
        finally:
            for path in paths:
                path.unlink()


def _files(instance: Instance, rank: int) -> list[Path]:
    mark = f"-{peer_name(rank)}-"
    return [SHM_DIR / name for name in shared_memory_of(instance.name) if mark in name]


def _unmap(instance: Instance, rank: int) -> None:
    for other, parts in enumerate(instance.parts):
        reader = parts.inbox._transport._reader
        if other != rank and reader is not None:
            reader.drop_peer(rank)
