"""The front as a process of its own, over real sockets; the test plays supervisor and worker."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx
from support.fake_worker import FakeWorker, Script
from support.running_front import build_spec

from mstar.api_server.server import run_front
from mstar.communication.address import FRONT_RANK, peer_name
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import Message, PeerUp, Shutdown, ToSupervisor
from mstar.communication.wire import decode_to_supervisor, decode_to_worker
from mstar.config.schema import ServerConfig
from mstar.process_log import configure_log

T = TypeVar("T")


def main() -> int:
    """The child: arguments are a folder, the listener's descriptor, a limit on open files, and server settings."""
    folder, fd, limit, settings = sys.argv[1:]
    if int(limit):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(int(limit), 64), int(limit)))
    path = Path(folder)
    spec = build_spec(
        path / "tokenizer",
        address=f"ipc://{path}/front",
        supervisor_address=f"ipc://{path}/supervisor",
        server=ServerConfig(**json.loads(settings)),
    )
    configure_log("front", "info", spec.server.log_format)
    return run_front(spec, socket.socket(fileno=int(fd)))


class FrontChild:
    """Use as a context: the process is up and its worker ready inside, unless `with_worker` is false. `send_bytes`:
    what the kernel keeps of what a client has not read (0: as much as it likes)."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        *,
        open_files: int = 0,
        send_bytes: int = 0,
        with_worker: bool = True,
        **server: Any,
    ):
        self._send_bytes = send_bytes
        self._folder = folder
        self._script = script
        self._with_worker = with_worker
        self._arguments = [str(open_files), json.dumps(server)]
        self._log = folder / "log"

    def log(self) -> str:
        """What the process has written to standard error."""
        return self._log.read_bytes().decode()

    def __enter__(self) -> "FrontChild":
        listener = socket.create_server(("127.0.0.1", 0))
        if self._send_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_bytes)
        self.port = listener.getsockname()[1]
        self.supervisor: ZmqBus[ToSupervisor] = ZmqBus(f"ipc://{self._folder}/supervisor", decode_to_supervisor)
        self.supervisor.connect("front", f"ipc://{self._folder}/front")
        command = [sys.executable, "-c", "import sys; from support.front_child import main; sys.exit(main())"]
        fd = listener.fileno()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, str(self._folder), str(fd), *self._arguments],
                pass_fds=(fd,),
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        listener.close()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            if self._with_worker:
                self.start_worker()
                self.wait_until(lambda: self.http.get("/ready").status_code == 200, timeout_s=60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        if self._with_worker and hasattr(self, "worker"):
            self.worker.bus.close()
        self.supervisor.close()

    def start_worker(self) -> None:
        def start() -> FakeWorker:
            bus = ZmqBus(f"ipc://{self._folder}/w0", decode_to_worker)
            bus.connect(peer_name(FRONT_RANK), f"ipc://{self._folder}/front")
            worker = FakeWorker(bus, self._script)
            worker.run_on(self._loop)
            return worker

        self.worker = self.call(start)
        self.say(PeerUp(0, 0, f"ipc://{self._folder}/w0"))

    def say(self, *messages: Message) -> None:
        """As the supervisor."""
        self.supervisor.send("front", messages)

    def shut_down(self) -> None:
        self.say(Shutdown())

    def call(self, function: Callable[[], T]) -> T:
        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except httpx.TransportError:
                if self.process.poll() is not None:
                    break
            time.sleep(0.02)
        raise AssertionError(f"it did not become true; exit code {self.process.poll()}; log:\n{self.log()}")

    def cpu_s(self) -> float:
        """CPU time of the process, all threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]
