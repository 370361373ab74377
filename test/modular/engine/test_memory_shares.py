"""How the memory of a worker is shared out: what has a size, what has a fraction, and what has neither."""

import numpy as np
import pytest
import torch

from mstar.engine.engine_config import EngineConfig
from mstar.engine.memory_plan import plan_memory
from mstar.engine.resource_sizes import memory_text, resource_sizes
from mstar.engine.resources.logit_adjust import TokenCounts, count_row_bytes, table_rows
from mstar.engine.spec import (
    EncoderCacheSpec,
    NodeResourceSpec,
    PagedKVSpec,
    RecurrentStateSpec,
    RotarySpec,
    SamplerSpec,
    StateBlock,
)

PAGE, SLOT = 2 * 4 * 4 * 4, 2 * 16 * 4
SPECS = [
    NodeResourceSpec(
        "LLM",
        (
            PagedKVSpec("kv", 1, 1, 4, 4),
            RecurrentStateSpec("state", "kv", 2, (StateBlock("a", (16,)),)),
            SamplerSpec("sampler", 100),
        ),
    )
]
COUNTS = (8 + 1) * 100 * (4 + 1)  # at least 8 rows and a spare one, a token's int32 and bool
FREE = 100_000


def planned(specs=SPECS, **config: object) -> dict[str, int]:
    """Bytes by resource."""
    base = {"max_rows": 4, "max_seq_len": 4096, "capacity": 8, "resource_bytes": FREE, "cache_share": 0.8}
    return {row.name: row.num_bytes for row in plan_memory(specs, EngineConfig(**(base | config)))}  # type: ignore[arg-type]


@pytest.mark.parametrize("num_slots", [2, 100, 300, 600])
def test_what_has_a_size_is_not_shared_out_again(num_slots: int):
    plan = planned(num_slots={"state": num_slots})
    given = (num_slots + 1) * SLOT + COUNTS
    assert plan["state"] + plan["sampler"] == given
    assert 0 <= 0.8 * (FREE - given) - plan["kv"] < PAGE


def test_pages_of_a_given_number_leave_less_to_states():
    plan = planned(num_pages={"kv": 100}, max_rows=100, cache_share=1.0)
    assert plan["kv"] == 101 * PAGE and plan["sampler"] == 129 * 500
    assert 0 <= FREE - plan["kv"] - plan["sampler"] - plan["state"] < SLOT


def test_sizes_that_do_not_fit_end_the_start_with_what_to_lower():
    with pytest.raises(
        ValueError,
        match=r"asks for takes 117.02 KiB, and beside the weights there are 97.66 KiB; "
        r"lower resources.state.num_slots \(112.62 KiB\), scheduler.max_rows \(4.39 KiB\)$",
    ):
        planned(num_slots={"state": 900})
    planned(num_slots={"state": 700})


def test_each_key_has_its_own_fraction_of_what_sizes_leave():
    left = FREE - COUNTS
    for kv, state in ((0.6, 0.05), (0.05, 0.6), (0.7, 0.3)):
        plan = planned(memory_fractions={"kv": kv, "state": state})
        assert 0 <= kv * left - plan["kv"] <= PAGE and 0 <= state * left - plan["state"] <= SLOT
    plan = planned(memory_fractions={"kv": 0.5}, max_rows=4)
    assert 0 <= 0.5 * left - plan["kv"] <= PAGE
    assert plan["state"] == (3 * 4 + 1) * SLOT
    plan = planned(memory_fractions={"state": 0.9})
    assert 0 <= 0.8 * 0.1 * left - plan["kv"] <= PAGE + 1
    plan = planned(memory_fractions={"kv": 0.5}, num_slots={"state": 99})
    assert 0 <= 0.5 * (left - 100 * SLOT) - plan["kv"] <= PAGE


def test_fractions_are_of_one_whole_and_hold_something():
    with pytest.raises(ValueError, match=r"kv.memory_fraction, resources.state.memory_fraction: 1.1 in all"):
        planned(memory_fractions={"kv": 0.6, "state": 0.5})
    with pytest.raises(ValueError, match=r"resources.state: 2 of its slots and an empty one take 384 bytes"):
        planned(memory_fractions={"state": 0.001})
    with pytest.raises(ValueError, match=r"resources.kv: 1 of its pages .* and 0 bytes are left for it"):
        planned(memory_fractions={"state": 1.0})


def test_what_nobody_sizes_shares_no_more_than_the_most():
    plan = planned(most_cache_bytes=20_000, num_slots={"state": 400})
    assert plan["state"] == 401 * SLOT and 0 <= 20_000 - plan["kv"] < PAGE


def test_media_features_and_rotary_tables_are_counted():
    cache, rotary = EncoderCacheSpec("media", 8), RotarySpec("rope", "kv", 4, 1e4)
    specs = [NodeResourceSpec("LLM", (*SPECS[0].resources, cache, rotary))]
    plan = planned(specs, max_bytes={"media": 10_000}, max_seq_len=1024, num_slots={"state": 2})
    assert (plan["media"], plan["rope"]) == (10_000, 1024 * 4 * 4)
    assert 0 <= 0.8 * (FREE - 10_000 - 1024 * 16 - COUNTS - 3 * SLOT) - plan["kv"] < PAGE


def test_a_cpu_offloads_to_the_memory_that_it_computes_in():
    config = {"host_bytes": {"kv": 60_000, "state": 30_000}, "num_slots": {"state": 9}}
    assert 0 <= 0.8 * (10_000 - COUNTS - 10 * SLOT) - planned(**config)["kv"] < PAGE
    assert planned(**config, device=torch.device("cuda"))["kv"] > 60_000


def test_codes_beside_the_text_have_no_penalties():
    assert "codes" not in planned([NodeResourceSpec("LLM", (SamplerSpec("codes", 100, samples_text=False),))])


def test_a_cache_is_never_larger_than_all_requests_can_fill():
    for more in ({}, {"memory_fractions": {"kv": 1.0}}, {"num_pages": {"kv": 900}}):
        config = EngineConfig(max_rows=1, max_seq_len=8, capacity=3, resource_bytes=10**6, **more)  # type: ignore[arg-type]
        specs = [NodeResourceSpec("LLM", (PagedKVSpec("kv", 1, 1, 4, 4),))]
        assert resource_sizes(specs, config).pages == {"kv": 6}


def test_bytes_for_people():
    sizes = (0, 1023, 1024, 5 << 20, 103 << 20, 5 << 29)
    assert [memory_text(size) for size in sizes] == [
        "0 bytes",
        "1023 bytes",
        "1.00 KiB",
        "5.00 MiB",
        "103.00 MiB",
        "2.50 GiB",
    ]


@pytest.mark.parametrize("num_requests", [1, 8, 9, 16, 17, 100, 256])
def test_count_tables_grow_to_what_was_planned(num_requests: int):
    counts = TokenCounts(3, torch.device("cpu"))
    for row in range(1, num_requests + 1):
        counts.reset(row, np.array([1]))
    assert counts.output.nbytes + counts.prompt.nbytes == table_rows(num_requests) * count_row_bytes(3)
    assert num_requests < counts.output.shape[0] == counts.prompt.shape[0] <= max(9, 2 * num_requests)
