"""Images that clients send to the running server in all the ways they do, and to a model that takes none."""

import io
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from PIL import Image
from support.qwen3_5_media import chat, picture
from support.qwen3_5_server import CHAT, NAME, Case, ServedQwen, ask, under_load
from support.server import Server

MAX_TOKENS = 8
QUESTION = "What is this?"
IMAGE = picture(70, 90, 1)


def saved(form: str, mode: str = "RGB", size: tuple[int, int] = (90, 70)) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(IMAGE)).resize(size).convert(mode).save(out, form)
    return out.getvalue()


def flat(side: int) -> bytes:
    """Of one colour, so that its file is small."""
    out = io.BytesIO()
    Image.new("1", (side, side)).save(out, "PNG", optimize=True)
    return out.getvalue()


LEGAL = {
    "jpeg": saved("JPEG"),
    "cmyk": saved("JPEG", "CMYK"),
    "grey": saved("PNG", "L"),
    "transparent": saved("PNG", "RGBA"),
    "palette": saved("GIF", "P"),
    "one pixel": picture(1, 1, 4),
    "one row": picture(150, 1, 5),
}
REFUSED = {
    "empty": b"",
    "no image": b"GIF that is none",
    "cut": saved("JPEG")[:300],
    "a thin line": picture(600, 2, 6),
    "enormous": flat(20_000),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> ServedQwen:
    return ServedQwen(tmp_path_factory.mktemp("tiny"), "tiny")


@pytest.fixture(scope="module")
def server(qwen: ServedQwen, tmp_path_factory) -> Iterator[Server]:
    with qwen.serving(tmp_path_factory.mktemp("log") / "log") as server:
        yield server
        server.wait_for(server.is_idle, 5, "everything given back")
        assert server.stop() == 0


def of_url(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "logprobs": True,
    }


def test_images_of_every_kind_at_once(server: Server, qwen: ServedQwen):
    cases = [Case(chat(("image", data), QUESTION), MAX_TOKENS) for data in LEGAL.values()]
    qwen.check(cases, under_load(server, cases, spread_s=0.0))
    assert len({tuple(qwen.expected(case)) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{b64encode(IMAGE).decode().rstrip('=')}",
        "data:image/png;base64," + "\n".join(b64encode(IMAGE).decode()[i : i + 76] for i in range(0, 40_000, 76)),
        f"data:image/jpeg;base64,{b64encode(IMAGE).decode()}",
        f"data:;base64,{b64encode(IMAGE).decode()}",
    ],
    ids=["no padding", "lines", "another type", "no type"],
)
def test_the_same_image_in_other_writings(server: Server, qwen: ServedQwen, url: str):
    response = server.client.post(CHAT, json=of_url(url))
    assert response.status_code == 200, response.text
    qwen.check([Case(chat(("image", IMAGE), QUESTION), MAX_TOKENS)], [response.json()])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_refused_and_the_next_is_answered(server: Server, qwen: ServedQwen, name: str):
    response = server.client.post(CHAT, json=of_url(f"data:image/png;base64,{b64encode(REFUSED[name]).decode()}"))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith("messages")
    assert len(error["message"]) < 300
    case = Case(chat(("image", IMAGE), QUESTION), MAX_TOKENS)
    qwen.check([case], [ask(server, case)])


def test_a_hundred_enormous_images_at_once(server: Server, qwen: ServedQwen):
    """E14: refused by their headers. Decoded, one bit a pixel, each would take 50 MB, and 1.2 GB in colour."""
    body = of_url(f"data:image/png;base64,{b64encode(REFUSED['enormous']).decode()}")
    server.client.post(CHAT, json=body)  # what the first one loads stays
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    largest = {process.pid: process.memory_info().rss for process in processes}
    before, log_bytes = dict(largest), server.log.stat().st_size

    def ask_for_it(_: int) -> int:
        return server.client.post(CHAT, json=body, timeout=120).status_code

    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(ask_for_it, index) for index in range(100)]
        while not all(future.done() for future in asked):
            for process in processes:
                largest[process.pid] = max(largest[process.pid], process.memory_info().rss)
            time.sleep(0.02)
    assert {future.result() for future in asked} == {400}
    assert all(largest[pid] - before[pid] < 40_000_000 for pid in before), (before, largest)
    assert server.log.stat().st_size - log_bytes < 100 * 1000, "lines of the log are short"
    case = Case(chat(("image", IMAGE), QUESTION), MAX_TOKENS)
    qwen.check([case], [ask(server, case)])


def test_a_model_of_text_alone_refuses_media_and_answers_text(tmp_path):
    qwen = ServedQwen(tmp_path, "tiny-text")
    cases = [Case(chat(text), 16) for text in ("Is water wet?", "Name one colour. " * 30)]
    with qwen.serving(tmp_path / "log") as server:
        response = server.client.post(CHAT, json=of_url(f"data:image/png;base64,{b64encode(IMAGE).decode()}"))
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"] == "This model takes no image as input, only text."
        assert response.json()["error"]["param"] == "messages[0].content[0].type"
        qwen.check(cases, under_load(server, cases, spread_s=0.0))
        assert server.client.get("/v1/models").json()["data"][0]["modalities"]["input"] == ["text"]
        assert server.stop() == 0
