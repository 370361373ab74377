"""Progress bars on the terminal: downloads and loads, with what is left to wait."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBars:
    """One bar per label. Use as a context; `report` has the shape of the loaders' progress."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=28),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def report(self, label: str, done_bytes: int, total_bytes: int | None, /) -> None:
        """Move the bar called `label`; a new label starts a new bar."""
        bar = self._bars.get(label)
        if bar is None:
            bar = self._bars[label] = self._progress.add_task(label, total=total_bytes)
        self._progress.update(bar, completed=done_bytes, total=total_bytes)
