"""The `mstar` command. Each command imports what it needs when it runs, so that `mstar version` is quick."""

from __future__ import annotations

import io
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

import mstar

app = typer.Typer(
    name="mstar",
    help="Serve composite models: one runtime, on a CPU or one NVIDIA GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_TARGET = "smollm2"
Target = Annotated[
    str,
    typer.Argument(help="A YAML file, a shipped configuration (smollm2), a checkpoint, or nothing for the default."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one value, e.g. server.port=8080. May be repeated."),
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(mstar.__version__)
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What comes before a command."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # a terminal or a file may have bytes that are no UTF-8
        sys.stdin.reconfigure(errors="replace")


def _as_text(argument: str) -> str:
    """An argument with U+FFFD for each byte that is no UTF-8: Python hands these on as lone surrogates, which nothing
    can be sent with."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@app.command()
def serve(
    target: Target = DEFAULT_TARGET,
    overrides: Overrides = None,
    host: Annotated[str | None, typer.Option(help="Address to listen at.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen at; 0 takes a free one.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json: one object a line.")] = None,
) -> None:
    """Start the server; ends with a ready line and a curl that works."""
    from mstar.cli.serve import serve_command

    given = {"host": host, "port": port, "log_format": log_format}
    extra = [f"server.{key}={value}" for key, value in given.items() if value is not None]
    raise typer.Exit(serve_command(target, [*(overrides or []), *extra]))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Base URL of a running server.")] = "http://127.0.0.1:8000",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    api_key: Annotated[str | None, typer.Option(help="Key, if the server asks for one.")] = None,
) -> None:
    """Talk to a running server in the terminal."""
    from mstar.cli.chat import chat_command

    raise typer.Exit(chat_command(url, None if system is None else _as_text(system), temperature, api_key))


@app.command(context_settings={"allow_extra_args": True})
def run(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="What to say; '-' reads standard input.")],
    target: Annotated[str, typer.Option("--config", "-c", help="As for serve.")] = DEFAULT_TARGET,
    overrides: Overrides = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    seed: Annotated[int, typer.Option()] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")] = False,
) -> None:
    """Answer one prompt in this process, without a server."""
    if context.args:
        raise typer.BadParameter(
            f"one prompt is answered, and it is one argument: quote it. A configuration is given with -c: "
            f"mstar run -c {prompt} {shlex.quote(context.args[0])}",
            param_hint="prompt",
        )
    from mstar.cli.run import run_command

    text = sys.stdin.read() if prompt == "-" else _as_text(prompt)
    raise typer.Exit(run_command(text, target, overrides or [], max_tokens, temperature, seed, raw=raw))


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="TARGET", help="A configuration to check as well, as for serve.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Check this machine, and a configuration if one is given: as for serve, or values of the default that --set
    changes. Needs no accelerator."""
    from mstar.cli.inspection import check_command

    default = DEFAULT_TARGET if overrides else None
    raise typer.Exit(check_command(default if file is None else str(file), overrides or []))


@app.command()
def models() -> None:
    """List the model families that can be served, and the shipped configurations."""
    from mstar.cli.inspection import models_command

    raise typer.Exit(models_command())


@app.command()
def make_checkpoint(
    model: Annotated[str, typer.Argument(help="A model family that makes them (qwen3_5).")],
    out: Annotated[Path, typer.Argument(help="A directory that is empty or is not there yet.")],
    size: Annotated[str, typer.Option(help="Shape of the model, e.g. tiny or 0.8b; a wrong one lists them.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Equal seeds give equal weights.")] = 0,
) -> None:
    """Write a checkpoint with random weights in a published shape, for tests and benchmarks without a hub."""
    from mstar.cli.make_checkpoint import make_checkpoint_command

    raise typer.Exit(make_checkpoint_command(model, out, size, seed))


@app.command()
def graph(target: Target = DEFAULT_TARGET, overrides: Overrides = None) -> None:
    """Show a model's walks and where its nodes are placed."""
    from mstar.cli.inspection import graph_command

    raise typer.Exit(graph_command(target, overrides or []))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def bench(context: typer.Context) -> None:
    """Put load on an OpenAI-compatible server and report latencies."""
    from mstar.bench.command import main as bench_main

    bench_main(context.args, called=context.command_path)


@app.command()
def version() -> None:
    """Print the version."""
    print(mstar.__version__)


def main() -> None:
    """Entry point of the `mstar` command."""
    app()
