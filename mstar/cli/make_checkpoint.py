"""`mstar make-checkpoint`: a checkpoint with random weights, written where the user says."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mstar.cli.errors import UNUSABLE, show_error
from mstar.cli.progress import ProgressBars
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.registry import find_card, write_random_checkpoint

UNWRITABLE = (*UNUSABLE, OSError)


def make_checkpoint_command(model: str, out: Path, size: str, seed: int) -> int:
    """Exit code 0 when the checkpoint is there, 1 with a message otherwise."""
    console = Console(stderr=True)
    directory = out.expanduser()
    try:
        with ProgressBars(console) as bars:
            write_random_checkpoint(find_card(model), size, directory, seed=seed, progress=bars.report)
        num_bytes = resolve_checkpoint(str(directory.absolute()), cache_dir=directory).num_bytes
    except UNWRITABLE as error:
        show_error(console, error)
        return 1
    print(f"{directory}: {model} {size} of seed {seed}, {num_bytes / 1e6:,.1f} MB of random weights")
    print(f"mstar serve {directory}")
    return 0
