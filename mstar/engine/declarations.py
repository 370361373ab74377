"""What the nodes of an engine declare, by key. Load time; pure functions of declarations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mstar.engine.spec import (
    AttentionSpec,
    LinearAttentionSpec,
    NodeResourceSpec,
    RecurrentStateSpec,
    ResourceSpec,
    RotarySpec,
)


def declared_resources(specs: Sequence[NodeResourceSpec]) -> dict[str, ResourceSpec]:
    """Declarations by key.

    Raises:
        ValueError: a key with two meanings, a reference to an undeclared one, or two pools of states beside one cache.
    """
    declared: dict[str, ResourceSpec] = {}
    for node in specs:
        own = {spec.key for spec in node.resources}
        for spec in node.resources:
            if declared.setdefault(spec.key, spec) != spec:
                raise ValueError(f"resource {spec.key!r} is declared in two ways: {declared[spec.key]} and {spec}")
            if (referred := _refers_to(spec)) is not None and referred not in own:
                raise ValueError(
                    f"resource {spec.key!r} of node {node.node!r} refers to {referred!r}, not declared there"
                )
    _check_states(declared)
    return declared


def states_beside(declared: Mapping[str, ResourceSpec]) -> dict[str, str]:
    """Keys of the pools of recurrent states, by the key of the cache that each goes with."""
    return {spec.kv_key: spec.key for spec in declared.values() if isinstance(spec, RecurrentStateSpec)}


def why_not_on_host(declared: Mapping[str, ResourceSpec], on_host: Collection[str]) -> str | None:
    """What is wrong with host memory for the resources `on_host` and no others: a request's pages and its states move
    together. None: nothing."""
    for cache, pool in states_beside(declared).items():
        if (cache in on_host) != (pool in on_host):
            given, missing = (cache, pool) if cache in on_host else (pool, cache)
            return (
                f"resources.{given}.host_bytes: a preempted request moves its pages and its state, so give "
                f"resources.{missing}.host_bytes as well"
            )
    return None


def _refers_to(spec: ResourceSpec) -> str | None:
    if isinstance(spec, AttentionSpec | RotarySpec | RecurrentStateSpec):
        return spec.kv_key
    return spec.state_key if isinstance(spec, LinearAttentionSpec) else None


def _check_states(declared: dict[str, ResourceSpec]) -> None:
    pools = [spec for spec in declared.values() if isinstance(spec, RecurrentStateSpec)]
    beside = states_beside(declared)
    for pool in pools:
        if beside[pool.kv_key] != pool.key:
            raise ValueError(
                f"resources {pool.key!r} and {beside[pool.kv_key]!r} are pools of states beside the same cache "
                f"{pool.kv_key!r}: declare one with all blocks"
            )
