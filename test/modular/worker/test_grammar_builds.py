"""Compiling grammars beside the loop: what is kept, what is given up, and that a stuck compiler stops nobody."""

import threading
import time
from dataclasses import dataclass, field

import pytest

from mstar.worker.grammars.builds import MAX_LOST_THREADS, Built, GrammarBuilds, GrammarKey
from mstar.worker.grammars.constraints import GrammarError


@dataclass
class Sized:
    num_bytes: int

    def matcher(self, end_ids):
        raise AssertionError("nobody draws here")


@dataclass
class Stub:
    """Compiles texts of digits to so many bytes; `stuck` waits for `release`."""

    compiled: list[str] = field(default_factory=list)
    release: threading.Event = field(default_factory=threading.Event)
    end_ids = (0,)
    textless = frozenset({0})

    def compile(self, form: str, behind: str) -> Sized:
        self.compiled.append(form)
        if form.startswith("stuck"):
            self.release.wait(20)
        if form == "stuck 7":
            form = "7"
        if form == "broken":
            raise OSError("a bug")
        if not form.isdigit():
            raise GrammarError(f"{form} is no grammar")
        return Sized(int(form))


@pytest.fixture
def stub():
    made = Stub()
    yield made
    made.release.set()


def ask(builds: GrammarBuilds, form: str) -> Built:
    """Start it and wait until the loop is told."""
    key = GrammarKey(form, "")
    builds.start(key)
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        if builds.has_news:
            for built in builds.take():
                if built.key == key:
                    return built
        time.sleep(0.002)
    raise AssertionError(f"nothing came of {form}")


def test_what_was_compiled_is_found_again_up_to_a_number_of_bytes(stub: Stub):
    builds = GrammarBuilds(lambda: stub, max_kept_bytes=100)
    for form in ("40", "50"):
        assert ask(builds, form).compiled == Sized(int(form))
    assert builds.find(GrammarKey("40", "")) is not None
    ask(builds, "30")  # 50 was used longest ago
    assert builds.find(GrammarKey("50", "")) is None
    assert builds.find(GrammarKey("40", "")) is not None and builds.find(GrammarKey("30", "")) is not None
    ask(builds, "500")
    assert builds.find(GrammarKey("500", "")) is not None and builds.find(GrammarKey("40", "")) is None
    assert builds.find(GrammarKey("500", "</think>")) is None
    builds.close()


def test_one_grammar_that_many_ask_for_is_compiled_once(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    for _ in range(5):
        builds.start(GrammarKey("7", ""))
    ask(builds, "7")
    assert stub.compiled == ["7"] and builds.wait_s is None
    builds.close()


def test_failures_have_their_reason_and_their_code(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    assert ask(builds, "words")[1:] == (None, "words is no grammar", 400)
    assert ask(builds, "broken").code == 500
    assert ask(builds, "9").compiled == Sized(9)
    builds.close()


def test_a_compiler_that_cannot_be_loaded_says_why():
    def load():
        raise GrammarError("no tokenizer")

    builds = GrammarBuilds(load)
    assert ask(builds, "1")[1:] == (None, "no tokenizer", 400)
    builds.close()


def test_what_comes_too_late_is_kept_for_those_that_ask_again(stub: Stub):
    builds = GrammarBuilds(lambda: stub, timeout_s=0.05)
    key = GrammarKey("stuck 7", "")
    assert ask(builds, "stuck 7").code == 400 and builds.find(key) is None
    stub.release.set()
    ends = time.monotonic() + 10
    while builds.find(key) is None and time.monotonic() < ends:
        time.sleep(0.002)
    assert builds.find(key) == Sized(7)
    builds.close()


def test_what_nobody_waits_for_is_not_compiled(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    for form in ("stuck", "1", "2", "3"):
        builds.start(GrammarKey(form, ""))
    while not stub.compiled:
        time.sleep(0.002)
    for form in ("stuck", "1", "2", "3", "4"):
        builds.cancel(GrammarKey(form, ""))
    builds.start(GrammarKey("2", ""))  # somebody does again
    stub.release.set()
    assert ask(builds, "5").compiled == Sized(5)
    assert stub.compiled == ["stuck", "2", "5"] and builds.find(GrammarKey("2", "")) == Sized(2)
    assert builds.wait_s is None
    builds.close()


def test_what_takes_too_long_is_given_up_and_the_others_go_on(stub: Stub):
    builds = GrammarBuilds(lambda: stub, timeout_s=0.05)
    slow = ask(builds, "stuck")
    assert slow.compiled is None and slow.code == 400 and "0.05 s" in slow.error
    assert ask(builds, "9").compiled == Sized(9)
    assert ask(builds, "stuck").code == 400 and stub.compiled == ["stuck", "9"]  # it is not tried again
    for i in range(MAX_LOST_THREADS):
        assert ask(builds, f"stuck {i}").code == 400
    assert ask(builds, "8").code == 503
    stub.release.set()
    ends = time.monotonic() + 10
    while (built := ask(builds, "8")).code == 503 and time.monotonic() < ends:
        time.sleep(0.01)
    assert built.compiled == Sized(8)
    assert not any(one.key.form.startswith("stuck") for one in builds.take())  # what came of them too late is dropped
    builds.close()
