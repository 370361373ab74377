"""The process that grammars are tried in: what it costs others when a grammar, or the process itself, goes wrong."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from support.constrained_texts import PERSON, ConstrainedTexts, run
from support.tiny_text import write_tokenizer
from tokenizers import Tokenizer

from mstar.api_server.grammar.formats import context_free, json_text, literal, regular
from mstar.worker.grammars.builds import GrammarBuilds, GrammarKey
from mstar.worker.grammars.compiler import GrammarCompiler
from mstar.worker.grammars.constraints import CompilerLostError, GrammarError, HopelessGrammarError
from mstar.worker.grammars.trial_messages import Passed, Ready, Refused, Reply, Trial, TrialSetup
from mstar.worker.grammars.trial_process import attempt
from mstar.worker.grammars.trials import TriedCompiler, _Process
from mstar.worker.grammars.vocabulary import read_vocabulary

SLOW = json.dumps(regular("|".join(f"[a-z]{{{i},{i + 900}}}" for i in range(1, 900))))
"""Takes minutes, and all the memory there is."""
SOUND = json.dumps(json_text(PERSON))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return directory


def token_of(tokenizer: Tokenizer, text: str) -> int:
    token = tokenizer.token_to_id(text)
    assert token is not None
    return token


def setup_for(directory: Path, *, max_bytes: int = 2 << 30) -> TrialSetup:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return TrialSetup(
        tokenizer_dir=str(directory),
        vocab_size=tokenizer.get_vocab_size() + 7,
        end_ids=(token_of(tokenizer, "<|im_end|>"),),
        num_threads=1,
        max_bytes=max_bytes,
    )


@pytest.fixture(scope="module")
def compiler(directory: Path) -> Iterator[TriedCompiler]:
    """It outlives its processes."""
    made = TriedCompiler(setup_for(directory))
    made.prepare()
    yield made
    made.release()


def pid_of(compiler: TriedCompiler) -> int:
    assert compiler.pid is not None
    return compiler.pid


def is_alive(pid: int) -> bool:
    """A process that has ended and is not yet reaped is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.005)


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


def kill_at_work(pid: int, number: int) -> threading.Thread:
    """Sends the signal once the process is busy."""

    def kill() -> None:
        began = cpu_ticks(pid)
        wait_for(lambda: cpu_ticks(pid) > began + 5)
        os.kill(pid, number)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_what_was_tried_is_followed_here(compiler: TriedCompiler, directory: Path):
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    matcher = compiler.compile(json.dumps(literal("ab")), "").matcher(compiler.end_ids)
    bits = np.zeros((1, -(-setup_for(directory).vocab_size // 32)), np.int32)
    a, b, end = token_of(tokenizer, "a"), token_of(tokenizer, "b"), compiler.end_ids[0]
    seen = []
    for token in (a, b, end):
        matcher.fill_next_token_bitmask(bits, 0)
        seen.append(set(np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")).tolist()))
        assert matcher.accept_token(token)
    ab = tokenizer.token_to_id("ab")
    assert seen == [{a} if ab is None else {a, ab}, {b}, {end}] and matcher.is_terminated()
    assert end in compiler.textless and a not in compiler.textless


def test_the_process_is_light_and_gives_way_to_the_worker(compiler: TriedCompiler):
    compiler.prepare()
    pid = pid_of(compiler)
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "xgrammar" in maps and "torch" not in maps
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)


def test_what_is_no_grammar_leaves_the_process_as_it_is(compiler: TriedCompiler):
    compiler.prepare()
    pid = pid_of(compiler)
    with pytest.raises(GrammarError, match="missing") as raised:
        compiler.compile(json.dumps(context_free("root ::= missing")), "")
    assert not isinstance(raised.value, HopelessGrammarError)
    assert compiler.compile(SOUND, "</think>").num_bytes > 0 and compiler.pid == pid


def test_what_takes_too_long_is_killed_and_the_next_one_is_compiled(directory: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mstar.worker.grammars.trials.LEAST_CPU_SHARE", 0.03)  # other tests may keep the cores busy
    compiler = TriedCompiler(setup_for(directory), timeout_s=0.3)
    compiler.prepare()
    pid = pid_of(compiler)
    began = time.monotonic()
    with pytest.raises(HopelessGrammarError, match=r"not compiled after 0\.3 s"):
        compiler.compile(SLOW, "")
    assert time.monotonic() - began < 3 and not is_alive(pid)
    compiler.prepare()
    assert compiler.compile(json.dumps(literal("x")), "").num_bytes > 0 and compiler.pid != pid
    compiler.release()


def test_a_grammar_is_not_at_fault_for_a_process_that_stands_still(directory: Path):
    compiler = TriedCompiler(setup_for(directory), timeout_s=1)
    compiler.prepare()
    pid = pid_of(compiler)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CompilerLostError, match="too little processor time"):
        compiler.compile(SOUND, "")
    assert not is_alive(pid)
    compiler.prepare()
    assert compiler.compile(SOUND, "").num_bytes > 0 and compiler.pid != pid
    compiler.release()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGKILL, CompilerLostError), (signal.SIGSEGV, HopelessGrammarError)]
)
def test_a_process_that_dies_at_work_fails_that_grammar_alone(compiler: TriedCompiler, number: int, error: type):
    compiler.prepare()
    killer = kill_at_work(pid_of(compiler), number)
    with pytest.raises(error):
        compiler.compile(SLOW, "")
    killer.join()
    assert compiler.compile(SOUND, "").num_bytes > 0


def test_an_error_in_the_process_is_no_fault_of_the_grammar(compiler: TriedCompiler):
    with pytest.raises(RuntimeError, match="error of its own"):
        compiler.compile("no JSON", "")
    assert compiler.compile(SOUND, "").num_bytes > 0


def test_a_process_that_dies_idle_fails_nobody(compiler: TriedCompiler):
    compiler.prepare()
    pid = pid_of(compiler)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid))
    assert compiler.compile(SOUND, "").num_bytes > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_before_it_has_begun_fails_nobody(compiler: TriedCompiler, number: int):
    """The grammar is on its way already when it dies."""
    compiler.prepare()
    pid = pid_of(compiler)
    os.kill(pid, signal.SIGSTOP)

    def end() -> None:
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)

    killer = threading.Timer(0.2, end)
    killer.start()
    assert compiler.compile(SOUND, "").num_bytes > 0 and compiler.pid != pid
    killer.join()


def test_a_grammar_is_on_its_way_twice_at_most(compiler: TriedCompiler, monkeypatch: pytest.MonkeyPatch):
    compiler.prepare()
    asked = []

    def dies(self: _Process, order: object, _: float) -> Reply:
        if isinstance(order, TrialSetup):
            return Ready(None)
        asked.append(self.pid)
        self.kill()
        raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr(_Process, "ask", dies)
        with pytest.raises(CompilerLostError):
            compiler.compile(SOUND, "")
    assert len(set(asked)) == len(asked) == 2
    assert compiler.compile(SOUND, "").num_bytes > 0


def test_a_grammar_that_takes_all_memory_is_refused(directory: Path):
    compiler = TriedCompiler(setup_for(directory, max_bytes=16 << 20))
    compiler.prepare()
    pid = pid_of(compiler)
    with pytest.raises(GrammarError, match="16 MiB"):
        compiler.compile(SLOW, "")
    assert compiler.compile(SOUND, "").num_bytes > 0 and compiler.pid == pid
    compiler.release()


def test_without_a_tokenizer_nothing_is_tried(tmp_path: Path, directory: Path):
    compiler = TriedCompiler(
        TrialSetup(tokenizer_dir=str(tmp_path), vocab_size=9, end_ids=(1,), num_threads=1, max_bytes=1 << 30)
    )
    for _ in range(2):
        with pytest.raises(GrammarError, match="no tokenizer"):
            compiler.compile(SOUND, "")
    wait_for(lambda: not is_alive(pid_of(compiler)))
    compiler.release()


def test_close_gives_up_what_is_being_compiled(directory: Path):
    compiler = TriedCompiler(setup_for(directory))
    compiler.prepare()
    pid = pid_of(compiler)
    closer = threading.Timer(0.2, compiler.close)
    closer.start()
    with pytest.raises(CompilerLostError):
        compiler.compile(SLOW, "")
    closer.join()
    assert not is_alive(pid) and compiler.pid is None
    with pytest.raises(CompilerLostError):
        compiler.compile(SOUND, "")
    compiler.release()


ORPHAN = """
import sys, msgspec
sys.modules["torch"] = None  # starts sooner
from mstar.worker.grammars.trial_messages import Passed, Refused, Trial, TrialSetup
from mstar.worker.grammars.trial_process import attempt
from mstar.worker.grammars.trials import TriedCompiler
from mstar.worker.grammars.vocabulary import read_vocabulary
compiler = TriedCompiler(msgspec.json.decode(sys.argv[1], type=TrialSetup))
compiler.prepare()
print(compiler.pid, flush=True)
compiler.compile(sys.stdin.readline(), "")
"""


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_process_ends_with_a_killed_worker(directory: Path, is_busy: bool):
    setup = msgspec.json.encode(setup_for(directory)).decode()
    worker = subprocess.Popen([sys.executable, "-c", ORPHAN, setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None and worker.stdout is not None
    pid = int(worker.stdout.readline())
    assert is_alive(pid)
    if is_busy:
        began = cpu_ticks(pid)
        worker.stdin.write(SLOW.encode() + b"\n")
        worker.stdin.flush()
        wait_for(lambda: cpu_ticks(pid) > began + 5)
    worker.kill()
    worker.communicate()
    wait_for(lambda: not is_alive(pid))


def test_many_at_once_and_those_that_were_compiled_need_no_process(directory: Path):
    made: list[TriedCompiler] = []

    def load() -> TriedCompiler:
        made.append(TriedCompiler(setup_for(directory)))
        return made[-1]

    builds = GrammarBuilds(load)
    keys = [GrammarKey(json.dumps(literal(f"text {i % 20}")), "") for i in range(60)]
    for key in keys:
        builds.start(key)
    found = []
    wait_for(lambda: (found.extend(builds.take()), len(found) >= 20)[1])
    assert {built.key for built in found} == set(keys) and all(built.compiled for built in found)
    assert len(made) == 2
    for compiler in made:
        os.kill(pid_of(compiler), signal.SIGKILL)
    assert all(builds.find(key) is not None for key in keys)
    pids = [pid_of(compiler) for compiler in made]
    builds.close()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_requests_beside_one_whose_process_is_killed_go_on(tmp_path: Path):
    texts = ConstrainedTexts(tmp_path)
    made: list[TriedCompiler] = []

    def load(vocab_size: int) -> TriedCompiler:
        made.append(TriedCompiler(setup_for(tmp_path / "tokenizer")))
        return made[-1]

    instance = texts.instance(late=True, load_grammars=load)
    first = texts.submit(instance, "first", literal("ok"))
    run(instance)
    free = texts.submit(instance, "free", None, max_tokens=150, stop_token_ids=())
    lost = texts.submit(instance, "lost", json.loads(SLOW))
    killer = kill_at_work(pid_of(made[0]), signal.SIGKILL)
    run(instance)
    killer.join()
    after = texts.submit(instance, "after", literal("fine"))
    run(instance)
    assert texts.text(first) == "ok" and texts.text(after) == "fine" and len(free.tokens) == 150
    assert lost.failure is not None and "try again" in lost.failure
    instance.close()


AMBIGUOUS = 'root ::= a* "!"\na ::= b*\nb ::= c*\nc ::= [a-z]*'


def test_a_grammar_that_cannot_be_followed_in_time_is_refused_before_it_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    setup = setup_for(directory)
    compiler = GrammarCompiler(read_vocabulary(directory, setup.vocab_size, setup.end_ids), 1)
    sound = [literal("x"), regular("[a-z]{0,200}"), json_text(PERSON), context_free('root ::= "(" root ")" | "."')]
    monkeypatch.setattr("mstar.worker.grammars.rehearsal.LIMIT_NS", 10_000_000)
    for form in sound:
        assert attempt(compiler, Trial(json.dumps(form), ""), setup.vocab_size, 1 << 30) == Passed()
    reply = attempt(compiler, Trial(json.dumps(context_free(AMBIGUOUS)), ""), setup.vocab_size, 1 << 30)
    assert isinstance(reply, Refused) and "ambiguous" in reply.message
