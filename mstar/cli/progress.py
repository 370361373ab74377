"""Progress bars on the terminal: downloads and loads, with what is left to wait."""

from __future__ import annotations

from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text


class ProgressBars:
    """One bar per label, on one line of a terminal of 80 columns. Use as a context; `report` has the shape of the
    loaders' progress. Nothing is drawn before the first report."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn(
                "{task.description}", markup=False, table_column=Column(width=26, no_wrap=True, overflow="ellipsis")
            ),
            BarColumn(bar_width=18),
            DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
            _TimeLeftColumn(table_column=Column(no_wrap=True)),
            console=console,
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._progress.stop()

    def report(self, label: str, done_bytes: int, total_bytes: int | None, /) -> None:
        """Move the bar called `label`; a new label starts a new bar."""
        if not self._bars:
            self._progress.start()
        bar = self._bars.get(label)
        if bar is None:
            bar = self._bars[label] = self._progress.add_task(label, total=total_bytes)
        self._progress.update(bar, completed=done_bytes, total=total_bytes)


class _TimeLeftColumn(ProgressColumn):
    """How long it will take, and at the end how long it took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"took {_clock(task.finished_time)}", style="progress.elapsed")
        left_s = None if task.total is None else task.time_remaining
        return Text(f"{_clock(left_s)} left", style="progress.remaining")


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
