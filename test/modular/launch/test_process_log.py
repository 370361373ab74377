"""The log of a process: its format and its level, as text and as JSON, and the request that a line is about."""

import asyncio
import json
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

from mstar.process_log import REQUEST, JsonFormatter, TextFormatter

CODE = """
import logging, sys
from mstar.process_log import configure_log
configure_log(*sys.argv[1:])
for name in ("mstar.any", "httpx"):
    logging.getLogger(name).info("a line of %s", name)
logging.getLogger("mstar.any").warning("a warning")
"""


def _lines(*arguments: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, timeout=30)
    assert (run.returncode, run.stdout) == (0, "")
    return run.stderr.splitlines()


def test_lines_name_time_level_and_process():
    first, second = _lines("worker 3", "info")
    assert re.fullmatch(r"\d\d:\d\d:\d\d I worker 3: a line of mstar\.any", first)
    assert re.fullmatch(r"\d\d:\d\d:\d\d W worker 3: a warning", second)


def test_the_level_is_the_one_asked_for():
    assert [line.split()[1] for line in _lines("mstar", "warning")] == ["W"]
    assert _lines("mstar", "error") == []


def test_a_line_is_an_object_in_json():
    first, second = map(json.loads, _lines("worker 3", "info", "json"))
    assert first == {
        "time": first["time"],
        "level": "info",
        "process": "worker 3",
        "logger": "mstar.any",
        "message": "a line of mstar.any",
    }
    assert second["level"] == "warning"
    told = datetime.fromisoformat(first["time"])
    assert told.tzinfo is not None and abs(datetime.now(UTC) - told) < timedelta(minutes=1)


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@pytest.fixture
def logger() -> logging.Logger:
    return logging.Logger("mstar.test")


EVIL = "a\r\n{}\x1b[31m\u2028é"


def test_what_is_unseen_is_escaped_in_json_too(logger: logging.Logger):
    lines = Lines(JsonFormatter("front"))
    logger.addHandler(lines)
    try:
        raise ValueError(EVIL)
    except ValueError:
        logger.exception("failed for %s", EVIL, extra={"fields": {"status": 500, "odd": object}})
    (line,) = lines.texts
    assert line.isascii() and line.isprintable()
    told = json.loads(line)
    assert told["message"] == f"failed for {EVIL}" and told["status"] == 500
    assert "Traceback" in told["exception"] and EVIL in told["exception"]


def test_lines_carry_the_id_of_the_request_of_their_task(logger: logging.Logger):
    text, objects = Lines(TextFormatter("front")), Lines(JsonFormatter("front"))
    logger.addHandler(text)
    logger.addHandler(objects)

    async def part_of_it() -> None:
        logger.warning("deep inside")

    async def serve(request_id: str) -> None:
        REQUEST.set({"request_id": request_id})
        await asyncio.sleep(0)
        logger.warning("%s is named", request_id)
        await asyncio.create_task(part_of_it())

    async def both() -> None:
        await asyncio.gather(serve("req-1"), serve("req-2"))
        logger.warning("of none")

    asyncio.run(both())
    told = [(line.get("request_id"), line["message"]) for line in map(json.loads, objects.texts)]
    assert sorted(told[:-1], key=str) == [
        ("req-1", "deep inside"),
        ("req-1", "req-1 is named"),
        ("req-2", "deep inside"),
        ("req-2", "req-2 is named"),
    ]
    assert told[-1] == (None, "of none")
    assert {line.partition(": ")[2] for line in text.texts} == {
        "deep inside [req-1]",
        "req-1 is named",
        "deep inside [req-2]",
        "req-2 is named",
        "of none",
    }
