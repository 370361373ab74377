"""The log of a process: its format and its level."""

import re
import subprocess
import sys

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
