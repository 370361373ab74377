"""A real `mstar serve` in processes of its own, on a free port, for tests that need the whole server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from support.process_roles import is_front

READY = re.compile(r"mstar is ready: \S+ at (http://\S+)")
HEARTBEAT_S = 0.26
"""Gauges may be this old."""
TEST_ROOT = Path(__file__).parents[1]
MSTAR = (sys.executable, "-m", "mstar.cli")


class Server:
    """A running server. `log` holds what it wrote to standard error."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str) -> None:
        self.process = process
        self.log = log
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60)

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.process.pid

    def children(self) -> dict[int, str]:
        """Child processes of the supervisor: pid → role."""
        return {pid: "front" if is_front(pid) else "worker" for pid in _children_of(self.pid)}

    def worker_pids(self) -> list[int]:
        return [pid for pid, role in self.children().items() if role == "worker"]

    def gauges(self) -> dict[str, float]:
        """Samples of `/metrics`, by name with labels."""
        samples: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples

    def wait_for(self, condition, timeout_s: float, what: str) -> float:
        """Seconds until `condition()` was true.

        Raises:
            AssertionError: it was not within `timeout_s`.
        """
        began = time.monotonic()
        while not condition():
            took = time.monotonic() - began
            assert took < timeout_s, f"{what}: not within {timeout_s} s\n{self.log.read_text()[-2000:]}"
            time.sleep(0.02)
        return time.monotonic() - began

    def is_idle(self) -> bool:
        """Nothing is held for any request, by gauges that are newer than the call."""
        time.sleep(HEARTBEAT_S)
        gauges = self.gauges()
        return all(
            gauges[name] == 0 for name in ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors")
        ) and all(value == 0 for name, value in gauges.items() if 'state="owned"' in name)

    def stop(self, timeout_s: float = 40) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def _children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def start(
    arguments: list[str],
    log: Path,
    *,
    command: Sequence[str] = MSTAR,
    directory: Path | None = None,
    **environment: str,
) -> subprocess.Popen[bytes]:
    """`mstar serve ARGUMENTS`, with `test` on the import path for models that live there. `command`: an `mstar` other
    than this checkout's; `directory`: where it runs."""
    variables = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(TEST_ROOT), **environment}
    with log.open("wb") as stream:
        return subprocess.Popen(
            [*command, "serve", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env=variables,
            cwd=directory,
            start_new_session=True,
        )


@contextmanager
def running(
    arguments: list[str],
    log: Path,
    timeout_s: float = 120,
    *,
    command: Sequence[str] = MSTAR,
    directory: Path | None = None,
    **environment: str,
) -> Iterator[Server]:
    """A server that answers; killed with all that it started when the block ends. The rest as `start`."""
    process = start([*arguments, "--port", "0"], log, command=command, directory=directory, **environment)
    try:
        deadline = time.monotonic() + timeout_s
        while not (match := READY.search(log.read_text())):
            assert process.poll() is None, f"exit code {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"not ready after {timeout_s} s:\n{log.read_text()}"
            time.sleep(0.05)
        yield Server(process, log, match[1])
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
