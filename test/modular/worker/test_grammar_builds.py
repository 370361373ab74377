"""Compiling grammars beside the loop: what is kept, what is refused, and that a slow grammar stops nobody."""

import threading
import time
from dataclasses import dataclass, field

import pytest

from mstar.worker.grammars.builds import MAX_THREADS, Built, GrammarBuilds, GrammarKey
from mstar.worker.grammars.constraints import CompilerLostError, GrammarError, HopelessGrammarError


@dataclass
class Sized:
    num_bytes: int

    def matcher(self, end_ids):
        raise AssertionError("nobody draws here")


@dataclass
class Stub:
    """Compiles texts of digits to so many bytes; `stuck` waits for `go_on`."""

    compiled: list[str] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    num_prepared: int = 0
    num_released: int = 0
    is_prepared_badly: bool = False
    end_ids = (0,)
    textless = frozenset({0})

    def prepare(self) -> None:
        self.num_prepared += 1
        if self.is_prepared_badly:
            raise OSError("a bug")

    def compile(self, form: str, behind: str) -> Sized:
        self.compiled.append(form)
        if form.startswith("stuck"):
            self.go_on.wait(20)
        if form == "broken":
            raise OSError("a bug")
        if form == "lost":
            raise CompilerLostError("it has gone")
        if form == "hopeless":
            raise HopelessGrammarError("too much")
        if not form.removeprefix("stuck ").isdigit():
            raise GrammarError(f"{form} is no grammar")
        return Sized(int(form.removeprefix("stuck ")))

    def close(self) -> None:
        self.go_on.set()

    def release(self) -> None:
        self.num_released += 1


@pytest.fixture
def stub():
    made = Stub()
    yield made
    made.go_on.set()


def wait_for(what) -> None:
    ends = time.monotonic() + 10
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.002)


def ask(builds: GrammarBuilds, form: str) -> Built:
    """Start it and wait until the loop is told."""
    key = GrammarKey(form, "")
    builds.start(key)
    while True:
        wait_for(lambda: builds.has_news)
        for built in builds.take():
            if built.key == key:
                return built


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
    assert stub.compiled == ["7"]
    builds.close()


def test_failures_have_their_reason_and_their_code(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    assert ask(builds, "words")[1:4] == (None, "words is no grammar", 400)
    assert ask(builds, "broken").code == 500
    assert ask(builds, "lost")[1:4] == (None, "it has gone", 503)
    assert ask(builds, "9").compiled == Sized(9)
    builds.close()


def test_a_compiler_that_is_not_ready_is_asked_all_the_same(stub: Stub):
    stub.is_prepared_badly = True
    builds = GrammarBuilds(lambda: stub)
    assert ask(builds, "9").compiled == Sized(9) and stub.num_prepared == 1
    builds.close()


def test_what_would_cost_as_much_again_is_not_tried_again(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    for form in ("hopeless", "lost", "words"):
        first, second = ask(builds, form), ask(builds, form)
        assert first == second and first.compiled is None
    assert stub.compiled == ["hopeless", "lost", "lost", "words", "words"]
    builds.close()


def test_what_nobody_waits_for_is_not_compiled(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    stuck = [f"stuck {i}" for i in range(MAX_THREADS)]
    for form in (*stuck, "1", "2", "3"):
        builds.start(GrammarKey(form, ""))
    wait_for(lambda: len(stub.compiled) == MAX_THREADS)
    for form in (*stuck, "1", "2", "3", "4"):
        builds.cancel(GrammarKey(form, ""))
    builds.start(GrammarKey("2", ""))  # somebody does again
    stub.go_on.set()
    assert ask(builds, "5").compiled == Sized(5)
    wait_for(lambda: builds.take() or builds.find(GrammarKey("2", "")) is not None)
    assert sorted(stub.compiled) == sorted([*stuck, "2", "5"]) and builds.find(GrammarKey("2", "")) == Sized(2)
    builds.close()


def test_a_grammar_that_takes_long_stops_no_other(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    builds.start(GrammarKey("stuck 1", ""))
    for form in ("7", "8", "9"):
        assert ask(builds, form).compiled == Sized(int(form))
    assert builds.find(GrammarKey("stuck 1", "")) is None
    builds.start(GrammarKey("stuck 2", ""))
    builds.start(GrammarKey("6", ""))
    wait_for(lambda: "stuck 2" in stub.compiled)
    assert "6" not in stub.compiled and stub.num_prepared == MAX_THREADS
    stub.go_on.set()
    wait_for(lambda: builds.take() or builds.find(GrammarKey("6", "")) is not None)
    builds.close()


def test_what_compiles_is_prepared_before_the_first_grammar_and_goes_with_the_builds(stub: Stub):
    builds = GrammarBuilds(lambda: stub)
    assert stub.num_prepared == 0
    builds.warm()
    builds.warm()
    wait_for(lambda: stub.num_prepared == 1)
    ask(builds, "1")
    builds.start(GrammarKey("stuck 1", ""))
    wait_for(lambda: "stuck 1" in stub.compiled)
    builds.close()  # ends what is under way
    wait_for(lambda: stub.num_released == stub.num_prepared == 1)
    assert not builds.has_news
