"""Images and videos of requests: data URLs in every legal variant (E15), what a URL may make the server do (E16)."""

import asyncio
import gc
import itertools
import threading
import time
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from support.media_site import Site, media_site, resolver
from support.qwen3_5_front import build_qwen_spec, data_url, image_bytes, image_part, running_qwen
from support.running_front import MODEL, RunningFront

from mstar.api_server.checked_network import is_public
from mstar.api_server.media import MediaLoader, MediaSource, data_url_bytes
from mstar.conductor.events import RefusedError
from mstar.config.schema import MediaConfig, ServerConfig
from mstar.model.base import MediaPart

PNG = image_bytes()
FIELD = "messages[0].content[1].image_url.url"
MAX_BYTES = 100_000
MAX_PIXELS = 200_000


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with media_site() as site:
        yield site


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[RunningFront]:
    """It may fetch from the site, which has a private address."""
    spec = build_qwen_spec(tmp_path_factory.mktemp("qwen"))
    hosts = (f"127.0.0.1:{site.port}",)
    media = MediaConfig(allowed_hosts=hosts, allows_private_addresses=True, max_bytes=MAX_BYTES, timeout_s=1.5)
    setup = replace(spec.setup, max_media_pixels=MAX_PIXELS)
    with running_qwen(replace(spec, setup=setup, server=ServerConfig(media=media))) as front:
        front.reply("</think>ok")
        yield front


def content(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "What is this?"}


def digests(front: RunningFront, *urls: str) -> list[bytes]:
    """Digests of the media that the worker got for a request with these images."""
    answer = front.chat(messages=content(TEXT, *map(image_part, urls)), max_tokens=1)
    assert answer.status_code == 200, answer.text
    return [span.digest for span in front.openings()[-1].media]


def refusal(front: RunningFront, *urls: str) -> dict[str, Any]:
    before = len(front.openings())
    answer = front.chat(messages=content(TEXT, *map(image_part, urls)), max_tokens=1)
    assert answer.status_code == 400, answer.text
    assert len(front.openings()) == before, "no worker heard of it"
    assert front.chat(max_tokens=1).status_code == 200
    return answer.json()["error"]


def variants() -> dict[str, str]:
    text = b64encode(PNG).decode()
    return {
        "no padding": f"data:image/png;base64,{text.rstrip('=')}",
        "line breaks": "data:image/png;base64,"
        + "\r\n".join(text[i : i + 76] for i in range(0, len(text), 76))
        + "\n ",
        "url-safe": f"data:image/png;base64,{urlsafe_b64encode(PNG).decode()}",
        "percent-encoded": f"data:image/png;base64,{quote(text, safe='')}",
        "wrong type": f"data:image/jpeg;base64,{text}",
        "no image's type": f"data:text/plain;charset=utf-8;base64,{text}",
        "no type": f"data:;base64,{text}",
        "upper case": f"DATA:IMAGE/PNG;BASE64,{text}",
    }


@pytest.mark.parametrize("name", variants())
def test_legal_data_urls_are_the_same_image(qwen: RunningFront, name: str):
    """E15."""
    assert digests(qwen, variants()[name]) == digests(qwen, data_url(PNG))


@pytest.mark.parametrize(
    ("form", "mode", "size"),
    [("GIF", "P", (48, 32)), ("JPEG", "CMYK", (48, 32)), ("PNG", "RGB", (1, 1)), ("PNG", "RGBA", (7, 3)),
     ("PNG", "L", (48, 32)), ("WEBP", "RGB", (48, 32)), ("BMP", "RGB", (48, 32))],
)  # fmt: skip
def test_legal_files_work(qwen: RunningFront, form: str, mode: str, size: tuple[int, int]):
    """E15."""
    (digest,) = digests(qwen, data_url(image_bytes(form, mode=mode, size=size)))
    assert digest


WRONG_URLS = {
    "empty": "data:image/png;base64,",
    "only white space": "data:image/png;base64, \n",
    "only padding": "data:image/png;base64,==",
    "no data": "data:image/png;base64",
    "not base64": "data:image/png,%89PNG",
    "wrong characters": "data:image/png;base64,iVBORw0KGgo*",
    "padding inside": "data:image/png;base64,iVBO==Rw0KGgo=",
    "a length that cannot be": "data:image/png;base64,iVBOR",
    "not ASCII": "data:image/png;base64,ïVBO",
    "no image": data_url(b"hello world, this is no image at all"),
    "a cut PNG": data_url(image_bytes()[:-40]),
    "a cut JPEG": data_url(image_bytes("JPEG", size=(300, 300))[:1200]),
    "too large": data_url(b"\0" * (MAX_BYTES + 1)),
    "a path": "/etc/passwd",
    "a bare name": "picture.png",
    "nothing": "",
    "a file": "file:///etc/passwd",
    "a file of a host": "file://localhost/etc/passwd",
    "ftp": "ftp://127.0.0.1/x",
    "gopher": "gopher://127.0.0.1:70/x",
    "no host": "http:///x",
    "a user": "http://user:secret@127.0.0.1/x",
    "a bad port": "http://127.0.0.1:99999/x",
    "a bad address": "http://[::1/x",
    "a bad name": "http://" + "a" * 64 + ".example/x",
    "control characters": "http://127.0.0.1/x\r\nHost: other",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_URLS)
def test_wrong_urls_are_named(qwen: RunningFront, name: str):
    """E15, E16."""
    error = refusal(qwen, data_url(PNG), WRONG_URLS[name])
    assert error["param"] in ("messages", "messages[0].content[2].image_url.url") and len(error["message"]) < 500
    assert (error["param"] == "messages") == (name in ("no image", "a cut PNG", "a cut JPEG"))
    assert "secret" not in error["message"] or name == "a user"


def test_pixels_of_all_media_are_bounded(qwen: RunningFront):
    large = data_url(image_bytes("JPEG", size=(400, 300)))
    assert len(digests(qwen, large, data_url(PNG))) == 2
    error = refusal(qwen, large, large)
    assert f"have {2 * 400 * 300} pixels together; at most {MAX_PIXELS} are read" in error["message"]
    assert error["param"] == "messages"


def test_a_url_that_may_be_fetched(qwen: RunningFront, site: Site):
    site.pages["/picture?size=1&x=%20"] = (200, {"content-type": "text/html"}, PNG)
    assert digests(qwen, site.url("/picture?size=1&x=%20")) == digests(qwen, data_url(PNG))
    assert site.headers[-1]["accept-encoding"] == "identity" and site.headers[-1]["host"] == f"127.0.0.1:{site.port}"
    other = image_bytes("JPEG", size=(64, 64))
    site.pages["/other"] = (200, {}, other)
    urls = [site.url("/other"), data_url(PNG), site.url("/picture?size=1&x=%20")]
    assert digests(qwen, *urls) == [digest for url in urls for digest in digests(qwen, url)], "in written order"


def test_redirects_are_followed_and_counted(qwen: RunningFront, site: Site):
    site.pages["/end"] = (200, {}, PNG)
    site.pages["/3"] = (302, {"location": "/end"}, b"")
    site.pages["/2"] = (301, {"location": "3"}, b"")
    site.pages["/1"] = (307, {"location": site.url("/2")}, b"")
    site.pages["/0"] = (308, {"location": "/1"}, b"")
    assert digests(qwen, site.url("/1")) == digests(qwen, data_url(PNG))
    assert "more than 3" in refusal(qwen, site.url("/0"))["message"]
    site.pages["/circle"] = (302, {"location": "/circle"}, b"")
    refusal(qwen, site.url("/circle"))


@pytest.mark.parametrize(
    "location",
    ["http://169.254.169.254/latest/meta-data/", "http://localhost/x", "file:///etc/passwd", "//other.example/x",
     "http://127.0.0.1/x", "data:image/png;base64,AAAA", "http://127.0.0.1:1/", "", "\\\\other\\x",
     "http://[", "//[::1", "http://[x]/", "//127.0.0.1:x/", "http://127.0.0.1:99999/"],
)  # fmt: skip
def test_a_redirect_elsewhere_is_not_followed(qwen: RunningFront, site: Site, location: str):
    """E16: every step is checked as the first URL was."""
    site.pages["/away"] = (302, {"location": location}, b"")
    error = refusal(qwen, site.url("/away"))
    assert error["param"] == FIELD and error["code"] in ("media_url_refused", "media_not_fetched")


def test_sizes_are_bounded(qwen: RunningFront, site: Site):
    """E16: an endless body, one that says too much, many that are too much together."""
    site.pages["/endless"] = (200, {}, itertools.repeat(b"\0" * 10_000))
    site.pages["/announced"] = (200, {"content-length": str(10**12)}, b"\0")
    site.pages["/huge"] = (200, {"content-length": "9" * 30}, b"\0")
    for path in ("/endless", "/announced", "/huge"):
        began = time.monotonic()
        error = refusal(qwen, site.url(path))
        assert time.monotonic() - began < 1.4
        assert error["code"] in ("media_too_large", "media_not_fetched") and error["param"] == FIELD
    site.pages["/half"] = (200, {}, b"\0" * (MAX_BYTES * 2 // 3))
    assert refusal(qwen, site.url("/half"), site.url("/half"))["code"] == "media_too_large"
    half = data_url(b"\0" * (MAX_BYTES * 2 // 3))
    assert refusal(qwen, half, half)["code"] == "media_too_large"
    assert refusal(qwen, half, site.url("/half"))["code"] == "media_too_large"


def test_times_are_bounded(qwen: RunningFront, site: Site):
    """E16: a site that says nothing."""
    gate = threading.Event()

    def silence() -> Iterator[bytes]:
        yield b"\0"
        gate.wait(20)

    site.pages["/silent"] = (200, {}, silence())
    began = time.monotonic()
    error = refusal(qwen, site.url("/silent"))
    gate.set()
    assert 1.4 < time.monotonic() - began < 6
    assert error["code"] == "media_not_fetched" and "1.5 s" in error["message"]


@pytest.mark.parametrize(
    ("status", "headers"),
    [(404, {}), (500, {}), (204, {}), (206, {}), (304, {}), (200, {"content-encoding": "gzip"})],
)
def test_other_answers_are_refused(qwen: RunningFront, site: Site, status: int, headers: dict[str, str]):
    site.pages["/answer"] = (status, headers, PNG if status not in (204, 304) else b"")
    assert refusal(qwen, site.url("/answer"))["code"] == "media_not_fetched"


def test_by_default_nothing_is_fetched(site: Site):
    site.asked.clear()
    for url in (site.url("/x"), "http://169.254.169.254/", "https://example.com/x.png", "http://[::1]/"):
        error = refused(MediaLoader(), url)
        assert "allowed_hosts" in error.message and error.code == "media_url_refused"
    assert site.asked == []


def refused(loader: MediaLoader, url: str) -> Any:
    async def load() -> list[bytes]:
        return await loader.load([MediaSource(url, FIELD)])

    with pytest.raises(RefusedError) as caught:
        asyncio.run(load())
    assert caught.value.failure.param == FIELD and caught.value.failure.status == 400
    return caught.value.failure


def loaded(loader: MediaLoader, url: str) -> bytes:
    async def load() -> list[bytes]:
        return await loader.load([MediaSource(url, FIELD)])

    return asyncio.run(load())[0]


ADDRESSES = {
    "public.example": ["93.184.215.14"],
    "mixed.example": ["93.184.215.14", "10.0.0.1"],
    "loop.example": ["127.0.0.1"],
    "zero.example": ["0.0.0.0"],
    "metadata.example": ["169.254.169.254"],
    "2130706433": ["127.0.0.1"],
    "mapped.example": ["::ffff:127.0.0.1"],
}


@pytest.mark.parametrize("host", [name for name in ADDRESSES if name != "public.example"])
def test_names_of_private_addresses_are_refused(monkeypatch: pytest.MonkeyPatch, site: Site, host: str):
    """E16: whatever the allow-list says, one private address is enough."""
    monkeypatch.setattr("socket.getaddrinfo", resolver(ADDRESSES))
    site.asked.clear()
    loader = MediaLoader(MediaConfig(allowed_hosts=(f"*:{site.port}",)))
    error = refused(loader, site.url("/x", host))
    assert error.code == "media_url_refused" and "not public" in error.message
    assert site.asked == []


def test_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch, site: Site):
    """A name that leads somewhere else a moment later is not asked again."""
    site.pages["/x"] = (200, {}, b"the file")
    calls = []

    def getaddrinfo(host: str, port: int, *args: object, **kwargs: object) -> Any:
        calls.append(host)
        return resolver({"site.example": ["127.0.0.1"]})(host, port)

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    allowed = MediaConfig(allowed_hosts=(f"site.example:{site.port}",), allows_private_addresses=True)
    assert loaded(MediaLoader(allowed), site.url("/x", "SITE.example.")) == b"the file"
    assert calls == ["site.example"]
    assert site.headers[-1]["host"] == f"site.example:{site.port}"


def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch, site: Site):
    site.pages["/x"] = (200, {}, b"the file")
    monkeypatch.setattr("socket.getaddrinfo", resolver({"site.example": ["127.0.0.2", "127.0.0.1"]}))
    allowed = MediaConfig(allowed_hosts=(f"site.example:{site.port}",), allows_private_addresses=True)
    assert loaded(MediaLoader(allowed), site.url("/x", "site.example")) == b"the file"
    assert refused(MediaLoader(allowed), site.url("/x", "other.example")).code == "media_url_refused"
    monkeypatch.setattr("socket.getaddrinfo", resolver({}))
    assert refused(MediaLoader(allowed), site.url("/x", "site.example")).code == "media_not_fetched"


@pytest.mark.parametrize(
    ("entry", "url", "is_allowed"),
    [
        ("images.example.com", "https://images.example.com/x", True),
        ("Images.Example.com", "https://IMAGES.example.com/x", True),
        ("images.example.com", "http://images.example.com/x", True),
        ("images.example.com", "https://images.example.com:8443/x", False),
        ("images.example.com:8443", "https://images.example.com:8443/x", True),
        ("images.example.com:8443", "https://images.example.com/x", False),
        ("images.example.com", "https://images.example.com.evil.org/x", False),
        ("images.example.com", "https://evil.org/images.example.com", False),
        ("images.example.com", "https://evil.org?images.example.com", False),
        ("images.example.com", "https://evil.org#images.example.com", False),
        ("images.example.com", "https://evil.org\\images.example.com", False),
        ("*.example.com", "https://a.b.example.com/x", True),
        ("*.example.com", "https://example.com/x", False),
        ("*.example.com", "https://evilexample.com/x", False),
        ("*", "https://anything.org/x", True),
        ("*", "https://anything.org:444/x", False),
        ("xn--bcher-kva.example", "https://bücher.example/x", True),
    ],
)
def test_allowed_hosts(monkeypatch: pytest.MonkeyPatch, entry: str, url: str, is_allowed: bool):
    """An allowed one is looked up, and has no address here."""
    monkeypatch.setattr("socket.getaddrinfo", resolver({}))
    error = refused(MediaLoader(MediaConfig(allowed_hosts=(entry,))), url)
    assert (error.code == "media_not_fetched") == is_allowed, error.message


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True), ("2606:4700::1111", True), ("64:ff9b::8.8.8.8", True), ("::ffff:8.8.8.8", True),
        ("127.0.0.1", False), ("127.9.9.9", False), ("10.1.2.3", False), ("172.16.0.1", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False),
        ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("::", False), ("fe80::1%eth0", False),
        ("fc00::1", False), ("ff02::1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::10.0.0.1", False),
        ("2002:7f00:1::", False), ("2002:a00:1::", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool):
    assert is_public(address) == public


@given(st.binary(min_size=1, max_size=200), st.data())
def test_base64_in_any_dress(data: bytes, draw: st.DataObject):
    text = (urlsafe_b64encode if draw.draw(st.booleans()) else b64encode)(data).decode()
    text = text.rstrip("=") if draw.draw(st.booleans()) else text
    for at in sorted(draw.draw(st.sets(st.integers(0, len(text)), max_size=5)), reverse=True):
        text = text[:at] + draw.draw(st.sampled_from([" ", "\n", "\r\n", "\t"])) + text[at:]
    assert data_url_bytes(MediaSource(f"data:x/y;base64,{text}", FIELD), 200) == data


def test_videos_and_messages_that_have_no_media(qwen: RunningFront):
    video = {"type": "video_url", "video_url": {"url": "nowhere"}}
    answer = qwen.chat(messages=content(TEXT, video))
    assert answer.json()["error"]["param"] == "messages[0].content[1].video_url.url"
    for role in ("system", "assistant"):
        messages = [{"role": role, "content": [image_part(data_url(PNG))]}, {"role": "user", "content": "x"}]
        error = qwen.chat(messages=messages).json()["error"]
        assert error["param"] == "messages[0].content[0].type" and role in error["message"]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [image_part(data_url(PNG))]},
    ]
    assert qwen.chat(messages=messages, max_tokens=1).status_code == 200


def test_tokenize_counts_media(qwen: RunningFront):
    messages = content(TEXT, image_part(data_url(PNG)))
    count = qwen.http.post("/tokenize", json={"messages": messages}).json()["count"]
    assert count == qwen.chat(messages=messages, max_tokens=1).json()["usage"]["prompt_tokens"]


def test_the_client_sends_images(qwen: RunningFront):
    with openai.OpenAI(base_url=qwen.base_url + "/v1", api_key="unused", max_retries=0, timeout=20) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=content(TEXT, image_part(data_url(PNG)) | {}), max_tokens=5
        )
        assert answer.usage.prompt_tokens > 10
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=content(image_part("data:,")))
        assert caught.value.param == "messages[0].content[0].image_url.url"


def test_a_model_of_text_takes_none(front: RunningFront, tmp_path_factory: pytest.TempPathFactory):
    """By its card, or by its checkpoint."""
    for part, kind in (
        (image_part(data_url(PNG)), "image"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video"),
    ):
        error = front.chat(messages=content(TEXT, part)).json()["error"]
        assert error["param"] == "messages[0].content[1].type" and f"takes no {kind}" in error["message"]
    with running_qwen(build_qwen_spec(tmp_path_factory.mktemp("text"), "tiny-text")) as text_only:
        answer = text_only.chat(messages=content(TEXT, image_part(data_url(PNG))))
        assert answer.status_code == 400 and "takes no image" in answer.json()["error"]["message"]
        assert text_only.http.get("/v1/models").json()["data"][0]["modalities"]["input"] == ["text"]


def test_files_are_not_held_while_an_answer_is_written(qwen: RunningFront):
    file = image_bytes("BMP", size=(96, 96))
    body = {"model": MODEL, "messages": content(TEXT, image_part(data_url(file))), "stream": True}

    def held() -> list[str]:
        gc.collect()
        found = [type(thing).__name__ for thing in gc.get_objects() if type(thing) is MediaPart and thing.data == file]
        return found + ["_body" for thing in gc.get_objects() if type(thing) is Request and hasattr(thing, "_body")]

    part = MediaPart("image", file)
    assert held() == ["MediaPart"], "the search sees one that is held"
    del part
    word = qwen.tokenizer.encode(" the").ids
    qwen.worker.script = lambda _: itertools.cycle(word)
    qwen.call(lambda: setattr(qwen.worker, "step_s", 0.01))
    try:
        with qwen.http.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # whose end closes the connection
            next(lines)
            assert held() == []
            assert qwen.parts.handle.num_live == 1 and next(lines) == ""
    finally:
        qwen.call(lambda: setattr(qwen.worker, "step_s", 0.0))
        qwen.reply("</think>ok")
