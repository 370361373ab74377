"""Errors in one shape: bodies that are no JSON, routes that are not there, keys, sizes, request ids."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.running_front import MODEL, RunningFront

from mstar.api_server.app import create_app
from mstar.api_server.front_state import FrontState
from mstar.config.api_keys import AcceptedKeys
from mstar.process_log import TextFormatter

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"5",
        b"null",
        b"true",
        b"{'a': 1}",
        b'{"model": "tiny",}',
        b"\xff\xfe{}",
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xed\xa0\x80"}',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b"{} {}",
    ],
)
def test_a_body_that_is_no_json_object(front: RunningFront, route: str, body: bytes):
    """B13."""
    error = error_of(front.http.post(route, content=body, headers=JSON), 400)
    assert error["code"] == "invalid_json" and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_of_another_content_type(front: RunningFront, kind: str):
    """B13."""
    body = json.dumps(GOOD).encode()
    error = error_of(front.http.post(CHAT, content=body, headers={"content-type": kind}), 400)
    assert error["code"] == "invalid_content_type"
    for legal in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
        assert front.http.post(CHAT, content=body, headers={"content-type": legal}).status_code == 200


@pytest.mark.parametrize("path", ["/v1", "/v1/moderations", "/v1/audio/speech", "/v1/images/generations", "/x/%0a/y"])
def test_an_unknown_route_says_what_there_is(front: RunningFront, path: str):
    error = error_of(front.http.post(path, json={}), 404)
    assert CHAT in error["message"] and "/v1/completions" in error["message"]


def test_a_wrong_method_says_which_is_right(front: RunningFront):
    answer = front.http.get(CHAT)
    error = error_of(answer, 405)
    assert "POST" in error["message"] and answer.headers["allow"] == "POST"
    assert error_of(front.http.put("/v1/models"), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/chat/completions/", "/metrics/"])
def test_a_slash_too_many_is_no_redirect(front: RunningFront, path: str):
    for method in ("GET", "POST"):
        assert front.http.request(method, path).status_code in (404, 405)
    error_of(front.http.post(path), 404 if path != "/v1/models/" else 405)


def test_a_compressed_body_is_refused_as_such(front: RunningFront):
    body = json.dumps(GOOD).encode()
    for encoding in ("gzip", "br", "GZIP, deflate"):
        error = error_of(front.http.post(CHAT, content=body, headers=JSON | {"content-encoding": encoding}), 415)
        assert error["code"] == "unsupported_content_encoding" and encoding.lower() in error["message"]
    assert front.http.post(CHAT, content=body, headers=JSON | {"content-encoding": "identity"}).status_code == 200


@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model(front: RunningFront, route: str):
    bodies = {
        CHAT: GOOD,
        "/v1/completions": {"prompt": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [5]},
    }
    error = error_of(front.http.post(route, json=bodies[route] | {"model": "gpt-5\r\nx"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    answer = front.http.post(route, json=bodies[route] | {"model": "org/tiny-alias"})
    assert answer.status_code == 200
    if route in (CHAT, "/v1/completions"):
        assert answer.json()["model"] == "org/tiny-alias"


def test_a_missing_model(front: RunningFront):
    error = error_of(front.http.post(CHAT, json={"messages": GOOD["messages"]}), 400)
    assert (error["param"], error["code"]) == ("model", "missing_required_parameter")


def test_request_ids_come_back(front: RunningFront):
    for given in ("mine", "a" * 128, "x-y_z.1:2/3"):
        assert front.http.post(CHAT, json=GOOD, headers={"x-request-id": given}).headers["x-request-id"] == given
    for given in ("", "a" * 129, "two words", "tab\tbed"):
        made = front.http.post(CHAT, json=GOOD, headers={"x-request-id": given}).headers["x-request-id"]
        assert made.startswith("req-") and made != given
    assert front.http.get("/nope", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    made = {front.http.get("/live").headers["x-request-id"] for _ in range(5)}
    assert len(made) == 5


@pytest.fixture
def small(front: RunningFront) -> TestClient:
    """A second application on the same conductor: keys, and a body limit of 1,000 bytes. Only for what is answered
    before the conductor is asked."""
    state = FrontState(
        handle=front.parts.handle,
        tokenizer=front.tokenizer,
        served_names=(MODEL,),
        max_body_bytes=1000,
        api_keys=AcceptedKeys(("right-key", "schlüssel", "root"), ("root",)),
        cors_origins=("https://a.example",),
    )
    return TestClient(create_app(state), raise_server_exceptions=False)


@pytest.mark.parametrize(
    "authorization",
    [None, "", "right-key", "Bearer", "Bearer ", "Bearer wrong", "Bearer right-key2", "Basic right-key"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/nope", "/openapi.json", "/v1/requests/x"])
def test_a_wrong_key(small: TestClient, authorization: str | None, path: str):
    """E25."""
    headers = {} if authorization is None else {"authorization": authorization}
    answer = small.get(path, headers=headers)
    error = error_of(answer, 401)
    assert error["type"] == "authentication_error" and answer.headers["www-authenticate"] == "Bearer"
    assert "right-key" not in answer.text


def test_a_right_key_and_probes_without_one(small: TestClient):
    assert small.get("/v1/models", headers={"authorization": "Bearer right-key"}).status_code == 200
    assert small.get("/v1/models", headers={"authorization": "bearer  right-key "}).status_code == 200
    second = "Bearer schlüssel".encode()
    assert small.get("/v1/models", headers={b"authorization": second}).status_code == 200
    for path in ("/health", "/live", "/ready", "/version", "/metrics"):
        assert small.get(path).status_code == 200, path


def test_what_others_do_is_for_admins(small: TestClient):
    for key, path, status in (
        ("root", "/v1/models", 200),
        ("root", "/debug/trace?seconds=0", 400),
        ("right-key", "/debug/trace?seconds=0", 403),
        ("root", "/debug/nope", 404),
        ("right-key", "/debug/nope", 403),
        ("wrong", "/debug/trace", 401),
    ):
        answer = small.get(path, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status, (key, path)
        if status == 403:
            assert error_of(answer, 403)["type"] == "permission_error"


def test_without_admin_keys_every_key_is_one(front: RunningFront):
    state = FrontState(
        handle=front.parts.handle,
        tokenizer=front.tokenizer,
        served_names=(MODEL,),
        max_body_bytes=1000,
        api_keys=AcceptedKeys(("a", "b")),
    )
    client = TestClient(create_app(state), raise_server_exceptions=False)
    for key in ("a", "b"):
        answer = client.get("/debug/trace?seconds=0", headers={"authorization": f"Bearer {key}"})
        assert error_of(answer, 400)["param"] == "seconds"


def test_a_body_above_the_limit(small: TestClient):
    key = {"authorization": "Bearer right-key"} | JSON
    at_limit = b'{"tokens": []' + b" " * (1000 - 14) + b"}"
    assert len(at_limit) == 1000
    assert small.post("/detokenize", content=at_limit, headers=key).status_code == 200
    error = error_of(small.post("/detokenize", content=at_limit + b" ", headers=key), 413)
    assert error["code"] == "body_too_large" and "1000" in error["message"]

    def chunks() -> Any:
        for _ in range(3):
            yield b" " * 400

    error_of(small.post("/detokenize", content=chunks(), headers=key), 413)
    error_of(small.post("/detokenize", content=b"{}", headers=key | {"content-length": "9" * 30}), 413)


def test_a_body_that_is_not_asked_for_ends_the_connection(small: TestClient):
    """The next request would be read as the body."""
    key = {"authorization": "Bearer right-key"} | JSON
    for headers, status in ((key | {"content-length": "2000"}, 413), (JSON, 401)):
        waiting = small.post("/detokenize", content=b"", headers=headers | {"expect": "100-continue"})
        assert (waiting.status_code, waiting.headers["connection"]) == (status, "close")
        assert "connection" not in small.post("/detokenize", content=b"", headers=headers).headers


def test_other_origins_are_allowed_only_when_configured(small: TestClient, front: RunningFront):
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert small.options(CHAT, headers=ask).headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in small.get("/live", headers={"origin": "https://b.example"}).headers
    assert "access-control-allow-origin" not in front.http.get("/live", headers=ask).headers


def test_what_is_asked_for_all_the_time_is_not_in_the_log(small: TestClient, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    key = {"authorization": "Bearer root"}
    for path in ("/live", "/page/main.js", "/debug/live", "/debug/graph"):
        assert small.get(path, headers=key).status_code == 200
    assert small.get("/debug/live").status_code == 401
    logged = [record.args[1:4] for record in caplog.records if isinstance(record.args, tuple) and len(record.args) == 6]
    assert logged == [("GET", "/debug/graph", 200), ("GET", "/debug/live", 401)]


def test_the_address_of_a_file_is_a_name_that_is_not_listed(front: RunningFront):
    address = "pypi:a==1.0/a/b.gguf"
    names = (MODEL, address, "other")
    state = FrontState(handle=front.parts.handle, tokenizer=front.tokenizer, served_names=names, max_body_bytes=1000)
    client = TestClient(create_app(state), raise_server_exceptions=False)
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]] == [MODEL, "other"]
    assert client.get(f"/v1/models/{address}").json()["id"] == address
    assert "this server has tiny, other." in error_of(client.get("/v1/models/wrong"), 404)["message"]
    state.served_names = (address,)
    assert state.listed_names == (address,)


def test_a_bug_is_a_500_in_shape(
    front: RunningFront, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(front.parts.handle, "submit", broken)
    answer = front.http.post(CHAT, json=GOOD)
    error = error_of(answer, 500)
    assert error["type"] == "server_error" and "a bug" not in error["message"]
    assert answer.headers["connection"] == "close", "the server closes it, and a request sent meanwhile would be lost"
    front.wait_until(lambda: "RuntimeError: a bug" in caplog.text)


def test_control_characters_never_reach_the_log_raw(tmp_path: Path):
    """E25: a forged line, terminal escapes, and a traceback whose message forges a line."""
    logger = logging.Logger("test")
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(TextFormatter("front"))
    logger.addHandler(handler)
    logger.info("prompt %s", "a\r\n2030-01-01 ERROR forged\x1b[31m\x00\x85\u2028\t\u202e\U000e0041é你\ud800")
    try:
        raise ValueError("x\n2030-01-01 ERROR forged\x1b[2J\u202e")
    except ValueError:
        logger.exception("failed")
    handler.close()
    text = (tmp_path / "log").read_bytes().decode()
    assert not any((ord(c) < 0x20 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c in "\u2028\u2029\u202e" for c in text)
    assert "\\r\\n2030-01-01 ERROR forged\\x1b[31m\\x00\\x85\\u2028\\t\\u202e\\U000e0041é你\\ud800" in text
    assert not any(line.startswith("2030") for line in text.splitlines())


def test_control_characters_in_a_prompt_are_only_text(front: RunningFront):
    assert front.chat("a\r\nb\x00\x1b[31m\u2028", max_tokens=1).status_code == 200
    error_of(front.http.post(CHAT, json=GOOD | {"model": "a\r\nforged\x1b"}), 404)
