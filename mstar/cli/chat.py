"""`mstar chat`: a conversation with a running server, streamed to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import httpx
from rich.console import Console

from mstar.cli.errors import show_error

STEERING = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters, for `str.translate`: what a model writes does not steer the terminal."""


def chat_command(url: str, system: str | None, temperature: float, api_key: str | None) -> int:
    """Until end of input. /reset forgets the conversation, /exit ends it."""
    console = Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
        try:
            name = _served_model(client)
        except (httpx.HTTPError, ValueError) as error:
            show_error(console, f"no server answers at {url}: {error}")
            return 1
        greeting = f"{name} at {url}; /reset starts over, /exit ends"
        console.print(greeting, style="dim", markup=False, highlight=False, soft_wrap=True)
        while True:
            try:
                line = console.input("[bold]you:[/bold] ").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return 0
            if line == "/exit":
                return 0
            if line == "/reset":
                messages = list(opening)
                continue
            if not line:
                continue
            messages.append({"role": "user", "content": line})
            answer, was_reasoning = "", False
            try:
                for is_reasoning, piece in _stream(
                    client, {"model": name, "messages": messages, "temperature": temperature, "stream": True}
                ):
                    if was_reasoning and not is_reasoning:
                        sys.stdout.write("\n\n")
                    was_reasoning = is_reasoning
                    shown = piece.translate(STEERING)
                    if is_reasoning:
                        console.print(shown, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
                    else:
                        sys.stdout.write(shown)
                        sys.stdout.flush()
                        answer += piece
            except KeyboardInterrupt:
                pass
            except (httpx.HTTPError, ValueError) as error:
                show_error(console, f"\n{error}" if answer else error)
                messages.pop()
                continue
            console.print()
            messages.append({"role": "assistant", "content": answer})


def _served_model(client: httpx.Client) -> str:
    """Raises `ValueError` with what was answered instead."""
    response = client.get("/v1/models")
    _require_ok(response)
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError("what answers there lists no models") from error


def _stream(client: httpx.Client, body: dict[str, object]) -> Iterator[tuple[bool, str]]:
    """Text pieces of one answer, and whether each is reasoning. Raises `ValueError` with the server's message for an
    error."""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        _require_ok(response)
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            for choice in event["choices"]:
                delta = choice["delta"]
                for key in ("reasoning_content", "content"):
                    if delta.get(key):
                        yield key != "content", delta[key]


def _require_ok(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.OK:
        return
    try:
        message = json.loads(response.read())["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = f"{response.status_code} {response.reason_phrase}"
    raise ValueError(message)
