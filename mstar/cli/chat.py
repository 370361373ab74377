"""`mstar chat`: a conversation with a running server, streamed to the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
from rich.console import Console


def chat_command(url: str, system: str | None, temperature: float, api_key: str | None) -> int:
    """Until end of input. /reset forgets the conversation, /exit ends it."""
    console = Console()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10.0, read=None)) as client:
        try:
            name = _served_model(client)
        except httpx.HTTPError as error:
            console.print(f"[red]no server answers at {url}: {error}[/red]")
            return 1
        console.print(f"[dim]{name} at {url}; /reset starts over, /exit ends[/dim]")
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
            answer = ""
            try:
                for piece in _stream(
                    client, {"model": name, "messages": messages, "temperature": temperature, "stream": True}
                ):
                    console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
                    answer += piece
            except KeyboardInterrupt:
                pass
            except (httpx.HTTPError, ValueError) as error:
                console.print(f"\n[red]{error}[/red]")
                messages.pop()
                continue
            console.print()
            messages.append({"role": "assistant", "content": answer})


def _served_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    response.raise_for_status()
    return response.json()["data"][0]["id"]


def _stream(client: httpx.Client, body: dict[str, object]) -> Iterator[str]:
    """Text pieces of one answer. Raises `ValueError` with the server's message for an error."""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise ValueError(json.loads(response.read())["error"]["message"])
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ValueError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
