"""`TriedCompiler`: compiles a grammar in a process of its own first, which can be killed, and then in this one.

One thread of a worker uses it, and waits. Compiling twice costs less than handing over what was compiled: the JSON
that xgrammar makes of a compiled grammar takes longer to write and to read than most grammars to compile, and up to a
hundred times their memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence, Set
from multiprocessing import Pipe
from pathlib import Path

import msgspec

from mstar import envs
from mstar.platforms import host
from mstar.worker.grammars.compiler import CompiledGrammar, GrammarCompiler
from mstar.worker.grammars.constraints import CompilerLostError, GrammarError, HopelessGrammarError
from mstar.worker.grammars.trial_messages import Ready, Refused, Reply, Trial, TrialSetup, decode_reply, encode

log = logging.getLogger(__name__)

MODULE = "mstar.worker.grammars.trial_process"
COMPILE_TIMEOUT_S = 20.0
START_TIMEOUT_S = 120.0
GONE_S = 5.0
"""A process whose pipe is closed has ended by then."""
MAX_COMPILE_BYTES = 2 << 30
LEAST_CPU_SHARE = 0.5
"""Of the time that a grammar may take: a process that has run for less has stood still, which is no fault of the
grammar."""
LOST = "the process that compiles grammars has ended; try again later"
STALLED = "the process that compiles grammars had too little processor time; try again later"
CRASHES = frozenset(-number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV))
"""Exit codes of what native code does to itself."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


class _Process:
    """A running process and the pipe to it. `is_ready`: it has read its tokenizer."""

    def __init__(self) -> None:
        """Raises `OSError` where nothing can be started."""
        self.is_ready = False
        self.pipe, theirs = Pipe()
        search_path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=envs.child_environment({**ONE_THREAD, "PYTHONPATH": search_path}),
            )

    def ask(self, order: TrialSetup | Trial, timeout_s: float) -> Reply:
        """Raises `TimeoutError`, or when it is gone `EOFError`, or `ConnectionError` if it has not read the order: the
        system resets a socket that is closed with something unread."""
        self.pipe.send_bytes(encode(order))
        if not self.pipe.poll(timeout_s):
            raise TimeoutError
        return decode_reply(self.pipe.recv_bytes())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def exit_code(self) -> int:
        """Of a process that is gone."""
        try:
            return self._process.wait(GONE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> None:
        self._process.kill()
        self._process.wait()
        self.pipe.close()


class TriedCompiler:
    """The process starts at once, and is replaced whenever it ends.

    `prepare`, `compile` and `release` belong to the thread that has made this, which has to outlive the process.
    """

    def __init__(self, setup: TrialSetup, *, timeout_s: float = COMPILE_TIMEOUT_S) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._compiler: GrammarCompiler | None = None
        self._refusal = ""
        """Why there will never be a grammar."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._process: _Process | None = None
        self._start()

    @property
    def end_ids(self) -> Sequence[int]:
        return () if self._compiler is None else self._compiler.end_ids

    @property
    def textless(self) -> Set[int]:
        return frozenset() if self._compiler is None else self._compiler.textless

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._process is None else self._process.pid

    def prepare(self) -> None:
        """Returns when it is ready to compile, or as far as it gets."""
        with contextlib.suppress(GrammarError, CompilerLostError):
            self._ready()

    def compile(self, form: str, behind: str) -> CompiledGrammar:
        """`form` and `behind` as in `mstar.communication.messages.Grammar`.

        Raises:
            GrammarError: it is no grammar, or none that can be compiled; the message is meant for the client.
            CompilerLostError: it may work the next time.
        """
        for _ in range(2):
            process, compiler = self._ready()
            began_s = host.process_cpu_s(process.pid)
            try:
                reply = process.ask(Trial(form, behind), self._timeout_s)
                break
            except TimeoutError as error:
                raise self._given_up(host.process_cpu_s(process.pid) - began_s) from error
            except EOFError as error:
                raise self._ended(process) from error
            except ConnectionError:
                log.warning("the process that compiles grammars has ended with %d before it began", process.exit_code())
        else:
            raise CompilerLostError(LOST)
        if isinstance(reply, Refused):
            raise GrammarError(reply.message)
        return compiler.compile(form, behind)

    def close(self) -> None:
        """From any thread: what is being compiled is given up, and nothing is started any more."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def release(self) -> None:
        """The last call."""
        self.close()
        if self._process is not None:
            self._process.reap()
            self._process = None

    def _ready(self) -> tuple[_Process, GrammarCompiler]:
        """The process and the compiler of this one, once both are there. Raises as `compile`."""
        if self._refusal:
            raise GrammarError(self._refusal)
        process = self._process
        if process is None or process.has_ended:
            process = self._start()
        if process is None:
            raise CompilerLostError(LOST)
        if not process.is_ready:
            try:
                reply = process.ask(self._setup, START_TIMEOUT_S)
            except (TimeoutError, EOFError, ConnectionError) as error:
                raise self._ended(process) from error
            if isinstance(reply, Refused):
                self._refusal = reply.message
                raise GrammarError(self._refusal)
            assert isinstance(reply, Ready)
            if reply.vocabulary is not None:
                self._compiler = GrammarCompiler(reply.vocabulary, self._setup.num_threads)
                self._setup = msgspec.structs.replace(self._setup, vocabulary=reply.vocabulary)
            process.is_ready = True
        assert self._compiler is not None
        return process, self._compiler

    def _start(self) -> _Process | None:
        """Another process, in the place of one that there may be. None: there is none for now."""
        with self._lock:
            if self._process is not None:
                self._process.reap()
                self._process = None
            if not self._is_closed:
                try:
                    self._process = _Process()
                except OSError:
                    log.exception("the process that compiles grammars could not be started")
            return self._process

    def _given_up(self, cpu_s: float) -> Exception:
        """What it means for a grammar that its time is over, of which the process has run for `cpu_s`."""
        log.warning("a grammar is not compiled after %g s, %.2f s of them on a processor", self._timeout_s, cpu_s)
        self._start()
        if cpu_s < LEAST_CPU_SHARE * self._timeout_s:
            return CompilerLostError(STALLED)
        return HopelessGrammarError(f"the grammar is not compiled after {self._timeout_s:g} s; ask for a simpler one")

    def _ended(self, process: _Process) -> Exception:
        """What it means for a grammar that the process is gone, or does not start."""
        was_ready, code = process.is_ready, process.exit_code()
        if not self._is_closed:
            log.warning("the process that compiles grammars has ended with %d", code)
        self._start()
        if was_ready and code in CRASHES:
            return HopelessGrammarError("the grammar cannot be compiled; ask for a simpler one")
        if was_ready and code > 0:
            return RuntimeError("an error of its own has ended the process that compiles grammars")
        return CompilerLostError(LOST)
