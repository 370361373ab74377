"""The chat template of random Qwen3.5 checkpoints: what a conversation looks like to the model, here and through
transformers."""

import itertools
import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mstar.model.loader.tokenizer_files import ChatTemplateError, render_chat_template
from mstar.model.qwen3_5 import random_checkpoint

TEMPLATE = (Path(random_checkpoint.__file__).parent / "chat_template.jinja").read_text()
OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city – now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def user(content) -> dict:
    return {"role": "user", "content": content}


def assistant(content, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def call(name: str, **arguments) -> dict:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def render(messages, tools=None, *, generation=True, **variables) -> str:
    return render_chat_template(TEMPLATE, messages, tools=tools, variables=variables, add_generation_prompt=generation)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer") / "tiny"
    random_checkpoint.write_random_checkpoint("tiny", directory, seed=0)
    return AutoTokenizer.from_pretrained(directory)


def test_turns_and_the_generation_prompt():
    messages = [{"role": "system", "content": " Be brief. "}, user("Hi!\n"), assistant("Hello."), user("Bye")]
    history = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    )
    assert render(messages) == history + OPEN
    assert render(messages, enable_thinking=True) == history + OPEN
    assert render(messages, enable_thinking=False) == history + CLOSED
    assert render(messages, generation=False) == history


@pytest.mark.parametrize(
    "answer",
    [
        assistant("<think>\nHm.\n</think>\n\nFour."),
        assistant("Hm.\n</think>\n\nFour."),  # the opening was in the prompt
        assistant("Four.", reasoning_content="Hm."),
    ],
)
def test_reasoning_stays_until_the_next_question(answer):
    asked = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert render([user("2+2?"), answer], generation=False) == asked + "<think>\nHm.\n</think>\n\nFour.<|im_end|>\n"
    later = render([user("2+2?"), answer, user("Sure?")])
    assert later == asked + "Four.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n" + OPEN


def test_the_first_turns_of_a_longer_chat_are_those_of_the_shorter_one():
    turns = [
        user("a"),
        assistant("<think>\nx\n</think>\n\nb"),
        user("c"),
        assistant("<think>\ny\n</think>\n\nd"),
        user("e"),
    ]
    texts = [render(turns[:count], generation=False) for count in (1, 3, 5)]
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))


def test_tools_are_listed_as_json_lines_before_the_system_text():
    text = render([{"role": "system", "content": "Be brief."}, user("Hi")], [WEATHER, CLOCK])
    system = text.split("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert system.endswith("\n\nBe brief.")
    listed = re.search(r"<tools>\n(.*)\n</tools>", system, re.DOTALL)
    assert listed is not None
    assert [json.loads(line) for line in listed[1].splitlines()] == [WEATHER, CLOCK]
    assert "–" in listed[1], "letters are not escaped"
    assert "<tool_call>\n<function=" in system
    assert render([user("Hi")], [CLOCK]).startswith("<|im_start|>system\n# Tools\n")
    assert "# Tools" not in render([user("Hi")], [])


def test_calls_and_their_results():
    arguments = {"city": "Paris", "days": 3, "exact": True, "tags": ["a", "é"], "none": None}
    messages = [
        user("Weather?"),
        assistant(
            "Let me look.", reasoning_content="A tool.", tool_calls=[call("get_weather", **arguments), call("clock")]
        ),
        {"role": "tool", "tool_call_id": "c1", "content": "18 °C\n"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "noon"}]},
        assistant(None, tool_calls=[call("clock")]),
        {"role": "tool", "content": "one"},
    ]
    clock = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
    assert render(messages) == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nA tool.\n</think>\n\nLet me look.\n\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=exact>\ntrue\n</parameter>\n"
        '<parameter=tags>\n["a", "é"]\n</parameter>\n<parameter=none>\nnull\n</parameter>\n</function>\n</tool_call>\n'
        f"{clock}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n18 °C\n</tool_response>\n"
        "<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n<think>\n\n</think>\n\n{clock}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response><|im_end|>\n" + OPEN
    )


IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}], f"What is {IMAGE}?"),
        ([{"type": "image_url", "image_url": {"url": "u"}}, {"type": "image"}], IMAGE * 2),
        ([{"type": "video"}, "and", {"type": "video_url", "video_url": {"url": "u"}}], f"{VIDEO}and{VIDEO}"),
    ],
)
def test_media_stand_where_they_were_written(parts, text: str):
    assert render([user(parts)], generation=False) == f"<|im_start|>user\n{text}<|im_end|>\n"


def test_media_are_counted_over_the_conversation():
    messages = [user([{"type": "image"}]), assistant("ok"), user([{"type": "image"}, {"type": "video"}])]
    text = render(messages, generation=False, add_vision_id=True)
    assert re.findall(r"(?:Picture|Video) \d: ", text) == ["Picture 1: ", "Picture 2: ", "Video 1: "]


REFUSED = [
    ([], "there are no messages"),
    ([{"role": "system", "content": "x"}], "there is no message of the user"),
    ([user("a"), {"role": "system", "content": "x"}], "a system message must be the first one"),
    ([{"role": "system", "content": [{"type": "image"}]}, user("a")], "a system message cannot have images"),
    ([{"role": "system", "content": [{"type": "video"}]}, user("a")], "a system message cannot have videos"),
    ([user("a"), {"role": "robot", "content": "x"}], "a role that this model does not know: robot"),
    ([user([{"type": "audio"}])], "neither text, image nor video"),
    ([user({"text": "a"})], "neither text nor a list of parts"),
    ([user("a"), assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])], "are not an object"),
]


@pytest.mark.parametrize(("messages", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_the_template_refuses(messages, said: str):
    with pytest.raises(ChatTemplateError, match=re.escape(said)):
        render(messages)


CONVERSATIONS = [
    ([user("Hi")], None, {}),
    ([user("Hi")], [WEATHER, CLOCK], {"enable_thinking": False}),
    ([{"role": "system", "content": "S"}, user("a"), assistant("<think>x</think>y"), user("b")], [CLOCK], {}),
    (
        [user("a"), assistant("t", tool_calls=[call("f", a=1.5, b={"c": []})]), {"role": "tool", "content": "r"}],
        None,
        {},
    ),
    ([user([{"type": "image"}, {"type": "text", "text": "  two\n\nlines "}, {"type": "video"}])], None, {}),
]


@pytest.mark.parametrize(("messages", "tools", "variables"), CONVERSATIONS)
def test_transformers_renders_the_same(reference, messages, tools, variables):
    expected = reference.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
    )
    assert render(messages, tools, **variables) == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_that_was_begun_is_continued(thinking: bool):
    text = render_chat_template(
        TEMPLATE,
        [user("Say ABC"), assistant("AB")],
        variables={"enable_thinking": thinking},
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text == f"<|im_start|>user\nSay ABC<|im_end|>\n{CLOSED}AB"
