"""`echo` of text completions: the prompt's text before the continuation, and nothing else of it changes."""

import pytest
from support.running_front import RunningFront

REPLY = " The capital of France is Paris.\n    indented 你好 😀 naïve."
PROMPTS = ["hi there", " France 你好"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_each_choice_begins_with_its_prompt(front: RunningFront, as_ids: bool):
    prompts = [front.tokenizer.encode(text).ids for text in PROMPTS] if as_ids else PROMPTS
    fields = {"echo": True, "n": 2, "max_tokens": 200}
    plain = front.complete(prompts, n=2, max_tokens=200).json()
    body = front.complete(prompts, **fields).json()
    expected = [text + REPLY for text in PROMPTS for _ in range(2)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"] == plain["usage"]
    stream = front.stream("/v1/completions", prompt=prompts, **fields)
    assert [stream.text(choice) for choice in range(4)] == expected
    assert [stream.deltas(choice)[0] for choice in range(4)] == [text for text in PROMPTS for _ in range(2)]


def test_stop_strings_are_looked_for_in_what_is_written_only(front: RunningFront):
    body = front.complete("of France", echo=True, stop=" of France").json()
    assert body["choices"][0]["text"] == "of France The capital"
    assert front.complete("hi", echo=False, max_tokens=200).json()["choices"][0]["text"] == REPLY


def test_with_logprobs_it_is_refused(front: RunningFront):
    refused = front.complete("hi", echo=True, logprobs=0)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "echo"
    assert front.complete("hi", echo=False, logprobs=0).status_code == 200
