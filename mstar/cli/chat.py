"""`mstar chat`: a conversation with a running server, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from mstar.cli.errors import show_error
from mstar.client import AuthenticationError, Client, ClientError, NoAnswerError, ReasoningEvent, TextEvent

STEERING = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters, for `str.translate`: what a model writes does not steer the terminal."""


def chat_command(url: str, system: str | None, temperature: float, api_key: str | None) -> int:
    """Until end of input. /reset forgets the conversation, /exit ends it."""
    console = Console()
    opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with Client(url, api_key=api_key, timeout_s=None) as client:
        try:
            name = client.served_model()
        except NoAnswerError as error:
            reason = str(error.__cause__) or error
            show_error(console, f"no server answers at {url}: {reason}; mstar serve starts one, --url names another")
            return 1
        except AuthenticationError as error:
            show_error(console, f"{url}: {error}; give a key with --api-key")
            return 1
        except ClientError as error:
            show_error(console, f"{url}: {error}")
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
            if line.startswith("/") and line[1:].isalpha():
                show_error(console, f"there is no {line}; /reset starts over, /exit ends")
                continue
            messages.append({"role": "user", "content": line})
            answer, was_reasoning = "", False
            try:
                for event in client.stream_chat(messages, model=name, temperature=temperature):
                    if not isinstance(event, TextEvent | ReasoningEvent):
                        continue
                    is_reasoning = isinstance(event, ReasoningEvent)
                    if was_reasoning and not is_reasoning:
                        sys.stdout.write("\n\n")
                    was_reasoning = is_reasoning
                    shown = event.text.translate(STEERING)
                    if is_reasoning:
                        console.print(shown, style="dim", end="", markup=False, highlight=False, soft_wrap=True)
                    else:
                        sys.stdout.write(shown)
                        sys.stdout.flush()
                        answer += event.text
            except KeyboardInterrupt:
                pass
            except ClientError as error:
                show_error(console, f"\n{error}" if answer else error)
                messages.pop()
                continue
            console.print()
            messages.append({"role": "assistant", "content": answer})
