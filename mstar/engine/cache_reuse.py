"""What may be done with each cache of an engine, by what its node declares of its walks. Load time, once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from mstar.engine.engine_config import EngineConfig
from mstar.engine.node_runtime import NodeRuntime
from mstar.engine.resources.attention import Attention
from mstar.engine.resources.cache_policy import CachePolicy
from mstar.engine.resources.linear_attention import LinearAttention
from mstar.engine.resources.page_keys import CacheContents
from mstar.engine.resources.paged_kv import PagedKV
from mstar.engine.resources.positions import Positions
from mstar.engine.resources.recurrent_state_pool import RecurrentStatePool
from mstar.engine.row_table import RowTable

LAYOUT = "k and v apart, each [layers, pages, page_size, kv_heads, head_dim]"


def settle_cache_policies(nodes: Iterable[NodeRuntime], rows: RowTable, config: EngineConfig) -> None:
    """Give each cache its policy.

    A cache that several nodes declare, or that is not its node's only one, is neither reused nor computed again: its
    rows would have to agree with others about how far they are.
    """
    nodes = list(nodes)
    owners: dict[str, list[NodeRuntime]] = {}
    for node in nodes:
        for cache in _caches(node):
            owners.setdefault(cache.key, []).append(node)
    for declaring in owners.values():
        node, cache = declaring[0], declaring[0].cache
        if len(declaring) == 1 and len(_caches(node)) == 1 and cache is not None:
            _settle(node, cache, rows, config)


def _settle(node: NodeRuntime, cache: PagedKV, rows: RowTable, config: EngineConfig) -> None:
    walks = config.walk_inputs.get(node.name, {})
    reusing = [walk for walk in walks if node.policies.of(walk).reuse_prefix]
    rebuilding = [walk for walk in walks if walk == node.policies.recomputable]
    cache.holdings.policy = CachePolicy(
        root=_contents(node, cache, config).root() if reusing and config.prefix_cache else None,
        reads_inputs=any(walks[walk] for walk in {*reusing, *rebuilding}),
        recompute=bool(rebuilding),
    )
    if config.reuse_generated and node.drawn is not None:
        cache.holdings.keys.read_token_ids = partial(rows.token_ids, drawn=node.drawn)


def _contents(node: NodeRuntime, cache: PagedKV, config: EngineConfig) -> CacheContents:
    spec = cache.spec
    own = node.resources.values()
    pools = [r for r in own if isinstance(r, RecurrentStatePool) and r.cache is cache]
    backends = sorted(r.backend.name for r in own if isinstance(r, Attention) and r.kv is cache)
    backends += sorted(r.backend.name for r in own if isinstance(r, LinearAttention) and r.pool in pools)
    positions = sorted(repr(r.spec) for r in own if isinstance(r, Positions) and cache.key in r.reads)
    return CacheContents(
        fingerprint=config.fingerprint,
        cache=repr(spec),
        layout=LAYOUT,
        dtype=str(config.dtype),
        page_size=spec.page_size,
        backends=", ".join(backends),
        positions=", ".join(positions),
        states=", ".join(f"{pool.spec} {pool.dtypes.wide}" for pool in pools),
    )


def _caches(node: NodeRuntime) -> list[PagedKV]:
    return [resource for resource in node.resources.values() if isinstance(resource, PagedKV)]
