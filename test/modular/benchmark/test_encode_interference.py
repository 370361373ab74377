"""The harness of images beside running streams, over a tiny checkpoint: it measures what it says, and its ratios are
those of its times."""

import numpy as np
import pytest
import torch

from benchmark.encode_interference import (
    MODES,
    PHASES,
    Sample,
    Shape,
    compare,
    image_prompt,
    measure_once,
    num_patches,
    report_text,
    square,
    summarize,
)
from mstar.cli.targets import config_for
from mstar.launch.deployment import resolve_deployment
from mstar.launch.local import LocalInstance
from mstar.model.registry import find_card, write_random_checkpoint

SHAPE = Shape(square(64), images=2, streams=2, stream_prompt=8, stream_tokens=200, alone_tokens=6, warmup_tokens=2)
SMALL = ["max_seq_len=512", "scheduler.max_rows=5", "resources.kv.num_pages=40", "resources.state.num_slots=16"]


@pytest.fixture(scope="module")
def instances(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_random_checkpoint(find_card("qwen3_5"), "tiny", path / "model", seed=3)
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    made = {
        mode: LocalInstance(
            resolve_deployment(
                config_for(
                    str(path / "model"),
                    [*SMALL, "dtype=float32", "num_threads=1", f"scheduler.max_step_patches={patches}"],
                ),
                cache_dir=path / "cache",
            )
        )
        for mode, patches in zip(MODES, (24, 1 << 30), strict=True)
    }
    yield made
    for instance in made.values():
        instance.close()
    torch.set_grad_enabled(before)


def test_an_image_has_the_patches_that_it_is_asked_for(instances):
    model = instances["whole"].model
    for patches in (16, 64, 256):
        prompt = image_prompt(model, square(patches), seed=1)
        assert num_patches(prompt) == patches
    first, second = (image_prompt(model, square(64), seed).inputs["pixels"] for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_streams_go_on_beside_images_of_several_steps(instances):
    """Two images at once, each of several steps: a stream has a token after every one of them."""
    cut, whole = (measure_once(instances[mode], SHAPE, seed=7) for mode in MODES)
    assert len(cut.gaps["alone"]) == SHAPE.streams * SHAPE.alone_tokens
    assert len(cut.gaps["encoding"]) >= SHAPE.streams * 12 > 4 * len(whole.gaps["encoding"])
    assert all(min(sample.gaps[phase]) > 0 for sample in (cut, whole) for phase in PHASES if sample.gaps[phase])
    assert cut.gaps["chunking"] and whole.gaps["chunking"]
    assert {phase: len(gaps) for phase, gaps in cut.gaps.items()} == {p: len(gaps) for p, gaps in cut.cpu_gaps.items()}


def test_each_mode_is_measured_in_every_repeat_and_nothing_is_left_behind(instances):
    samples = compare(instances, SHAPE, repeats=2)
    assert {mode: len(taken) for mode, taken in samples.items()} == {"stepwise": 2, "whole": 2}
    found = summarize(samples)
    assert set(found["goals"].values()) <= {True, False}
    text = report_text({"images": {"64x64": {"patches": 64, "prompt_tokens": 30, **found}}})
    assert "64x64: 64 patches" in text and "stepwise" in text
    for instance in instances.values():
        (_, parts), *_ = instance.workers
        gauges = parts.engine.gauges()
        assert gauges['mstar_pages{pool="kv",state="owned"}'] == 0
        assert gauges['mstar_slots{pool="state",state="live"}'] == 0


def test_ratios_by_hand():
    def sample(encoding, prefilling, ttft_s):
        gaps = {"alone": [0.1] * 9, "encoding": encoding, "prefilling": prefilling, "chunking": [0.2]}
        return Sample(gaps, gaps | {"alone": [0.05] * 9}, ttft_s)

    cut, whole = sample([0.25, 0.25], [0.2], 2.0), sample([], [0.9], 1.0)
    found = summarize({"stepwise": [cut], "whole": [whole]})
    assert found["stepwise"]["slowdown_encoding"]["p99"]["median"] == pytest.approx(2.5)
    assert found["stepwise"]["cpu_slowdown_encoding_p99"]["median"] == pytest.approx(5)
    assert found["stepwise"]["itl_chunking_ms"]["p50"]["median"] == pytest.approx(200)
    assert "itl_encoding_ms" not in found["whole"], "a single step may show after its end only"
    assert found["gain_p99"]["median"] == pytest.approx(0.9 / 0.25)
    assert found["ttft_stepwise_to_whole"]["median"] == 2.0
    assert list(found["goals"].values()) == [True]
    assert not any(summarize({"stepwise": [sample([0.31], [0.2], 1.0)], "whole": [whole]})["goals"].values())
