"""`WalkPolicies`: what a node's walks declare about chunks, looked up by the engine, and what of it cannot be.

Made once at load; read on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mstar.engine.chunking import NOT_CHUNKED, ChunkingPolicy
from mstar.engine.resources.base import Resource
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.sampler import Sampler
from mstar.engine.submodule import NodeSubmodule


class WalkPolicies:
    """The policies of one node. `recomputable`: the walk that rebuilds caches, or None."""

    def __init__(
        self, node: str, submodule: NodeSubmodule, walks: Sequence[str], resources: Iterable[Resource]
    ) -> None:
        """Raises `ValueError`, naming node and walk, for a declaration that this node cannot keep."""
        self._submodule = submodule
        self._policies: dict[str, ChunkingPolicy] = {}
        found = {walk: self.of(walk) for walk in walks}
        resources = list(resources)
        for walk, policy in found.items():
            _check(f"walk {walk!r} of node {node!r}", policy, resources, submodule.host_signals)
        rebuilding = [walk for walk, policy in found.items() if policy.recomputable]
        if len(rebuilding) > 1:
            raise ValueError(f"node {node!r} has {len(rebuilding)} recomputable walks: {', '.join(rebuilding)}")
        self.recomputable = rebuilding[0] if rebuilding else None
        if self.recomputable is not None:
            for walk, policy in found.items():
                if others := set(policy.batch_with) - {self.recomputable}:
                    raise ValueError(
                        f"walk {walk!r} of node {node!r} shares steps with {sorted(others)}: any step may have a row "
                        f"that is restored, and then runs in the recomputable walk {self.recomputable!r}"
                    )

    def of(self, walk: str) -> ChunkingPolicy:
        """The walk's policy, `NOT_CHUNKED` where it declares none."""
        policy = self._policies.get(walk)
        if policy is None:
            policy = self._submodule.get_chunking_policy(walk) or NOT_CHUNKED
            self._policies[walk] = policy
        return policy


def _check(walk: str, policy: ChunkingPolicy, resources: Sequence[Resource], host_signals: frozenset[str]) -> None:
    num_caches = sum(isinstance(resource, PagedKV) for resource in resources)
    if num_caches == 0 and (policy.chunked or policy.reuse_prefix or policy.recomputable):
        raise ValueError(f"{walk} is chunked, reuses prefixes or recomputes, but the node has no cache to go on from")
    if policy.recomputable and num_caches > 1:
        raise ValueError(f"{walk} is recomputable, but the node has {num_caches} caches: which one is not said")
    if (policy.keep_final_chunk_samples or policy.recomputable) and not any(
        isinstance(resource, Sampler) for resource in resources
    ):
        raise ValueError(f"{walk} samples in its final chunk or recomputes what was drawn, but the node has no sampler")
    if policy.accumulate & host_signals:
        raise ValueError(f"{walk} accumulates {sorted(policy.accumulate & host_signals)}, read on the host every step")
