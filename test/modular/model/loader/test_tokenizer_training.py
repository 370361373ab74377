"""A tokenizer made from the text in the package: any text survives it, and equal arguments give equal tokenizers."""

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstar.model.loader.tokenizer_training import build_tokenizer

WORDS = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"
ADDED = {"<|end|>": True, "<think>": False}
TOKENIZER = build_tokenizer(600, ADDED, split=WORDS)


@given(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Z"))))
def test_any_text_survives(text: str):
    normal = TOKENIZER.normalizer.normalize_str(text)
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == normal


def test_added_tokens_come_last_in_order_and_are_never_cut():
    assert TOKENIZER.get_vocab_size() == 602
    assert TOKENIZER.encode("a<think>b<|end|>").tokens == ["a", "<think>", "b", "<|end|>"]
    assert [TOKENIZER.token_to_id(text) for text in ADDED] == [600, 601]
    assert TOKENIZER.decode([601, 600]) == "<think>", "special ones are left out of text"


def test_training_shortens_text():
    text = "What is the capital of France?"
    assert len(TOKENIZER.encode(text).ids) < len(text) / 2
    assert len(build_tokenizer(256, {}, split=WORDS).encode(text).ids) == len(text)


def test_tokens_beyond_the_text_decode_to_words():
    tokenizer = build_tokenizer(20_000, ADDED, split=WORDS)
    assert tokenizer.token_to_id("<|end|>") == 20_000
    words = [tokenizer.decode([index]) for index in range(19_000, 20_000)]
    assert len(set(words)) == 1000
    assert all(word.strip().isalpha() and word.startswith(" ") for word in words)
    text = "The capital of France is Paris."
    assert tokenizer.encode(text).ids == build_tokenizer(10_000, ADDED, split=WORDS).encode(text).ids


def test_equal_arguments_give_equal_tokenizers_in_any_process():
    code = (
        "from mstar.model.loader.tokenizer_training import build_tokenizer; import hashlib\n"
        f"made = build_tokenizer(600, {ADDED!r}, split={WORDS!r}).to_str()\n"
        "print(hashlib.sha256(made.encode()).hexdigest())"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == hashlib.sha256(TOKENIZER.to_str().encode()).hexdigest()


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="at least 256 tokens, not 255"):
        build_tokenizer(255, {}, split=WORDS)
