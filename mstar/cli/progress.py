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
    loaders' progress. Nothing is drawn before the first report, and the display ends with the last running bar: what
    other processes write from then on starts on a line of its own. After the context nothing is drawn."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._finished: set[str] = set()
        self._is_open = False

    def __enter__(self) -> ProgressBars:
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._end()

    def report(self, label: str, done_bytes: int, total_bytes: int | None, /) -> None:
        """Move the bar called `label`; a new label starts a new bar."""
        is_done = total_bytes is not None and done_bytes >= total_bytes
        if not self._is_open or (is_done and label in self._finished and label not in self._bars):
            return
        if self._progress is None:
            self._progress = _new_display(self._console)
            self._progress.start()
        bar = self._bars.get(label)
        if bar is None:
            bar = self._bars[label] = self._progress.add_task(label, total=total_bytes)
        self._progress.update(bar, completed=done_bytes, total=total_bytes)
        if is_done and self._progress.finished:
            self._end()

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._finished |= self._bars.keys()
            self._bars = {}


def _new_display(console: Console) -> Progress:
    return Progress(
        TextColumn(
            "{task.description}", markup=False, table_column=Column(width=26, no_wrap=True, overflow="ellipsis")
        ),
        BarColumn(bar_width=18),
        DownloadColumn(binary_units=True, table_column=Column(no_wrap=True)),
        _TimeLeftColumn(table_column=Column(no_wrap=True)),
        console=console,
    )


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
