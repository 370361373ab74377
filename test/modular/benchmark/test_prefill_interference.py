"""The interference harness over a tiny checkpoint: it measures what it says, and its ratios are those of its times."""

import pytest
import torch
from support.checkpoints import write_directory

from benchmark.prefill_interference import MODES, Sample, Shape, compare, measure_once, report_text, summarize
from mstar.cli.targets import config_for
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance

SHAPE = Shape(streams=2, stream_prompt=8, stream_tokens=200, alone_tokens=10, long_prompt=160, warmup_tokens=2)
SMALL = ["dtype=float32", "max_seq_len=256", "scheduler.max_rows=3", "resources.kv.num_pages=16", "num_threads=1"]


@pytest.fixture(scope="module")
def instances(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_directory(path)
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    made = {
        mode: LocalInstance(
            resolve_deployment(
                config_for(str(path), [*SMALL, f"scheduler.max_step_tokens={tokens}"]), cache_dir=path / "cache"
            )
        )
        for mode, tokens in zip(MODES, (18, 4096), strict=True)
    }
    yield made
    for instance in made.values():
        instance.close()
    torch.set_grad_enabled(before)


def test_each_mode_is_measured_in_every_repeat(instances):
    samples = compare(instances, SHAPE, repeats=2)
    assert {mode: len(taken) for mode, taken in samples.items()} == {"chunked": 2, "whole": 2}
    for taken in samples.values():
        for sample in taken:
            assert len(sample.alone) >= max(SHAPE.streams * SHAPE.alone_tokens, len(sample.during) - SHAPE.streams)
            assert min(sample.alone) > 0
            assert sample.ttft_s > 0
    assert set(summarize(samples)["goals"].values()) <= {True, False}


def test_streams_go_on_beside_a_prompt_that_is_cut_and_wait_for_one_that_is_not(instances):
    cut, whole = (measure_once(instances[mode], SHAPE, seed=7) for mode in MODES)
    # Sixteen tokens of the prompt beside the two streams' own make ten steps; uncut it is one.
    assert len(cut.during) >= SHAPE.streams * 9
    assert len(whole.during) <= SHAPE.streams * 4


def test_nothing_is_left_behind(instances):
    for instance in instances.values():
        measure_once(instance, SHAPE, seed=8)
        (_, parts), *_ = instance.workers
        assert parts.engine.gauges()['mstar_pages{pool="kv",state="owned"}'] == 0


def test_ratios_by_hand():
    chunked = Sample(alone=[0.010] * 99 + [0.020], during=[0.025] * 9 + [0.030], ttft_s=2.0)
    whole = Sample(alone=[0.010] * 100, during=[0.9, 0.9], ttft_s=1.0)
    report = summarize({"chunked": [chunked], "whole": [whole]})
    # numpy.percentile(..., 99) of the same lists: 0.0101, 0.02955 and 0.9.
    assert report["chunked"]["slowdown_p99"]["median"] == pytest.approx(0.02955 / 0.0101, abs=1e-4)
    assert report["chunked"]["slowdown_p50"]["median"] == pytest.approx(2.5)
    assert report["gain_p99"]["median"] == pytest.approx(0.9 / 0.02955, abs=1e-4)
    assert report["ttft_chunked_to_whole"]["median"] == 2.0
    assert list(report["goals"].values()) == [True, True]
    assert "MISSED" not in report_text(report)
    swapped = summarize({"chunked": [whole], "whole": [chunked]})
    assert list(swapped["goals"].values()) == [False, False]
