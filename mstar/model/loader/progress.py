"""The one shape of progress reports of downloads and loads. Pure Python, any process; drawing bars is the command
line's business."""

from collections.abc import Callable
from typing import Protocol


class ByteProgress(Protocol):
    """Called from the thread that does the work (for hub downloads: from one of its threads), often; must not block.

    `label` names the phase, `done_bytes` counts within it, `total_bytes` is None while the end is not known. A phase
    ends when another label appears or `done_bytes` reaches `total_bytes`.
    """

    def __call__(self, label: str, done_bytes: int, total_bytes: int | None, /) -> None: ...


DownloadProgress = ByteProgress
LoadProgress = ByteProgress

CHUNK_BYTES = 1 << 20


def counted(label: str, total_bytes: int | None, progress: ByteProgress | None) -> Callable[[int], None]:
    """An `add(num_bytes)` that reports the running sum under `label`, beginning with a report of zero."""
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(label, done, total_bytes)

    add(0)
    return add
