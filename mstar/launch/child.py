"""Entry of a child process: reads its spec, ties itself to its parent and becomes the front or a worker."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys

import msgspec

from mstar.launch.children import ChildSpec
from mstar.launch.lifeline import hold_lifeline
from mstar.process_log import configure_log

log = logging.getLogger(__name__)


def main() -> int:
    """Run until told to shut down; the process's exit code."""
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChildSpec)
    hold_lifeline(spec.parent_pid, sys.stdin.buffer)
    # The terminal's interrupt and a service manager's signal to the group reach the supervisor, which decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()  # a crash of native code leaves the stacks of all threads in the log
    configure_log(spec.name, spec.log_level, spec.log_format)
    if spec.role == "front":
        # Imported here: a worker does not need the web framework, and the front must stay free of torch.
        from mstar.launch.front_process import run_front_process as run  # noqa: PLC0415
    else:
        from mstar.launch.worker_process import run_worker_process as run  # noqa: PLC0415
    try:
        run(spec)
    except Exception:
        log.exception("%s ends", spec.name)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
