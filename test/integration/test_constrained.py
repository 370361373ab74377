"""Texts that follow a grammar on an accelerator: those of the CPU, masks behind replays included."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_directory
from support.constrained_texts import PADDING, PERSON, is_valid
from support.device_parity import DEVICE, LLAMA, open_instance, prompts
from support.tiny_llama import Variant, build_reference
from support.tiny_text import build_tokenizer, write_tokenizer

from mstar.api_server.grammar.formats import Format, json_text, regular
from mstar.communication.messages import Grammar, SamplingParams
from mstar.launch.local import LocalRequest
from mstar.model.base import PreparedPrompt

TOKENIZER = build_tokenizer()
END = TOKENIZER.encode("<|im_end|>").ids[0]
LETTERS, PAIRS = "[a-f]{3,9}(-[0-9]+)?", "(ab|cd){2,40}"
FORMS: list[Format | None] = [json_text(PERSON), regular(LETTERS), None, regular(PAIRS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("texts")
    shape = {**LLAMA.changes, "vocab_size": TOKENIZER.get_vocab_size() + PADDING, "eos_token_id": END}
    write_directory(directory, build_reference(Variant("texts", shape)), max_shard_size="1GB")
    write_tokenizer(directory)
    return directory


def generate(checkpoint: Path, device: str, count: int, **settings: Any) -> list[LocalRequest]:
    """Every other request follows a grammar; temperatures are 0, 0.5, 1 and 1.5."""
    instance = open_instance("llama", checkpoint, device, **settings)
    requests: list[LocalRequest] = []
    for index, prompt in enumerate(prompts(count, TOKENIZER.get_vocab_size())):
        form = FORMS[index % len(FORMS)]
        params = SamplingParams(
            temperature=index // 4 % 4 / 2,
            seed=index,
            max_tokens=64,
            stop_token_ids=(END,),
            num_logprobs=2 if index % 5 == 0 else -1,
            frequency_penalty=0.4 if index % 7 == 0 else 0.0,
            grammar=None if form is None else Grammar(format=json.dumps(form), behind="", field="response_format"),
        )
        requests.append(instance.submit(PreparedPrompt(prompt[:100]), params))
    while not all(request.finished for request in requests):
        instance.tick()
    instance.finish(requests)
    instance.close()
    return requests


def tokens(requests: list[LocalRequest]) -> list[list[int]]:
    return [list(request.tokens["token"]) for request in requests]


def complete(requests: list[LocalRequest]) -> list[str]:
    """Texts that have come to their end."""
    ended = [row for row in tokens(requests) if row[-1] == END]
    return [TOKENIZER.decode(row, skip_special_tokens=True) for row in ended]


@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("overlapped", [True, False], ids=["async", "plain loop"])
def test_texts_are_those_of_the_cpu_and_follow_their_grammar(checkpoint: Path, captured: bool, overlapped: bool):
    settings = {"scheduler": {"async_scheduling": overlapped}, "prefix_cache": {"enabled": False}}
    expected = generate(checkpoint, "cpu", 33, capture={"enabled": False}, **settings)
    found = generate(checkpoint, DEVICE, 33, capture={"enabled": captured}, **settings)
    assert tokens(found) == tokens(expected)
    objects, letters, pairs = (complete(found[first::4]) for first in (0, 1, 3))
    assert objects and len(letters) >= 4 and len(pairs) >= 4
    assert all(is_valid(text, PERSON) for text in objects)
    assert all(re.fullmatch(LETTERS, text) for text in letters) and all(re.fullmatch(PAIRS, text) for text in pairs)
