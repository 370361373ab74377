"""The front's side of the preprocess pool: processes that run `Model.process_prompt`, one job each at a time.

Front loop only. A process that dies, overruns or cannot be understood fails the one job that it had and is replaced;
the others go on. One that goes on working for a client that left is replaced too. A job is encoded by the request that
asks for it, so one that cannot be sent is that request's alone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from mstar import envs
from mstar.communication.host_tensors import from_numpy, to_numpy
from mstar.conductor.events import Failure, RefusedError
from mstar.conductor.preprocess_messages import (
    LENGTH,
    MediaFile,
    MessageContent,
    ModelToLoad,
    PromptDone,
    PromptFailed,
    PromptJob,
    PromptRefused,
    Reply,
    Started,
    decode_reply,
    framed,
)
from mstar.conductor.request import PromptInput
from mstar.model.base import ChatMessage, ModelCard, ModelSetup, PreparedPrompt
from mstar.platforms import host
from mstar.process_log import LogFormat

logger = logging.getLogger(__name__)
JOB_TIMEOUT_S = 60.0
LEAST_CPU_SHARE = 0.5
"""Of the time that a job may take: a process that has run for less has stood still, which is no fault of the prompt."""
RETRY_STALLED_S = 1
GIVEN_UP_S = 1.0
"""A job whose client left may still take so long: about what another process costs."""
START_TIMEOUT_S = 120.0
CORES_PER_PROCESS = 4
MOST_AUTO_PROCESSES = 4
ONE_THREAD: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class PreprocessError(RuntimeError):
    """A preprocess process could not be started."""


class _Process:
    """One process and the socket to it. `is_in_step`: what it says next answers what it is asked next."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self.process = process
        self.is_in_step = True
        self._channel = channel
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, frame: bytes) -> Reply:
        """The reply to an order, given as `framed` makes it.

        Raises:
            EOFError, ConnectionError: the process is gone.
            msgspec.DecodeError: what it says is no reply.
        """
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(sock=self._channel)
        self.is_in_step = False
        self._writer.write(frame)
        await self._writer.drain()
        head = await self._reader.readexactly(LENGTH.size)
        reply = decode_reply(await self._reader.readexactly(LENGTH.unpack(head)[0]))
        self.is_in_step = True
        return reply

    def end(self) -> None:
        """Kills and reaps it."""
        self.process.kill()
        self.process.wait()
        if self._writer is not None:
            self._writer.close()
        else:
            self._channel.close()


def auto_processes() -> int:
    """One for every four cores of this machine, up to four: prompts that arrive at once wait for each other less, and
    the other processes keep theirs."""
    return max(1, min(MOST_AUTO_PROCESSES, host.num_cores() // CORES_PER_PROCESS))


class PreprocessPool:
    """`num_processes` processes that serve a queue of jobs."""

    def __init__(
        self,
        card: ModelCard,
        setup: ModelSetup,
        num_processes: int,
        *,
        job_timeout_s: float = JOB_TIMEOUT_S,
        log_format: LogFormat = "text",
    ) -> None:
        self.num_replaced = 0
        self._order = framed(
            ModelToLoad(
                model=card.model,
                config=msgspec.json.encode(setup.config),
                tokenizer_dir=None if setup.tokenizer_dir is None else str(setup.tokenizer_dir),
                max_seq_len=setup.max_seq_len,
                max_step_patches=setup.max_step_patches,
                max_media_pixels=setup.max_media_pixels,
            )
        )
        self._num_processes = num_processes
        self._log_format: LogFormat = log_format
        self._job_timeout_s = job_timeout_s
        self._jobs: asyncio.Queue[tuple[bytes, asyncio.Future[Reply | None]]] = asyncio.Queue()
        self._servers: dict[int, asyncio.Task[None]] = {}
        self._processes: list[_Process] = []

    async def start(self) -> None:
        """Returns when every process has built the model.

        Raises:
            PreprocessError: one could not; its own error is on stderr.
        """
        self._processes = [_spawn(self._log_format) for _ in range(self._num_processes)]
        try:
            await asyncio.gather(*(self._greet(process) for process in self._processes))
        except PreprocessError:
            self.close()
            raise
        for index in range(self._num_processes):
            self._start_server(index)

    async def prepare(self, prompt: PromptInput, parameters: bytes, max_tokens: int) -> PreparedPrompt:
        """What the model makes of a prompt.

        Raises:
            RefusedError: 400, the prompt is at fault; 500, the model's code or its process failed; or 503, it has got
                too little processor time.
        """
        job = PromptJob(
            kind=prompt.kind,
            messages=tuple(_content(message) for message in prompt.messages),
            text=prompt.text,
            token_ids=prompt.token_ids,
            inputs={name: from_numpy(array) for name, array in prompt.inputs.items()},
            parameters=parameters,
            max_tokens=max_tokens,
            continue_final_message=prompt.continue_final_message,
            tools=msgspec.json.encode(prompt.tools),
            template_variables=msgspec.json.encode(prompt.template_variables),
        )
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait((framed(job), answer))
        match await answer:
            case PromptDone(token_ids=ids, inputs=inputs, step_metadata=metadata, media=media, opens_reasoning=opens):
                arrays = {name: to_numpy(tensor) for name, tensor in inputs.items()}
                return PreparedPrompt(None if ids is None else to_numpy(ids), arrays, metadata, media, opens)
            case PromptRefused(message=message, field=field, code=code):
                raise RefusedError(Failure(400, code, message, param=field or prompt.sent_as))
            case None:
                message = "The process that prepares prompts had too little processor time. Try again later."
                raise RefusedError(Failure(503, "preprocess_stalled", message, retry_after_s=RETRY_STALLED_S))
            case PromptFailed(message=reason):
                pass
            case other:
                reason = f"its process said {type(other).__name__}"
        raise RefusedError(Failure(500, "preprocess_failed", f"The prompt could not be prepared: {reason}."))

    def close(self) -> None:
        servers = list(self._servers.values())
        self._servers.clear()
        for server in servers:
            server.cancel()
        for process in self._processes:
            process.end()
        self._processes.clear()

    async def _greet(self, process: _Process) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                reply = await process.ask(self._order)
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise PreprocessError(f"a preprocess process did not start: {error!r}") from error
        if not isinstance(reply, Started):
            raise PreprocessError(f"a preprocess process started with {type(reply).__name__}")

    def _start_server(self, index: int) -> None:
        server = asyncio.create_task(self._serve(index))
        self._servers[index] = server
        server.add_done_callback(partial(self._server_ended, index))

    def _server_ended(self, index: int, server: asyncio.Task[None]) -> None:
        """Jobs are served until the pool is closed, whatever ended the task that did."""
        if self._servers.get(index) is server:
            reason = None if server.cancelled() else server.exception()
            logger.error("the server of preprocess process %d has ended (%r); another one starts", index, reason)
            self._start_server(index)

    async def _serve(self, index: int) -> None:
        while True:
            if not self._processes[index].is_in_step:
                await self._replace(index)
            frame, answer = await self._jobs.get()
            if answer.done():  # its client left while it waited
                continue
            reply: Reply | None = PromptFailed("the job was given up")
            try:
                reply = await self._run(self._processes[index], frame, answer)
            except Exception as error:
                logger.exception("a job of a preprocess process failed")
                reply = PromptFailed(f"asking for it raised {type(error).__name__}")
            finally:
                if not answer.done():
                    answer.set_result(reply)

    async def _run(self, process: _Process, frame: bytes, answer: asyncio.Future[Reply | None]) -> Reply | None:
        """None: the process has stood still."""
        asking = asyncio.ensure_future(process.ask(frame))
        try:
            began_s = host.process_cpu_s(process.process.pid)
            await asyncio.wait({asking, answer}, timeout=self._job_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():  # its client left
                await asyncio.wait({asking}, timeout=GIVEN_UP_S)
            if asking.done():
                return asking.result()
            if host.process_cpu_s(process.process.pid) - began_s < LEAST_CPU_SHARE * self._job_timeout_s:
                return None
            return PromptRefused(f"preparing the prompt took longer than {self._job_timeout_s:g} s")
        except (EOFError, OSError):
            return PromptFailed("its preprocess process ended")
        finally:
            asking.cancel()

    async def _replace(self, index: int) -> None:
        """A replacement that does not start is tried again with the next job."""
        logger.error("replacing preprocess process %d", self._processes[index].process.pid)
        self.num_replaced += 1
        self._processes[index].end()
        try:
            self._processes[index] = _spawn(self._log_format)
            await self._greet(self._processes[index])
        except (PreprocessError, OSError) as error:
            logger.error("%s", error)


def _spawn(log_format: LogFormat) -> _Process:
    """The child finds the modules that this process finds: a model may live outside this package."""
    search_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
    command = [sys.executable, "-P", "-m", "mstar.conductor.preprocess_worker"]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid()), log_format],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=envs.child_environment({**ONE_THREAD, "PYTHONPATH": search_path}),
        )
    return _Process(process, ours)


def _content(message: ChatMessage) -> MessageContent:
    content = message.content
    if not isinstance(content, str):
        content = tuple(part if isinstance(part, str) else MediaFile(part.kind, part.data) for part in content)
    return MessageContent(message.role, content, msgspec.json.encode(message.extra))
