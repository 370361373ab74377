"""A deployment, resolved: which model, which checkpoint on this disk, which node on which worker.

Made once by the launching process and handed to every child as JSON; each child builds from it what it needs, so no
live object crosses a process border. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mstar.config.load import ConfigError
from mstar.config.schema import DeploymentConfig, ResourceTuning
from mstar.engine.declarations import why_not_on_host
from mstar.engine.spec import (
    ATTENTION_BACKENDS,
    LINEAR_ATTENTION_BACKENDS,
    AttentionSpec,
    EncoderCacheSpec,
    LinearAttentionSpec,
    NodeResourceSpec,
    PagedKVSpec,
    RecurrentStateSpec,
    ResourceSpec,
)
from mstar.graph.base import nodes_of
from mstar.graph.compile import CompiledGraph, compile_walks
from mstar.model.base import AUTO_STEP_PATCHES, Model, ModelCard, ModelSetup
from mstar.model.loader.checkpoint import ResolvedCheckpoint, resolve_checkpoint
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.progress import DownloadProgress
from mstar.model.registry import build_model, find_card, published_config, require_fit
from mstar.platforms import current_platform


class CheckpointFacts(msgspec.Struct, frozen=True):
    """A `ResolvedCheckpoint` as it travels."""

    spec: str
    kind: str
    path: str
    num_bytes: int
    sha256: str | None


class DeploymentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a child needs to build its part. `config_json` is the validated configuration; `card` the name or
    import string of the model card; `model_config` the checkpoint's configuration, as JSON."""

    config_json: str
    card: str
    model_config: str
    tokenizer_dir: str | None
    max_seq_len: int
    checkpoint: CheckpointFacts | None
    served_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The facts, opened."""

    facts: DeploymentFacts
    config: DeploymentConfig
    card: ModelCard
    setup: ModelSetup

    def model(self) -> Model:
        return build_model(self.card, self.setup)

    def compile(self, model: Model) -> CompiledGraph:
        """The compiled graph of this placement. Raises `GraphError` or `ConfigError`."""
        walks = model.walks()
        nodes = {node.name for section in walks.values() for node in nodes_of(section)}
        specs = model.get_node_resources()
        _check_names(self.config, nodes, specs)
        _check_shares(self.config, specs)
        placement = {node: self.config.rank_of(node) for node in sorted(nodes)}
        return compile_walks(walks, model.partitions(), placement)

    def checkpoint(self) -> ResolvedCheckpoint | None:
        facts = self.facts.checkpoint
        if facts is None:
            return None
        kind = "gguf" if facts.kind == "gguf" else "safetensors"
        return ResolvedCheckpoint(facts.spec, kind, Path(facts.path), facts.num_bytes, facts.sha256)


def open_deployment(facts: DeploymentFacts) -> Deployment:
    """The facts as a child sees them."""
    config = DeploymentConfig.model_validate_json(facts.config_json)
    patches = config.scheduler.max_step_patches
    setup = ModelSetup(
        config=msgspec.json.decode(facts.model_config),
        tokenizer_dir=None if facts.tokenizer_dir is None else Path(facts.tokenizer_dir),
        max_seq_len=facts.max_seq_len,
        max_step_patches=AUTO_STEP_PATCHES if patches == "auto" else patches,
        max_media_pixels=config.server.media.max_pixels,
    )
    return Deployment(facts, config, find_card(facts.card), setup)


def resolve_deployment(
    config: DeploymentConfig, *, cache_dir: Path, progress: DownloadProgress | None = None
) -> Deployment:
    """Find (and fetch, if need be) what the configuration names, to run it.

    Raises:
        ConfigError, UnknownModelError, CheckpointError: with what to change.
    """
    _require_runnable(config)
    card = find_card(config.model)
    spec = config.checkpoint or card.default_checkpoint
    checkpoint = resolve_checkpoint(spec, cache_dir=cache_dir, progress=progress) if spec else None
    return _deployment(config, card, spec, checkpoint, {} if checkpoint is None else checkpoint.config(), cache_dir)


class Inspected(NamedTuple):
    """A deployment to look at. `notes`: what is different from one that runs, in words."""

    deployment: Deployment
    notes: tuple[str, ...]


def inspect_deployment(
    config: DeploymentConfig, *, cache_dir: Path, progress: DownloadProgress | None = None
) -> Inspected:
    """As `resolve_deployment`, for a look: also what this version cannot run yet. A published checkpoint that is not on
    this machine is not downloaded if its shape is known: the deployment is then without one.

    Raises:
        ConfigError, UnknownModelError, CheckpointError: with what to change.
    """
    _require_device(config)
    card = find_card(config.model)
    spec = config.checkpoint or card.default_checkpoint
    notes: list[str] = []
    known = published_config(card, spec)
    checkpoint, model_config = None, known or {}
    try:
        if spec:
            checkpoint = resolve_checkpoint(spec, cache_dir=cache_dir, progress=progress, from_hub=known is None)
            model_config = checkpoint.config()
    except CheckpointError:
        if known is None:
            raise
        notes.append(f"{spec} is not on this machine: this is its published shape, as this version knows it")
    return Inspected(_deployment(config, card, spec, checkpoint, model_config, cache_dir), tuple(notes))


def _require_device(config: DeploymentConfig) -> None:
    if config.device == "cuda" and not current_platform.has_accelerator():
        raise ConfigError("device: cuda, and this machine has no accelerator; use device: cpu or auto")


def _require_runnable(config: DeploymentConfig) -> None:
    _require_device(config)
    for problem in reasons_not_to_run(config):
        raise ConfigError(problem)


def reasons_not_to_run(config: DeploymentConfig) -> Iterator[str]:
    """What a valid file asks for that this version cannot do, and what to change."""
    for group in config.node_groups:
        if group.tp_size > 1:
            yield (
                f"node_groups: {', '.join(group.node_names)} has tp_size {group.tp_size}, and this version runs "
                "tp_size 1; give the group one rank and no tp_size to serve it unsplit"
            )


def _deployment(
    config: DeploymentConfig,
    card: ModelCard,
    spec: str,
    checkpoint: ResolvedCheckpoint | None,
    model_config: Mapping[str, Any],
    cache_dir: Path,
) -> Deployment:
    if model_config:
        require_fit(card, model_config)
    facts = DeploymentFacts(
        config_json=config.model_dump_json(),
        card=config.model,
        model_config=msgspec.json.encode(model_config).decode(),
        tokenizer_dir=None if checkpoint is None else str(_tokenizer_dir(checkpoint, cache_dir)),
        max_seq_len=_max_seq_len(config, model_config),
        checkpoint=None
        if checkpoint is None
        else CheckpointFacts(
            checkpoint.spec, checkpoint.kind, str(checkpoint.path), checkpoint.num_bytes, checkpoint.sha256
        ),
        served_names=tuple(dict.fromkeys((*config.server.served_names, config.model, *([spec] if spec else [])))),
    )
    return open_deployment(facts)


def _max_seq_len(config: DeploymentConfig, model_config: Mapping[str, Any]) -> int:
    text_config = model_config.get("text_config") or model_config
    known = text_config.get("max_position_embeddings")
    if config.max_seq_len is None:
        return int(known) if known is not None else 2048
    if known is not None and config.max_seq_len > known:
        raise ConfigError(f"max_seq_len: {config.max_seq_len} is more than the model's {known} positions")
    return config.max_seq_len


def _tokenizer_dir(checkpoint: ResolvedCheckpoint, cache_dir: Path) -> Path:
    # Imported here: reading a gguf tokenizer may load transformers, which only a first start needs.
    from mstar.model.loader.tokenizer_writing import write_tokenizer  # noqa: PLC0415

    directory = cache_dir / "tokenizers" / checkpoint.fingerprint().replace(":", "-")
    if not (directory / "tokenizer.json").is_file():
        write_tokenizer(checkpoint, directory)
    return directory


def _check_names(config: DeploymentConfig, nodes: set[str], specs: Sequence[NodeResourceSpec]) -> None:
    placed = [node for group in config.node_groups for node in group.node_names]
    if unknown := sorted(set(placed) - nodes):
        raise ConfigError(
            f"node_groups: the model has no node {', '.join(unknown)}; its nodes are {', '.join(sorted(nodes))}"
        )
    if twice := sorted({node for node in placed if placed.count(node) > 1}):
        raise ConfigError(f"node_groups: {', '.join(twice)} is placed twice")
    declared = {resource.key: resource for spec in specs for resource in spec.resources}
    if unknown := sorted(set(config.resources) - declared.keys()):
        raise ConfigError(
            f"resources: the model has no resource {', '.join(unknown)}; it has {', '.join(sorted(declared))}"
        )
    for key, tuning in config.resources.items():
        _check_tuning(declared[key], tuning)
    given = {key for key, tuning in config.resources.items() if tuning.host_bytes}
    if (problem := why_not_on_host(declared, given)) is not None:
        raise ConfigError(problem)


def _check_shares(config: DeploymentConfig, specs: Sequence[NodeResourceSpec]) -> None:
    """Heads are whole on a rank."""
    for group in config.node_groups:
        for spec in specs:
            if spec.node in group.node_names:
                for resource in spec.resources:
                    heads = _num_heads(resource)
                    if heads % group.tp_size:
                        raise ConfigError(
                            f"node_groups: tp_size {group.tp_size} does not divide the {heads} heads of {spec.node}'s "
                            f"{resource.key}"
                        )


def _num_heads(resource: ResourceSpec) -> int:
    """Heads that are shared out among ranks; 0: none."""
    match resource:
        case PagedKVSpec(num_kv_heads=heads) | LinearAttentionSpec(num_key_heads=heads):
            return heads
    return 0


def _check_tuning(resource: ResourceSpec, tuning: ResourceTuning) -> None:
    """Each resource takes the tunables that mean something for it."""
    name = f"resources.{resource.key}"
    if tuning.num_pages is not None and not isinstance(resource, PagedKVSpec):
        raise ConfigError(f"{name}.num_pages: {resource.key} is no cache and has no pages")
    if tuning.num_slots is not None and not isinstance(resource, RecurrentStateSpec):
        raise ConfigError(f"{name}.num_slots: {resource.key} holds no recurrent states")
    if tuning.dtype is not None and not isinstance(resource, RecurrentStateSpec):
        raise ConfigError(f"{name}.dtype: {resource.key} holds no recurrent states")
    if not isinstance(resource, PagedKVSpec | RecurrentStateSpec):
        if tuning.memory_fraction is not None:
            raise ConfigError(f"{name}.memory_fraction: {resource.key} is no cache and has no size to choose")
        if tuning.host_bytes:
            raise ConfigError(f"{name}.host_bytes: {resource.key} is no cache and has nothing to move to the host")
    if tuning.max_bytes is not None and not isinstance(resource, EncoderCacheSpec):
        raise ConfigError(f"{name}.max_bytes: {resource.key} is no cache of media features; it is sized in other units")
    if tuning.backend is not None:
        known = _backends(resource)
        if not known:
            raise ConfigError(f"{name}.backend: {resource.key} has no backends to choose from")
        if tuning.backend not in known:
            raise ConfigError(f"{name}.backend: {tuning.backend!r} is unknown (known: {', '.join(known)})")


def _backends(resource: ResourceSpec) -> Sequence[str]:
    match resource:
        case AttentionSpec():
            return ATTENTION_BACKENDS
        case LinearAttentionSpec():
            return LINEAR_ATTENTION_BACKENDS
    return ()
