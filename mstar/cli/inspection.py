"""`mstar check`, `mstar models`, `mstar graph`: what is there, and whether it fits together. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mstar import envs
from mstar.cli.errors import UNUSABLE, show_error
from mstar.cli.machine import examine, show
from mstar.cli.progress import ProgressBars
from mstar.cli.targets import config_for, server_for
from mstar.config.load import shipped_configs
from mstar.config.schema import DeploymentConfig, ServerConfig
from mstar.graph.compile import CompiledGraph
from mstar.graph.describe import legend
from mstar.launch.deployment import Inspected, inspect_deployment, reasons_not_to_run
from mstar.model.registry import CARDS


def check_command(target: str | None, overrides: Sequence[str]) -> int:
    """Exit code 0 when everything fits, warnings included, 1 otherwise. No `target`: the machine alone."""
    console = Console()
    good = show(console, examine(_server_of(target, overrides)))
    if target is not None:
        good = _check_config(console, target, overrides) and good
    return 0 if good else 1


def models_command() -> int:
    """Cards and shipped configurations."""
    console = Console()
    table = Table("model family", "serves")
    table.add_column("default checkpoint", overflow="fold")  # whole: it is what a configuration would say
    for card in CARDS:
        table.add_row(
            card.name, f"{card.description}\n[dim]{', '.join(card.architectures)}[/dim]", card.default_checkpoint
        )
    console.print(table)
    console.print("shipped configurations: " + ", ".join(sorted(shipped_configs())))
    return 0


def graph_command(target: str, overrides: Sequence[str]) -> int:
    """Walks, loops, edges and placement, as text."""
    console = Console()
    try:
        deployment, _ = _inspect(target, overrides)
        compiled = deployment.compile(deployment.model())
    except UNUSABLE as error:
        show_error(console, error)
        return 1
    config = deployment.config
    workers = [f"  worker {rank}: {', '.join(_placed(config, compiled, rank))}" for rank in range(config.num_workers)]
    described = compiled.describe()
    signs = [f"  {line}" for line in legend(described)]
    text = "\n".join([described + "workers", *workers, "signs", *signs])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if any(group.tp_size > 1 for group in config.node_groups):
        console.print("of a node in shares, the walks name the worker of the first", markup=False, soft_wrap=True)
    return 0


def _inspect(target: str, overrides: Sequence[str]) -> Inspected:
    with ProgressBars(Console(stderr=True)) as bars:
        config = config_for(target, overrides, progress=bars.report)
        return inspect_deployment(config, cache_dir=envs.CACHE_DIR.get(), progress=bars.report)


def _server_of(target: str | None, overrides: Sequence[str]) -> ServerConfig | None:
    """None where there is no target, or it cannot be read, which its own check explains."""
    try:
        return None if target is None else server_for(target, overrides)
    except UNUSABLE:
        return None


def _check_config(console: Console, file: str, overrides: Sequence[str]) -> bool:
    # Imported here: sizes need torch, and the machine alone is looked at without it.
    from mstar.launch.rank import describe_short_caches

    try:
        deployment, notes = _inspect(file, overrides)
        model = deployment.model()
        compiled = deployment.compile(model)
        short_caches = describe_short_caches(deployment, model, compiled)
    except UNUSABLE as error:
        show_error(console, error)
        return False
    config = deployment.config
    workers = "1 worker" if config.num_workers == 1 else f"{config.num_workers} workers"
    found = f"{deployment.card.name} on {workers}, up to {deployment.setup.max_seq_len:,} tokens"
    console.print(f"{file}: {found}", markup=False, highlight=False, soft_wrap=True)
    for rank in range(config.num_workers):
        placed = ", ".join(_placed(config, compiled, rank))
        console.print(f"  worker {rank}: {placed}", markup=False, highlight=False)
    console.print(f"  prefix cache: {_prefix_cache(config)}", markup=False, highlight=False)
    for key, tuning in config.resources.items():
        if tuning.host_bytes:
            host = f"up to {tuning.host_bytes / 2**30:.2f} GiB of host memory for preempted requests"
            console.print(f"  {key}: {host}", markup=False, highlight=False, soft_wrap=True)
    for line in (*notes, *short_caches):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    for reason in reasons_not_to_run(config):
        warning = Text(f"warning: this version cannot serve it: {reason}", style="bold yellow")
        console.print(warning, highlight=False, soft_wrap=True)
    return True


def _placed(config: DeploymentConfig, compiled: CompiledGraph, rank: int) -> list[str]:
    """Nodes of a worker, and nodes that it has a share of."""
    shares = {
        node: f"a share of {node} (one of {group.tp_size})"
        for group in config.node_groups
        if group.tp_size > 1 and rank in group.ranks
        for node in group.node_names
    }
    return [shares.get(node, node) for node in sorted({*compiled.nodes_on(rank), *shares})]


def _prefix_cache(config: DeploymentConfig) -> str:
    if not config.prefix_cache.enabled:
        return "off"
    return "prompts and generated tokens" if config.prefix_cache.reuse_generated else "prompts"
