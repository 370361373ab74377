"""What `mstar serve` shows: progress bars, the memory plan, the ready line with a request to try."""

import json
import re
import shlex
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console

from mstar.cli.progress import ProgressBars
from mstar.cli.serve import memory_table, ready_text
from mstar.communication.messages import MemoryPlan, PlanRow

MIB = 2**20
GIB = 2**30


class Screen:
    """80 columns and a clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.file = StringIO()
        self.console = Console(file=self.file, width=80, get_time=lambda: self.now)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_a_bar_shows_how_far_it_is_and_what_is_left(screen: Screen):
    with ProgressBars(screen.console) as bars:
        for screen.now, done in ((0.0, 0), (10.0, 25), (20.0, 50)):
            bars.report("worker 0: loading weights", done * MIB, 100 * MIB)
    (line,) = screen.lines
    assert re.fullmatch(r"worker 0: loading weights +[━╸╺ ]+ +50\.0/100\.0 MiB +0:00:20 left *", line)


def test_a_finished_bar_shows_how_long_it_took(screen: Screen):
    with ProgressBars(screen.console) as bars:
        for screen.now, done in ((0.0, 0), (4.0, 1), (75.0, 2)):
            bars.report("loading", done * GIB, 2 * GIB)
    (line,) = screen.lines
    assert re.search(r" 2\.0/2\.0 GiB +took 0:01:15 *$", line)


def test_every_phase_has_a_line_of_its_own(screen: Screen):
    with ProgressBars(screen.console) as bars:
        bars.report("fetching a-file-with-a-very-long-name[1].whl", 5 * MIB, None)
        bars.report("unpacking", 0, 1023 * MIB)
        bars.report("fetching a-file-with-a-very-long-name[1].whl", 93 * MIB, 93 * MIB)
        bars.report("unpacking", 512 * MIB, 1023 * MIB)
        bars.report("loading", 3 * MIB, None)
    first, second, third = screen.lines
    assert first.startswith("fetching a-file-with-a-ve…") and "93.0/93.0 MiB" in first
    assert second.startswith("unpacking ") and "512.0/1,023.0 MiB" in second
    assert third.startswith("loading ") and "3.0/? MiB" in third and "-:--:-- left" in third


def test_the_display_ends_with_the_last_running_bar(screen: Screen):
    """What another process writes to the terminal then must not be glued to a bar."""
    with ProgressBars(screen.console) as bars:
        bars.report("worker 0", 0, 5)
        bars.report("worker 1", 0, 5)
        bars.report("worker 0", 5, 5)
        assert screen.lines == [], "worker 1 still loads"
        bars.report("worker 1", 5, 5)
        assert [line.split()[:2] for line in screen.lines] == [["worker", "0"], ["worker", "1"]]
        assert screen.file.getvalue().endswith("\n")
        bars.report("worker 1", 5, 5)
        bars.report("worker 2", 1, 5)
    bars.report("worker 1", 1, 5)
    bars.report("worker 1", 5, 5)
    assert [line.split()[:2] for line in screen.lines] == [["worker", str(i)] for i in range(3)]


def test_nothing_is_drawn_when_nothing_was_reported(screen: Screen):
    with ProgressBars(screen.console):
        pass
    assert screen.lines == []


def test_the_memory_plan_names_every_part_and_adds_them_up(screen: Screen):
    rows = (PlanRow("weights", "135 M parameters in bfloat16", 3 * MIB // 2), PlanRow("kv", "a [/b] c", 1536 * MIB))
    screen.console.print(memory_table(MemoryPlan(rank=3, rows=rows)))
    title, *lines = screen.lines
    assert title.strip() == "Memory plan of worker 3"
    cells = [[cell.strip() for cell in line[1:-1].split(line[0])] for line in lines if line[0] in "│┃"]
    assert cells == [
        ["what", "detail", "MiB"],
        ["weights", "135 M parameters in bfloat16", "1.5"],
        ["kv", "a [/b] c", "1,536.0"],
        ["total", "", "1,537.5"],
    ]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
    ],
)
@pytest.mark.parametrize("name", ["smollm2", 'it\'s "my" model $HOME'])
@pytest.mark.parametrize("asks_for_key", [False, True])
def test_the_ready_line_is_last_and_its_request_is_one_for_a_shell(host: str, url: str, name: str, asks_for_key: bool):
    facts = SimpleNamespace(served_names=(name, "other"))
    text = ready_text(SimpleNamespace(facts=facts), host, 8000, asks_for_key=asks_for_key)
    page, first, *request, last = text.splitlines()
    assert (page, first) == (f"In a browser: {url}/", "Try it:")
    assert last == f"mstar is ready: {name} at {url}"
    program, target, *options = shlex.split("\n".join(request).replace("\\\n", ""))
    assert (program, target) == ("curl", f"{url}/v1/chat/completions")
    headers = ["-H", "Content-Type: application/json"]
    if asks_for_key:
        headers += ["-H", "Authorization: Bearer YOUR_KEY"]
    assert options[:-2] == headers
    assert options[-2] == "-d"
    body = json.loads(options[-1])
    assert body["model"] == name
    assert 0 < body["max_tokens"] <= 128, "a model with random weights does not end by itself"
    assert body["messages"] == [{"role": "user", "content": "What is the capital of France?"}]
