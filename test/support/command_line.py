"""The `mstar` command in this process."""

import json
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from mstar.cli import app

SERVER_TARGET = ["serve"]
WITH_A_TARGET = [SERVER_TARGET, ["check"], ["graph"], ["run", "hi", "-c"]]
"""What stands before a target, for every command that takes one."""


def command(*arguments: object, typed: str | bytes | None = None) -> Result:
    """What a command printed. An exception that would end it with a traceback is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def deployment_file(directory: Path, **values: object) -> Path:
    """A deployment file with `values`; JSON is YAML."""
    path = directory / "deployment.yaml"
    path.write_text(json.dumps(values))
    return path
