"""Which caches may be reused or computed again, and what the host has room for: from declarations alone."""

from collections.abc import Mapping

import numpy as np
import pytest
from support.engine_rig import EngineRig
from support.tiny_decoder import HEAD_DIM, KV_HEADS, LAYERS, NODE, TinyDecoder, decoder_spec

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.engine_config import EngineConfig
from mstar.engine.memory_plan import plan_memory
from mstar.engine.resources.cache_policy import NO_REUSE
from mstar.engine.spec import NodeResourceSpec, PagedKVSpec
from mstar.engine.step import Rows

PAGE_BYTES = 2 * LAYERS * 4 * KV_HEADS * HEAD_DIM * 4


class Declaring(TinyDecoder):
    """A decoder whose walks declare what the test wants."""

    def __init__(self, policies: Mapping[str, ChunkingPolicy]) -> None:
        super().__init__()
        self.policies = policies

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        return self.policies.get(graph_walk)


def policy_of(policies: Mapping[str, ChunkingPolicy], inputs: Mapping[str, frozenset[str]], **config: object):
    rig = EngineRig({NODE: Declaring(policies)}, walk_inputs={NODE: inputs}, **config)
    return rig.kv.holdings.policy


NOTHING, FEATURES = frozenset[str](), frozenset({"features"})
REUSE = ChunkingPolicy(chunked=True, reuse_prefix=True)


def test_a_cache_is_what_its_nodes_walks_say():
    walks = {"prefill": NOTHING, "decode": frozenset({"token"})}
    assert policy_of({}, walks) == NO_REUSE
    reused = policy_of({"prefill": REUSE}, walks)
    assert reused.root is not None and not reused.reads_inputs and not reused.recompute
    assert policy_of({"prefill": REUSE}, {"prefill": FEATURES}).reads_inputs
    rebuilt = policy_of({"prefill": ChunkingPolicy(chunked=True, recomputable=True)}, walks)
    assert rebuilt.root is None and rebuilt.recompute
    assert policy_of({"prefill": REUSE}, walks, prefix_cache=False).root is None


def test_a_walk_that_is_not_in_the_graph_says_nothing():
    assert policy_of({"prefill": REUSE}, {"decode": NOTHING}) == NO_REUSE


@pytest.mark.parametrize("shared", [True, False])
def test_rows_that_would_have_to_agree_with_others_are_not_reused(shared: bool):
    """Two nodes with one cache, or one node with two."""
    nodes = {NODE: Declaring({"prefill": REUSE})}
    first = decoder_spec()
    if shared:
        nodes["Other"] = Declaring({"prefill": REUSE})
        specs = (first, NodeResourceSpec("Other", first.resources))
    else:
        second = PagedKVSpec("kv2", LAYERS, KV_HEADS, HEAD_DIM, 4)
        specs = (NodeResourceSpec(NODE, (*first.resources, second)),)
    rig = EngineRig(nodes, specs, walk_inputs={name: {"prefill": NOTHING} for name in nodes})
    assert rig.kv.holdings.policy == NO_REUSE


def test_the_host_holds_what_its_bytes_hold():
    config = EngineConfig(max_rows=2, max_seq_len=64, capacity=4, host_bytes={"kv": 3 * PAGE_BYTES + 1})
    plan = {row.name: row for row in plan_memory((decoder_spec(),), config)}
    assert plan["kv.host"].num_bytes == 3 * PAGE_BYTES and "3 pages" in plan["kv.host"].detail
    rig = EngineRig(host_bytes={"kv": 3 * PAGE_BYTES + 1})
    assert rig.engine.gauges()['mstar_pages{pool="kv.host",state="free"}'] == 3
    with pytest.raises(ValueError, match=f"kv.host_bytes: {PAGE_BYTES - 1} bytes, and a page takes {PAGE_BYTES}"):
        EngineRig(host_bytes={"kv": PAGE_BYTES - 1})


def test_what_is_kept_follows_the_rows_of_a_resource():
    handles, spans = np.array([7, 3, 5]), np.ones(3, np.int32)
    keep = np.array([True, False, True])
    assert keep[Rows(handles, spans).places(handles)].tolist() == keep.tolist()
    assert keep[Rows(np.array([5, 3]), spans[:2]).places(handles)].tolist() == [True, False]
