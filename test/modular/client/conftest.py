"""Fronts for the tests of the client: a text model behind a key, and a model that thinks and calls tools."""

from collections.abc import Iterator

import pytest
from support.qwen3_5_front import build_qwen_spec, running_qwen
from support.running_front import RunningFront, build_spec
from support.tiny_text import build_tokenizer

from mstar.config.schema import ServerConfig

KEY = "sesame"
REPLY = " The capital\u2028of France\u0085is Paris.\n    indented 你好 😀 naïve."
"""With characters that some take for the end of a line."""


@pytest.fixture(scope="session")
def _front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    server = ServerConfig(api_keys=(KEY,), max_body_bytes=20_000)
    spec = build_spec(tmp_path_factory.mktemp("tokenizer"), server=server)
    with RunningFront(spec, build_tokenizer(), lambda _: ()) as front:
        yield front


@pytest.fixture
def front(_front: RunningFront) -> Iterator[RunningFront]:
    _front.reply(REPLY)
    _front.worker.logprobs = None
    _front.worker.step_s = 0.0
    yield _front
    _front.wait_until(lambda: _front.worker.num_open == 0)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    with running_qwen(build_qwen_spec(tmp_path_factory.mktemp("qwen"))) as front:
        yield front
