"""`GrammarBuilds`: compiles grammars on a thread of its own and keeps what was made, up to a number of bytes.

Everything but the thread's own loop runs on the worker's loop thread. A grammar that takes too long is given up: the
thread is left to itself and another one serves the others.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple, Protocol

from mstar.communication.messages import Grammar
from mstar.communication.wakeup import Wakeup
from mstar.worker.grammars.constraints import GrammarError, Matcher

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 20.0
MAX_LOST_THREADS = 2
"""So many grammars may still be compiled that nobody waits for any more."""
MAX_KEPT_BYTES = 256 << 20
MAX_REMEMBERED = 256
"""Grammars that took too long and are refused at once when they come again."""


class Compiled(Protocol):
    """A grammar that texts can be followed with."""

    @property
    def num_bytes(self) -> int: ...
    def matcher(self, end_ids: Sequence[int]) -> Matcher: ...


class Compiler(Protocol):
    """See `mstar.worker.grammars.compiler.GrammarCompiler`."""

    @property
    def end_ids(self) -> Sequence[int]: ...
    @property
    def textless(self) -> Set[int]: ...
    def compile(self, form: str, behind: str) -> Compiled: ...


class GrammarKey(NamedTuple):
    """What a compiled grammar depends on, besides the tokenizer."""

    form: str
    behind: str

    @classmethod
    def of(cls, grammar: Grammar) -> GrammarKey:
        return cls(grammar.format, grammar.behind)


class Built(NamedTuple):
    """One grammar is compiled, or never will be: then `error` says why, and `code` is the status that fits."""

    key: GrammarKey
    compiled: Compiled | None
    error: str = ""
    code: int = 400


class _Job:
    """`began_s`: when its compilation began; 0 before. `is_taken`: by the thread. `is_dropped`: the thread shall not
    take it. `is_lost`: it took too long. Guarded by the lock of the builds."""

    __slots__ = ("began_s", "is_dropped", "is_lost", "is_taken", "key")

    def __init__(self, key: GrammarKey) -> None:
        self.key = key
        self.began_s = 0.0
        self.is_taken = self.is_dropped = self.is_lost = False


class GrammarBuilds:
    """`load` makes the compiler, on the thread, when the first grammar comes."""

    def __init__(
        self,
        load: Callable[[], Compiler],
        *,
        timeout_s: float = COMPILE_TIMEOUT_S,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        self._load = load
        self._timeout_s = timeout_s
        self._max_kept_bytes = max_kept_bytes
        self.compiler: Compiler | None = None
        self.wakeup = Wakeup()
        """Readable when `take` has something."""
        self._kept: OrderedDict[GrammarKey, Compiled] = OrderedDict()
        self._kept_bytes = 0
        self._too_slow: deque[GrammarKey] = deque(maxlen=MAX_REMEMBERED)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._under_way: dict[GrammarKey, _Job] = {}
        self._done: deque[Built] = deque()
        self._late: deque[Built] = deque()
        """Of lost threads."""
        self._lock = threading.Lock()
        self._running: _Job | None = None
        self._thread: threading.Thread | None = None
        self._lost: list[threading.Thread] = []

    def find(self, key: GrammarKey) -> Compiled | None:
        """One that was compiled before."""
        self._keep_late()
        compiled = self._kept.get(key)
        if compiled is not None:
            self._kept.move_to_end(key)
        return compiled

    def start(self, key: GrammarKey) -> None:
        """Compile it, unless that is under way. `take` tells of its end."""
        if key in self._under_way:
            return
        self._lost = [thread for thread in self._lost if thread.is_alive()]
        if key in self._too_slow:
            self._end(Built(key, None, self._slow()))
        elif len(self._lost) > MAX_LOST_THREADS:
            self._end(Built(key, None, "too many grammars are being compiled; try again later", 503))
        else:
            job = self._under_way[key] = _Job(key)
            if self._thread is None:
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
        """Grammars whose compilation has ended since the last call, or takes too long."""
        self.wakeup.clear()
        self._give_up_overdue()
        self._keep_late()
        built = [self._done.popleft() for _ in range(len(self._done))]
        for one in built:
            self._under_way.pop(one.key, None)
            if one.compiled is not None:
                self._keep(one.key, one.compiled)
        return built

    @property
    def has_news(self) -> bool:
        return bool(self._done) or self.wait_s == 0

    @property
    def wait_s(self) -> float | None:
        """How long the loop may sleep at most; None: until a message or `wakeup` comes."""
        if not self._under_way:
            return None
        job = self._running
        if job is None or not job.began_s:
            return self._timeout_s
        return max(0.0, job.began_s + self._timeout_s - time.monotonic())

    def close(self) -> None:
        self._jobs.put(None)
        self.wakeup.close()

    def _keep(self, key: GrammarKey, compiled: Compiled) -> None:
        self._kept[key] = compiled
        self._kept_bytes += compiled.num_bytes
        while self._kept_bytes > self._max_kept_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes

    def _keep_late(self) -> None:
        """What took too long, perhaps because the machine was busy, is there for those that ask again."""
        for _ in range(len(self._late)):
            key, compiled, _, _ = self._late.popleft()
            if compiled is not None:
                self._keep(key, compiled)

    def _give_up_overdue(self) -> None:
        with self._lock:
            job = self._running
            if job is None or not job.began_s or time.monotonic() < job.began_s + self._timeout_s:
                return
            job.is_lost, self._running = True, None
        log.warning("a grammar is given up: it is not compiled after %g s", self._timeout_s)
        assert self._thread is not None
        self._lost.append(self._thread)
        self._too_slow.append(job.key)
        self._done.append(Built(job.key, None, self._slow()))
        self._start_thread()

    def _slow(self) -> str:
        return f"the grammar is not compiled after {self._timeout_s:g} s; ask for a simpler one"

    def _end(self, built: Built) -> None:
        self._done.append(built)
        self.wakeup.set()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                if job.is_dropped:
                    continue
                job.is_taken, self._running = True, job
            built = self._build(job)
            with self._lock:
                if job.is_lost:
                    self._late.append(built)
                    return
                self._running = None
            self._end(built)

    def _build(self, job: _Job) -> Built:
        key = job.key
        try:
            if self.compiler is None:
                self.compiler = self._load()
            job.began_s = time.monotonic()
            return Built(key, self.compiler.compile(key.form, key.behind))
        except GrammarError as error:
            return Built(key, None, str(error))
        except Exception:
            log.exception("compiling a grammar failed")
            return Built(key, None, "the server could not compile the grammar", 500)
