"""`mstar serve`: port first, then checkpoint, then processes; the ready line last."""

from __future__ import annotations

import errno
import json
import logging
import shlex
import socket
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mstar import envs
from mstar.cli.errors import UNUSABLE, show_error
from mstar.cli.progress import ProgressBars
from mstar.cli.targets import config_for, server_for
from mstar.communication.messages import LoadProgress, MemoryPlan
from mstar.config.api_keys import accepted_keys
from mstar.config.schema import ServerConfig
from mstar.launch.deployment import Deployment, resolve_deployment
from mstar.launch.supervisor import StartError, Supervisor, Watchers
from mstar.process_log import configure_log

logger = logging.getLogger(__name__)
INTERRUPTED = 130
NO_LISTENER = (*UNUSABLE, OSError)


def serve_command(target: str, overrides: Sequence[str]) -> int:
    """Exit code: 0 after a drain, 1 for a failed start or a forced end, 2 for a configuration, checkpoint or port of no
    use."""
    console = Console(stderr=True)
    for name in envs.unknown_variables():
        console.print(f"[yellow]{name} is not a variable of this version[/yellow]")
    try:
        server = server_for(target, overrides)
        configure_log("mstar", envs.LOG_LEVEL.get(), server.log_format)
        asks_for_key = bool(accepted_keys(server).keys)
        listener = bind(server)
    except NO_LISTENER as error:
        show_error(console, error)
        return 2
    try:
        with ProgressBars(console if server.log_format == "text" else Console(quiet=True)) as bars:
            config = config_for(target, overrides, progress=bars.report)
            deployment = resolve_deployment(config, cache_dir=envs.CACHE_DIR.get(), progress=bars.report)
            deployment.compile(deployment.model())

            def loaded(message: LoadProgress) -> None:
                bars.report(f"worker {message.rank}: {message.label}", message.done, message.total or None)

            def planned(message: MemoryPlan) -> None:
                if server.log_format == "json":
                    log_memory_plan(message)
                else:
                    console.print(memory_table(message))

            supervisor = Supervisor(deployment, listener, Watchers(plan=planned, progress=loaded))
            supervisor.start()
    except KeyboardInterrupt:
        return INTERRUPTED
    except UNUSABLE as error:
        show_error(console, error)
        return 2
    except (StartError, OSError) as error:
        show_error(console, error)
        return 1
    host, port = listener.getsockname()[:2]
    text = ready_text(deployment, host, port, asks_for_key=asks_for_key)
    if server.log_format == "json":
        logger.info("%s", text.splitlines()[-1])
    else:
        console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)
    return supervisor.run()


def bind(server: ServerConfig) -> socket.socket:
    """The listening socket, before anything is loaded.

    Raises:
        OSError: the address cannot be used; the message says what to change.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(
            f"cannot listen at {server.host}:{server.port}: {error.strerror}; {_what_to_change(error)}"
        ) from error
    return listener


def _what_to_change(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "end the process that has the port, or choose another with --port"
    if error.errno == errno.EACCES:
        return "choose a port from 1024 on with --port"
    return "this machine has no such address; --host 127.0.0.1 is for this machine alone, 0.0.0.0 for all its addresses"


def log_memory_plan(plan: MemoryPlan) -> None:
    """The same as a line of the log."""
    rows = [{"name": row.name, "detail": row.detail, "bytes": row.num_bytes} for row in plan.rows]
    total = sum(row.num_bytes for row in plan.rows)
    fields = {"rank": plan.rank, "rows": rows, "bytes": total}
    logger.info("memory plan of worker %d: %.1f MiB", plan.rank, total / 2**20, extra={"fields": fields})


def memory_table(plan: MemoryPlan) -> Table:
    """What a worker is going to allocate."""
    table = Table(title=f"Memory plan of worker {plan.rank}", title_justify="left", show_footer=True)
    total = sum(row.num_bytes for row in plan.rows)
    table.add_column("what", "total")
    table.add_column("detail")
    table.add_column("MiB", f"{total / 2**20:,.1f}", justify="right")
    for row in plan.rows:
        table.add_row(Text(row.name), Text(row.detail), f"{row.num_bytes / 2**20:,.1f}")
    return table


def ready_text(deployment: Deployment, host: str, port: int, *, asks_for_key: bool) -> str:
    """The ready line, and a request to try, which ends soon with a model that does not end by itself too."""
    at = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://[{at}]:{port}" if ":" in at else f"http://{at}:{port}"
    name = deployment.facts.served_names[0]
    key = " -H 'Authorization: Bearer YOUR_KEY'" if asks_for_key else ""
    message = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": name, "temperature": 0, "max_tokens": 64, "messages": [message]}, ensure_ascii=False)
    return (
        f"In a browser: {url}/\n"
        "Try it:\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n"
        f"    -d {shlex.quote(body)}\n"
        f"mstar is ready: {name} at {url}"
    )
