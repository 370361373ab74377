"""The stacks of all threads of this process, written to its log: where a process that is stuck stands. Any thread."""

from __future__ import annotations

import faulthandler
import logging
import threading

log = logging.getLogger(__name__)
STDERR = 2
"""By number: it works while a lock of the interpreter's own stream is held."""


def dump_stacks(what: str) -> None:
    """Log `what`, with the names of the threads, and behind it their stacks, the innermost call first."""
    names = ", ".join(f"{thread.ident or 0:#018x} {thread.name}" for thread in threading.enumerate())
    log.error("%s; stacks of its threads (%s) follow", what, names)
    faulthandler.dump_traceback(STDERR, all_threads=True)
