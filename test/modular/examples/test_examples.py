"""Every example runs as a user starts it: against a real front whose worker is scripted, or in a process alone."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import byte_level_bpe, tiny_llama, write_directory
from support.command_line import deployment_file
from support.qwen3_5_front import build_qwen_spec, image_bytes, running_qwen
from support.repository import ROOT
from support.running_front import RunningFront

from examples import offline
from mstar.communication.host_tensors import from_numpy
from mstar.communication.messages import HostTensor, OpenRequest

END_TOKEN = 2
EXAMPLES = ROOT / "examples"
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    """Of a model that thinks, calls tools and takes images."""
    with running_qwen(build_qwen_spec(tmp_path_factory.mktemp("qwen"))) as front:
        yield front


def run(name: str, *arguments: object) -> str:
    """What an example printed."""
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("name", "arguments"), [("chat", ("127.0.0.1:1",)), ("many_at_once", ("127.0.0.1:1",)), ("vision", ())]
)
def test_without_a_server_or_an_argument_it_ends_with_one_line(name: str, arguments: tuple[str, ...]):
    command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert ("mstar serve starts one" if arguments else "vision.py PICTURE [URL]") in result.stderr


def test_chat(front: RunningFront):
    front.reply("to think\n</think>\n\nIt is Paris.")
    said = run("chat", front.base_url).splitlines()
    assert said[:2] == ["It is Paris."] * 2 and said[2].startswith("Usage(")
    first, second = front.openings()[-2:]
    assert first.prompt_ids is not None and second.prompt_ids is not None
    assert first.prompt_ids.shape[0] < second.prompt_ids.shape[0], "the second turn has the first in it"


def test_streaming(front: RunningFront):
    front.reply("to think\n</think>\n\nOnce upon a time.")
    said = re.sub(r"\x1b\[\dm", "", run("streaming", front.base_url))
    assert re.fullmatch(r"to thinkOnce upon a time\.\n\(stop\)\n\d+ tokens\n", said)


def test_many_at_once(front: RunningFront):
    front.reply("</think>\n\nIn Europe.")
    lines = run("many_at_once", front.base_url).splitlines()
    assert lines == [f"{city}: In Europe." for city in ("Paris", "Rome", "Berlin", "Madrid", "Vienna", "Lisbon")]


def test_vision(front: RunningFront, tmp_path: Path):
    picture = tmp_path / "picture.png"
    picture.write_bytes(image_bytes())
    front.reply("to see\n</think>\n\nA circle.")
    assert run("vision", picture, front.base_url) == "it thought: to see\nA circle.\n"
    assert front.openings()[-1].media, "the picture reached the worker"


def test_tools(front: RunningFront):
    end = front.end_token()
    asks, answers = (
        [*front.tokenizer.encode(text).ids, end] for text in (f"</think>\n\n{CALL}", "</think>\n\nClear, 21 degrees.")
    )
    replies = iter((asks, answers))

    def script(_: OpenRequest) -> Iterable[int]:
        return next(replies)

    front.worker.script = script
    assert run("tools", front.base_url) == 'weather({"city":"Paris"})\nClear, 21 degrees.\n'


def test_structured_output(front: RunningFront):
    city = {"name": "Paris", "country": "France", "size": "large", "has_river": True}
    front.reply(f"</think>\n\n{json.dumps(city)}")
    assert run("structured_output", front.base_url) == "Paris in France is large; a river: True\n"
    assert front.openings()[-1].sampling.grammar is not None, "the worker was told the schema"


def test_embeddings(front: RunningFront):
    vectors = iter(((0.6, 0.8), (1.0, 0.0), (0.0, 1.0), (-0.6, -0.8)))

    def embed(_: OpenRequest) -> HostTensor:
        return from_numpy(np.array(next(vectors), np.float32))

    front.worker.embedding = embed
    lines = run("embeddings", front.base_url).splitlines()
    assert [line.split()[0] for line in lines] == ["0.600", "0.800", "-1.000"]


def test_offline(tmp_path: Path):
    """The texts are those of transformers' model of the same weights."""
    weights = tiny_llama(initializer_range=0.5)
    write_directory(tmp_path / "checkpoint", weights)
    file = deployment_file(tmp_path, model="llama", checkpoint=str(tmp_path / "checkpoint"), dtype="float32")
    tokenizer = byte_level_bpe()
    lines = ""
    for question in offline.QUESTIONS:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
        answer = weights.generate(ids, max_new_tokens=offline.MAX_TOKENS, do_sample=False, eos_token_id=END_TOKEN)
        lines += f"{question} {tokenizer.decode(answer[0, ids.shape[1] :].tolist())}\n"
    assert run("offline", file) == lines


def test_each_example_has_a_test():
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in tested) == []
