"""`mstar run`, beside transformers' model of the same weights."""

from pathlib import Path

import pytest
import torch
from support.checkpoints import byte_level_bpe
from support.command_line import command
from transformers import LlamaForCausalLM

END_TOKEN = 2
NUM_TOKENS = 12


def greedy(weights: LlamaForCausalLM, prompt: str) -> str:
    """The reference's continuation, without a cache."""
    ids = byte_level_bpe().encode(prompt, add_special_tokens=False).ids
    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < NUM_TOKENS and END_TOKEN not in answer:
            answer.append(int(weights(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return byte_level_bpe().decode(answer).rstrip("\ufffd")


def answered(checkpoint: Path, prompt: str, *more: object, typed: str | bytes | None = None) -> str:
    shared = ("-c", checkpoint, "--set", "dtype=float32", "--max-tokens", NUM_TOKENS)
    result = command("run", prompt, *shared, *more, typed=typed)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_an_answer_goes_through_the_chat_template(weights, checkpoint):
    expected = greedy(weights, "<|im_start|>user\nHello world<|im_end|>\n<|im_start|>assistant\n")
    assert len(expected) > 5
    assert answered(checkpoint, "Hello world") == expected + "\n"


def test_raw_completes_the_text_and_a_dash_reads_it(weights, checkpoint):
    expected = greedy(weights, "x = f(a)") + "\n"
    assert answered(checkpoint, "-", "--raw", typed="x = f(a)") == expected
    assert answered(checkpoint, "x = f(a)") != expected


def test_a_byte_that_is_no_utf8_is_read_as_such(checkpoint):
    expected = answered(checkpoint, "caf\ufffd")
    assert answered(checkpoint, "caf\udce9") == expected, "as Python hands on an argument"
    assert answered(checkpoint, "-", typed=b"caf\xe9") == expected


def test_a_seed_gives_the_same_text_again(checkpoint):
    said = [answered(checkpoint, "Hi", "--temperature", 1.5, "--seed", seed) for seed in (1, 1, 2)]
    assert said[0] == said[1] != said[2]


def test_what_does_not_fit_is_said_on_the_error_stream(checkpoint):
    result = command("run", "word " * 300, "-c", checkpoint, "--max-tokens", 8)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "tokens" in result.stderr
    assert "256" in result.stderr


@pytest.mark.parametrize(("option", "value"), [("--max-tokens", 0), ("--temperature", 2.1), ("--temperature", "x")])
def test_values_out_of_range_are_usage_errors(checkpoint, option: str, value: object):
    result = command("run", "hi", "-c", checkpoint, option, value)
    assert result.exit_code == 2
    assert option in result.stderr
