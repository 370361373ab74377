"""How a child process is told what it is, started, and tied to its parent.

A child is `python -m mstar.launch.child`; the first line on its standard input is its `ChildSpec` as JSON, and the pipe
stays open for as long as the parent lives. No torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal

import msgspec

from mstar.launch.deployment import DeploymentFacts
from mstar.process_log import LogFormat


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a process of the instance listens; rank -1 is the front."""

    rank: int
    incarnation: int
    address: str


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a child is. `listen_fd`: the bound HTTP socket that the front inherits. `peers`: processes known so far."""

    role: Literal["front", "worker"]
    instance: str
    rank: int
    incarnation: int
    address: str
    supervisor_address: str
    parent_pid: int
    facts: DeploymentFacts
    peers: tuple[PeerAddress, ...] = ()
    listen_fd: int | None = None
    log_level: str = "info"
    log_format: LogFormat = "text"

    @property
    def name(self) -> str:
        """In the log."""
        return "front" if self.role == "front" else f"worker {self.rank}"


class Child:
    """A running child process."""

    def __init__(self, spec: ChildSpec, process: subprocess.Popen[bytes]) -> None:
        self.spec = spec
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        """Readable once the process has ended."""

    @property
    def name(self) -> str:
        return self.spec.name

    def exit_code(self) -> int | None:
        return self.process.poll()

    def how_it_ended(self) -> str:
        """For messages: exit code or signal."""
        code = self.process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def close(self) -> None:
        """Reap a child that has ended."""
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        os.close(self.pidfd)


def start_child(spec: ChildSpec) -> Child:
    """Start a process for `spec`. It writes to this process's standard error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mstar.launch.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=() if spec.listen_fd is None else (spec.listen_fd,),
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it ended already; whoever watches it says how
    return Child(spec, process)
