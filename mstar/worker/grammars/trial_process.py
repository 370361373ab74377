"""Entry of the process that tries grammars for a worker: compiles what it is sent, follows a text with it, and
says whether that went well.

Started as `python -m mstar.worker.grammars.trial_process FD PARENT_PID`. Without torch, below the worker's priority.
It ends when its pipe closes or its parent dies; a grammar that it cannot finish is ended with it, by the worker or by
the system. A bug in here ends it too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from mstar.platforms.parent_death import die_with_parent
from mstar.worker.grammars.compiler import GrammarCompiler
from mstar.worker.grammars.constraints import GrammarError
from mstar.worker.grammars.rehearsal import rehearse
from mstar.worker.grammars.trial_messages import (
    Passed,
    Ready,
    Refused,
    Reply,
    Trial,
    TrialSetup,
    decode_order,
    encode,
)
from mstar.worker.grammars.vocabulary import read_vocabulary

NICENESS = 10
STACK_BYTES = 4 << 20
"""Half of what the worker's thread has, so that no recursion ends first over there."""
OUT_OF_MEMORY = ("std::bad_alloc", "Resource temporarily unavailable", "Cannot allocate memory")
"""How xgrammar says so; the second is of a thread that could not start."""


def main(fd: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt reaches the supervisor, which decides
    faulthandler.enable()
    os.nice(NICENESS)
    sys.modules["torch"] = None  # type: ignore[assignment]  # xgrammar's binding would load it, to exchange tensors
    with Connection(fd) as pipe, contextlib.suppress(EOFError, ConnectionError):  # the worker closes it
        serve(pipe)


def serve(pipe: Connection) -> None:
    """Until the pipe is closed."""
    setup = decode_order(pipe.recv_bytes())
    assert isinstance(setup, TrialSetup)
    vocab_size, max_bytes = setup.vocab_size, setup.max_bytes
    try:
        vocabulary = setup.vocabulary or read_vocabulary(Path(setup.tokenizer_dir), setup.vocab_size, setup.end_ids)
    except GrammarError as error:
        pipe.send_bytes(encode(Refused(str(error))))
        return
    compiler = GrammarCompiler(vocabulary, setup.num_threads)
    pipe.send_bytes(encode(Ready(None if setup.vocabulary else vocabulary)))
    del setup, vocabulary  # megabytes
    limit_memory(max_bytes)
    while True:
        order = decode_order(pipe.recv_bytes())
        assert isinstance(order, Trial)
        pipe.send_bytes(encode(attempt(compiler, order, vocab_size, max_bytes)))


def attempt(compiler: GrammarCompiler, trial: Trial, vocab_size: int, max_bytes: int) -> Reply:
    """Whether it can be compiled, and followed in time."""
    try:
        rehearse(compiler.compile(trial.form, trial.behind), compiler.end_ids, vocab_size)
    except GrammarError as error:
        if any(sign in str(error) for sign in OUT_OF_MEMORY):
            return Refused(f"the grammar takes more than {max_bytes >> 20} MiB to compile; ask for a simpler one")
        return Refused(str(error))
    return Passed()


def limit_memory(max_bytes: int) -> None:
    """What this process may take on top of what it has."""
    status = Path("/proc/self/status").read_text().splitlines()
    has_bytes = next((int(line.split()[1]) << 10 for line in status if line.startswith("VmData")), 0)
    for kind, wanted in ((resource.RLIMIT_DATA, has_bytes + max_bytes), (resource.RLIMIT_STACK, STACK_BYTES)):
        _, most = resource.getrlimit(kind)
        resource.setrlimit(kind, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
