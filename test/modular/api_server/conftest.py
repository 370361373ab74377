"""One front for all tests of a file that use `front`; what a test changes of it is put back."""

from collections.abc import Iterator

import pytest
from support.fake_worker import endless
from support.running_front import RunningFront, build_spec
from support.tiny_text import build_tokenizer

REPLY = " The capital of France is Paris.\n    indented 你好 😀 naïve."


@pytest.fixture(scope="session")
def _front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    spec = build_spec(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = build_tokenizer()
    with RunningFront(spec, tokenizer, lambda _: ()) as front:
        yield front


@pytest.fixture
def front(_front: RunningFront) -> Iterator[RunningFront]:
    """Answers with REPLY and an end token. Afterwards the server still answers and nothing is left on the worker."""
    _front.reply(REPLY)
    _front.worker.logprobs = None
    _front.worker.step_s = 0.0
    yield _front
    if _front.worker.is_paused:
        _front.call(_front.worker.resume)
    _front.reply(REPLY)
    _front.worker.num_cached = lambda _: 0
    answer = _front.chat(max_tokens=2)
    assert answer.status_code == 200, answer.text
    _front.wait_until(lambda: _front.worker.num_open == 0)
    assert _front.parts.handle.num_live == _front.parts.handle.num_waiting == 0


@pytest.fixture
def slow(front: RunningFront) -> RunningFront:
    """Every request goes on until it is ended, a token each 10 ms."""
    front.worker.script = endless
    front.call(lambda: setattr(front.worker, "step_s", 0.01))
    return front


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    """A model that thinks, calls tools and sees."""
    # Imported here: it brings torch along, which most files of this folder do without.
    from support.qwen3_5_front import build_qwen_spec, running_qwen

    with running_qwen(build_qwen_spec(tmp_path_factory.mktemp("qwen"))) as front:
        yield front
