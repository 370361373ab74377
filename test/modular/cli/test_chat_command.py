"""`mstar chat` with a scripted server: through a pipe in this process, and on a terminal in one of its own."""

import itertools
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.command_line import command
from support.qwen3_5_front import build_qwen_spec, running_qwen
from support.running_front import RunningFront, build_spec
from support.tiny_text import build_tokenizer

from mstar.communication import host_tensors
from mstar.config.schema import ServerConfig

KEY = "sesame"
REPLY = "  two [/x] :smile:\n\n    indented\tand 你好 😀.\n"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


@pytest.fixture(scope="module")
def _front(tmp_path_factory) -> Iterator[RunningFront]:
    spec = build_spec(tmp_path_factory.mktemp("tokenizer"), server=ServerConfig(api_keys=(KEY,)))
    with RunningFront(spec, build_tokenizer(), lambda _: ()) as front:
        yield front


@pytest.fixture
def front(_front: RunningFront) -> Iterator[RunningFront]:
    _front.reply(REPLY)
    _front.worker.step_s = 0.0
    yield _front
    _front.wait_until(lambda: _front.worker.num_open == 0)


def prompt(front: RunningFront) -> str:
    """The last conversation that the worker was given, as the chat template wrote it."""
    ids = front.openings()[-1].prompt_ids
    assert ids is not None
    return front.tokenizer.decode(host_tensors.to_numpy(ids).tolist(), skip_special_tokens=False)


def rendered(*messages: tuple[str, str]) -> str:
    turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return f"{turns}<|im_start|>assistant\n"


def chat(front: RunningFront, *lines: str, options: tuple[object, ...] = ("--api-key", KEY)):
    return command("chat", "--url", front.base_url, *options, typed="".join(f"{line}\n" for line in lines))


def test_a_byte_that_is_no_utf8_is_read_as_such(front: RunningFront):
    result = command(
        "chat", "--url", front.base_url, "--api-key", KEY, "--system", "se\udcf1or", typed=b"caf\xe9\n/exit\n"
    )
    assert result.exit_code == 0 and REPLY in result.stdout
    assert prompt(front) == rendered(("system", "se\ufffdor"), ("user", "caf\ufffd"))


def test_answers_are_shown_as_they_are(front: RunningFront):
    result = chat(front, "hi", "/exit")
    assert result.exit_code == 0
    greeting, _, rest = result.stdout.partition("\n")
    assert greeting == f"tiny at {front.base_url}; /reset starts over, /exit ends"
    assert rest == f"you: {REPLY}\nyou: "


def test_a_command_that_there_is_not_is_no_question(front: RunningFront):
    result = chat(front, "/help", "/usr/bin is full")
    assert "there is no /help; /reset starts over" in result.stdout
    assert prompt(front) == rendered(("user", "/usr/bin is full"))


def test_a_conversation_grows_until_it_is_reset(front: RunningFront):
    front.reply("yes")
    options = ("--api-key", KEY, "--system", "Be brief.", "--temperature", 0.25)
    assert chat(front, "one", "", "two", options=options).exit_code == 0
    opening = ("system", "Be brief."), ("user", "one")
    assert prompt(front) == rendered(*opening, ("assistant", "yes"), ("user", "two"))
    assert front.openings()[-1].sampling.temperature == 0.25
    chat(front, "one", "/reset", "three", options=options)
    assert prompt(front) == rendered(opening[0], ("user", "three"))


def test_the_end_of_the_input_ends_it(front: RunningFront):
    assert chat(front).exit_code == 0


def test_control_characters_do_not_reach_the_terminal(front: RunningFront):
    front.reply("a\x1b[2Jb\x07\x9b1mc\r\nd")
    assert "you: a[2Jb1mc\nd\nyou: " in chat(front, "hi").stdout


def test_reasoning_is_shown_and_not_part_of_the_answer(tmp_path: Path):
    with running_qwen(build_qwen_spec(tmp_path)) as qwen:
        qwen.reply("So [bold] it\n\nis.\n</think>\n\n  two")
        result = chat(qwen, "hi", "and?", options=())
        assert result.stdout.partition("\n")[2] == 2 * "you: So [bold] it\n\nis.\n\n  two\n" + "you: \n"
        assert "  two<|im_end|>" not in prompt(qwen) and "two<|im_end|>" in prompt(qwen)
        assert "So [bold]" not in prompt(qwen)


def test_an_error_is_shown_and_its_question_forgotten(front: RunningFront):
    result = chat(front, "much " * 300, "hi")
    assert "maximum context length is 256 tokens" in result.stdout
    assert result.stdout.endswith(f"you: {REPLY}\nyou: \n")
    assert prompt(front) == rendered(("user", "hi"))


def test_an_error_in_the_middle_of_an_answer(front: RunningFront):
    words = itertools.cycle(front.tokenizer.encode(" the").ids)
    front.worker.script = lambda _: words
    front.worker.step_s = 0.02

    def fail() -> None:
        front.wait_until(lambda: bool(front.worker.rows))
        time.sleep(0.2)
        front.call(lambda: front.worker.fail(next(iter(front.worker.rows)), "logits are not [finite]"))

    thread = threading.Thread(target=fail)
    thread.start()
    result = chat(front, "hi")
    thread.join()
    assert re.search(r"you: ( the)+\nlogits are not \[finite\]\nyou: \n$", result.stdout)


def test_a_wrong_key_is_what_it_says(front: RunningFront):
    result = chat(front, "hi", options=())
    assert result.exit_code == 1
    assert "API key" in result.stdout and "give a key with --api-key" in result.stdout.replace("\n", " ")
    assert "no server answers" not in result.stdout
    assert "Traceback" not in result.output


def test_nothing_there():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    result = command("chat", "--url", f"http://127.0.0.1:{port}", typed="hi\n")
    assert result.exit_code == 1
    assert f"no server answers at http://127.0.0.1:{port}" in result.stdout
    assert "mstar serve starts one" in result.stdout


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": []}'])
def test_something_else_there(body: bytes):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.handle_request)
        thread.start()
        result = command("chat", "--url", f"http://127.0.0.1:{other.server_port}", typed="hi\n")
        thread.join()
    assert result.exit_code == 1
    assert "list of models" in result.stdout or "lists no model" in result.stdout


class Terminal:
    """A process on a terminal of 80 columns; `text` is what it has shown, without colours."""

    def __init__(self, *arguments: str) -> None:
        self._main, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mstar.cli", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            # A shell starts what runs in the background with the interrupt ignored, and that is inherited.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(inner)
        self._raw = b""

    @property
    def text(self) -> str:
        return CONTROL.sub("", self._raw.decode("utf-8", "replace"))

    def wait_for(self, pattern: str, after: int = 0) -> int:
        """Where in `text` the match ends."""
        deadline = time.monotonic() + 60
        while not (match := re.compile(pattern).search(self.text, after)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            if select.select([self._main], [], [], 0.1)[0]:
                self._raw += os.read(self._main, 65536)
        return match.end()

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def test_on_a_terminal_an_interrupt_ends_the_answer_not_the_conversation(front: RunningFront):
    words = itertools.cycle(front.tokenizer.encode(" the").ids)
    front.worker.script = lambda _: words
    front.worker.step_s = 0.05  # so that a late interrupt does not fill the context
    terminal = Terminal("chat", "--url", front.base_url, "--api-key", KEY)
    try:
        at = terminal.wait_for("you: ")
        terminal.type("hi\n")
        at = terminal.wait_for(r"( the){3}", at)
        terminal.process.send_signal(signal.SIGINT)
        at = terminal.wait_for("you: ", at)
        front.wait_until(lambda: front.worker.num_open == 0)
        front.reply("yes.")
        terminal.type("and?\n")
        at = terminal.wait_for(r"and\?\nyes\.\nyou: ", at - len("you: "))
        terminal.type("\x04")
        assert terminal.process.wait(20) == 0
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()
    assert re.fullmatch(
        re.escape(rendered(("user", "hi"))) + r"( the)+<\|im_end\|>\n" + re.escape(rendered(("user", "and?"))),
        prompt(front),
    )
