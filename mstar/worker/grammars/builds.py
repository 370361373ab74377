"""`GrammarBuilds`: has grammars compiled beside the loop, and keeps what was made, up to a number of bytes.

Up to two threads wait for what compiles them, so one that takes long stops nobody else's. Everything but the threads'
own loop runs on the worker's loop thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple, Protocol

from mstar.communication.messages import Grammar
from mstar.communication.wakeup import Wakeup
from mstar.worker.grammars.constraints import CompilerLostError, GrammarError, HopelessGrammarError, Matcher

log = logging.getLogger(__name__)

MAX_THREADS = 2
MAX_KEPT_BYTES = 256 << 20
MAX_REMEMBERED = 256
"""Grammars that are refused at once when they come again."""


class Compiled(Protocol):
    """A grammar that texts can be followed with."""

    @property
    def num_bytes(self) -> int: ...
    def matcher(self, end_ids: Sequence[int]) -> Matcher: ...


class Compiler(Protocol):
    """See `mstar.worker.grammars.trials.TriedCompiler`. `end_ids`, `textless`: once a grammar is compiled."""

    @property
    def end_ids(self) -> Sequence[int]: ...
    @property
    def textless(self) -> Set[int]: ...
    def prepare(self) -> None: ...
    def compile(self, form: str, behind: str) -> Compiled: ...
    def close(self) -> None: ...
    def release(self) -> None: ...


class GrammarKey(NamedTuple):
    """What a compiled grammar depends on, besides the tokenizer."""

    form: str
    behind: str

    @classmethod
    def of(cls, grammar: Grammar) -> GrammarKey:
        return cls(grammar.format, grammar.behind)


class Built(NamedTuple):
    """One grammar is compiled, or never will be: then `error` says why, and `code` is the status that fits.
    `is_remembered`: so it is refused at once when it comes again."""

    key: GrammarKey
    compiled: Compiled | None
    error: str = ""
    code: int = 400
    is_remembered: bool = False


class _Job:
    """`is_taken`: by a thread. `is_dropped`: no thread shall take it. Guarded by the lock of the builds."""

    __slots__ = ("is_dropped", "is_taken", "key")

    def __init__(self, key: GrammarKey) -> None:
        self.key = key
        self.is_taken = self.is_dropped = False


class GrammarBuilds:
    """`load` makes a compiler for each thread, on it."""

    def __init__(self, load: Callable[[], Compiler], *, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._load = load
        self._max_kept_bytes = max_kept_bytes
        self.compiler: Compiler | None = None
        """One that has compiled."""
        self.wakeup = Wakeup()
        """Readable when `take` has something."""
        self._kept: OrderedDict[GrammarKey, Compiled] = OrderedDict()
        self._kept_bytes = 0
        self._hopeless: OrderedDict[GrammarKey, Built] = OrderedDict()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._under_way: dict[GrammarKey, _Job] = {}
        self._done: deque[Built] = deque()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._compilers: list[Compiler] = []
        self._is_closed = False

    def warm(self) -> None:
        """Have what compiles ready before the first grammar comes. Returns at once."""
        if not self._num_threads:
            self._start_thread()

    def find(self, key: GrammarKey) -> Compiled | None:
        """One that was compiled before."""
        compiled = self._kept.get(key)
        if compiled is not None:
            self._kept.move_to_end(key)
        return compiled

    def start(self, key: GrammarKey) -> None:
        """Compile it, unless that is under way. `take` tells of its end."""
        if key in self._under_way:
            return
        if (hopeless := self._hopeless.get(key)) is not None:
            self._end(hopeless)
            return
        job = self._under_way[key] = _Job(key)
        if self._num_threads < min(MAX_THREADS, len(self._under_way)):
            self._start_thread()
        self._jobs.put(job)

    def cancel(self, key: GrammarKey) -> None:
        """Nobody waits for it any more: it is not compiled, if that has not begun."""
        job = self._under_way.get(key)
        if job is None:
            return
        with self._lock:
            job.is_dropped = not job.is_taken
        if job.is_dropped:
            del self._under_way[key]

    def take(self) -> list[Built]:
        """Grammars whose compilation has ended since the last call."""
        self.wakeup.clear()
        built = [self._done.popleft() for _ in range(len(self._done))]
        for one in built:
            self._under_way.pop(one.key, None)
            if one.compiled is not None:
                self._keep(one.key, one.compiled)
            elif one.is_remembered:
                self._hopeless[one.key] = one
                while len(self._hopeless) > MAX_REMEMBERED:
                    self._hopeless.popitem(last=False)
        return built

    @property
    def has_news(self) -> bool:
        return bool(self._done)

    def close(self) -> None:
        """What is under way is given up. The threads end by themselves."""
        with self._lock:
            self._is_closed = True
            for compiler in self._compilers:
                compiler.close()
        for _ in range(self._num_threads):
            self._jobs.put(None)
        self.wakeup.close()

    def _keep(self, key: GrammarKey, compiled: Compiled) -> None:
        self._kept[key] = compiled
        self._kept_bytes += compiled.num_bytes
        while self._kept_bytes > self._max_kept_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes

    def _end(self, built: Built) -> None:
        with self._lock:
            if not self._is_closed:
                self._done.append(built)
                self.wakeup.set()

    def _start_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._run, name=f"grammars {self._num_threads}", daemon=True).start()

    def _run(self) -> None:
        compiler = self._load()
        with self._lock:
            self._compilers.append(compiler)
            if self._is_closed:
                compiler.close()
        try:
            compiler.prepare()
        except Exception:
            log.exception("what compiles grammars is not ready")  # the first grammar will find out
        while (job := self._jobs.get()) is not None:
            with self._lock:
                job.is_taken = not (job.is_dropped or self._is_closed)
            if job.is_taken:
                self._end(self._build(compiler, job.key))
        compiler.release()

    def _build(self, compiler: Compiler, key: GrammarKey) -> Built:
        try:
            compiled = compiler.compile(key.form, key.behind)
        except HopelessGrammarError as error:
            return Built(key, None, str(error), is_remembered=True)
        except GrammarError as error:
            return Built(key, None, str(error))
        except CompilerLostError as error:
            return Built(key, None, str(error), 503)
        except Exception:
            log.exception("compiling a grammar failed")
            return Built(key, None, "the server could not compile the grammar", 500)
        self.compiler = compiler
        return Built(key, compiled)
