"""Requests over raw sockets that offer another protocol (RFC 9110, 7.8): each is answered as if it did not."""

import json
import re
import socket
import time
from collections.abc import Iterable

import pytest
from support.running_front import MODEL, RunningFront

H2C = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
"""What curl and Java's client send with http URLs."""
WEBSOCKET = b"Upgrade: websocket\r\nConnection: keep-alive, upgrade\r\n"
LAST = b"connection: close\r\n"
SIZED, CHUNKED = b"", b"transfer-encoding: chunked\r\n"


def completion(num_tokens: int, fields: bytes = b"", version: bytes = b"1.1") -> bytes:
    """The answer says by its length which request it belongs to."""
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": num_tokens}).encode()
    if CHUNKED in fields:
        body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:], b""))
    else:
        fields += b"content-length: %d\r\n" % len(body)
    return (
        b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-type: application/json\r\n%b\r\n" % (version, fields)
        + body
    )


def look(fields: bytes = b"") -> bytes:
    """A request without a body."""
    return b"GET /live HTTP/1.1\r\nhost: x\r\n%b\r\n" % fields


def answers(front: RunningFront, pieces: Iterable[bytes], pause_s: float = 0.0) -> list[int]:
    """Of each answer on one connection, until the server closes it: how many tokens it counts, or else its status."""
    host, port = front.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        data = b""
        while part := connection.recv(1 << 16):
            data += part
    found = []
    for answer in re.split(rb"HTTP/1\.1 (?=\d{3} )", data)[1:]:
        _, found_usage, count = answer.partition(b'"completion_tokens":')
        found.append(int(count.split(b",")[0].split(b"}")[0]) if found_usage else int(answer.split()[0]))
    return found


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("framing", [SIZED, CHUNKED], ids=["sized", "chunked"])
def test_the_body_of_an_offer_is_read(front: RunningFront, offer: bytes, framing: bytes):
    """In one piece with what follows it, with its body behind it, and wherever else it is cut."""
    data = completion(3, offer + framing)
    head = data.index(b"\r\n\r\n") + 4
    assert answers(front, [data + completion(4, LAST)]) == [3, 4]
    for cut in (5, 60, head - 3, head, head + 2, len(data) - 3):
        assert answers(front, [data[:cut], data[cut:], completion(4, LAST)], pause_s=0.01) == [3, 4], cut


def test_an_offer_in_single_bytes(front: RunningFront):
    data = completion(3, H2C) + look(H2C + LAST)
    assert answers(front, (data[i : i + 1] for i in range(len(data))), pause_s=0.0005) == [3, 200]


def test_requests_behind_offers_are_answered_in_order(front: RunningFront):
    queue = [completion(2, H2C), completion(3), look(H2C), completion(4, WEBSOCKET), look(), completion(5, H2C + LAST)]
    assert answers(front, [b"".join(queue)]) == [2, 3, 200, 4, 200, 5]
    assert answers(front, queue, pause_s=0.02) == [2, 3, 200, 4, 200, 5]


def test_many_offers_in_one_piece(front: RunningFront):
    assert answers(front, [look(H2C) * 1200 + look(LAST)]) == [200] * 1201


@pytest.mark.parametrize(
    ("fields", "version"), [(b"connection: Upgrade, close\r\nupgrade: h2c\r\n", b"1.1"), (H2C, b"1.0")]
)
def test_an_offer_on_a_connection_that_ends_with_it(front: RunningFront, fields: bytes, version: bytes):
    data = completion(3, fields, version)
    head = data.index(b"\r\n\r\n") + 4
    assert answers(front, [data]) == [3]
    assert answers(front, [data[:head], data[head:]], pause_s=0.01) == [3]


def test_an_offer_that_waits_for_leave_to_go_on(front: RunningFront):
    data = completion(3, H2C + LAST + b"expect: 100-continue\r\n")
    head = data.index(b"\r\n\r\n") + 4
    assert answers(front, [data[:head], data[head:]], pause_s=0.05) == [100, 3]


def test_the_head_of_an_offer_is_bounded_and_checked(front: RunningFront):
    assert answers(front, [look(H2C + b"x: %b\r\n" % (b"a" * 70_000))]) == [431]
    assert answers(front, [completion(3, H2C + CHUNKED + b"content-length: 5\r\n")]) == [400]
    assert answers(front, [look(H2C).replace(b"HTTP/1.1", b"HTTP/2.0")]) == [505]
    assert answers(front, [completion(3, H2C) + b"neither\r\n\r\n"])[-1] == 400


def test_nothing_is_tunnelled(front: RunningFront):
    for fields in (b"", H2C):
        assert answers(front, [b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n%b\r\n" % fields + look()]) == [400]
