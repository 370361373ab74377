"""Mistakes of the person at the terminal: which exceptions they arrive as, and how they are shown. No traceback."""

from __future__ import annotations

from rich.console import Console

from mstar.config.load import ConfigError
from mstar.graph.protocol import GraphError
from mstar.model.loader.errors import CheckpointError

UNUSABLE = (ConfigError, CheckpointError, GraphError, ValueError)
"""What a configuration, its model or its checkpoint raises when it cannot be used."""


def show_error(console: Console, error: object) -> None:
    """In red, as it is: messages quote keys, paths and values, which may look like markup, and are copied out again."""
    console.print(str(error), style="red", markup=False, emoji=False, highlight=False, soft_wrap=True)
