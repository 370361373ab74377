"""The preemption harness over a tiny checkpoint: requests go the way it says, and go on as if nothing had happened."""

import json

import pytest
import torch
from support.checkpoints import tiny_llama, write_directory

from benchmark.preemption_cost import CACHE, WAYS, Preempted, Price, measure, report_text, summarize
from mstar.cli.targets import config_for
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.platforms.executor import InlineExecutor

SMALL = ["dtype=float32", "max_seq_len=900", "scheduler.max_rows=2", "resources.kv.num_pages=40", "num_threads=1"]
LENGTHS = (100, 300)


@pytest.fixture(scope="module")
def instances(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_directory(path, tiny_llama(max_position_embeddings=1024))
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    made = {
        way: LocalInstance(
            resolve_deployment(config_for(str(path), [*SMALL, *overrides]), cache_dir=path / "cache"),
            executor=InlineExecutor(),
        )
        for way, overrides in WAYS.items()
    }
    yield made
    for instance in made.values():
        instance.close()
    torch.set_grad_enabled(before)


def test_each_way_is_measured_at_each_length(instances):
    found = measure(instances, LENGTHS, repeats=2)
    assert list(found) == list(LENGTHS)
    for length, ways in found.items():
        assert {way: len(prices) for way, prices in ways.items()} == dict.fromkeys(WAYS, 2)
        assert all(price.num_tokens > length for prices in ways.values() for price in prices)
    report = {"lengths": summarize(found)}
    assert len(report_text(report).splitlines()) == 1 + len(LENGTHS)
    assert json.loads(json.dumps(report)) == report


def test_what_is_generated_is_the_same_on_every_way(instances):
    texts = []
    for way, instance in instances.items():
        request = Preempted(instance, 200, seed=3)
        request.price("offload" if way == "offload" else "recompute")
        request.decode(10)
        texts.append(tuple(request.tokens))
        request.leave()
        (_, parts), *_ = instance.workers
        assert parts.engine.gauges()[f'mstar_pages{{pool="{CACHE}",state="owned"}}'] == 0
    assert len(set(texts)) == 1


def test_another_way_than_the_one_asked_for_is_no_measurement(instances):
    request = Preempted(instances["recompute"], 100, seed=4)
    with pytest.raises(RuntimeError, match="went by recompute"):
        request.price("offload")
    request.leave()


def test_prices_by_hand():
    found = summarize(
        {1000: {"recompute": [Price(0.5, 0.9, 0.01, 1000), Price(0.7, 1.3, 0.03, 1000), Price(0.6, 1.0, 0.02, 1000)]}}
    )
    assert found["1000"]["recompute"]["extra_ms"] == {"median": 600.0, "min": 500.0, "max": 700.0}
    assert found["1000"]["recompute"]["cpu_ms"]["median"] == 1000.0
    assert found["1000"]["recompute"]["us_per_token"]["median"] == 600.0
    assert found["1000"]["recompute"]["decode_step_ms"]["median"] == 20.0
