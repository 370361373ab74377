"""Prompts with images on an accelerator: texts of whole deployments as on the CPU, and the tower's features."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_parity import DEVICE, SEEING, generate, media_prompts, open_instance, start, write_checkpoint

from mstar.engine.device_graph import GraphMemory
from mstar.launch import rank
from mstar.model.qwen3_5.vision_submodule import ALL_BLOCKS, VisionSubmodule

COUNT, TOKENS = 12, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "captured": {},
    "eager": {"capture": {"enabled": False}},
    "in chunks, towers in parts": {"scheduler": {"max_step_tokens": 64, "max_step_patches": 60}},
    "plain loop, blocks over steps": {"scheduler": {"async_scheduling": False, "max_step_patches": 400}},
}


class Seeing:
    def __init__(self, model: str, directory: Path) -> None:
        self.model = model
        self.directory = write_checkpoint(model, directory / "checkpoint")
        self.prompts = media_prompts(COUNT, self.directory)
        reference = open_instance(model, self.directory, "cpu", capture={"enabled": False})
        self.expected = generate(reference, self.prompts, TOKENS)
        reference.close()


@pytest.fixture(scope="module", params=SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(request.param, tmp_path_factory.mktemp("seeing"))


@pytest.mark.parametrize("name", VARIANTS)
def test_texts_are_those_of_the_cpu(seeing: Seeing, name: str):
    instance = open_instance(seeing.model, seeing.directory, DEVICE, **VARIANTS[name])
    assert generate(instance, seeing.prompts, TOKENS) == seeing.expected
    assert generate(instance, seeing.prompts, TOKENS) == seeing.expected  # features and pages are there
    instance.close()
    alone = open_instance(seeing.model, seeing.directory, DEVICE, **VARIANTS[name])
    for prompt, tokens in zip(seeing.prompts[:4], seeing.expected, strict=False):
        assert generate(alone, [prompt], TOKENS) == [tokens]
    alone.close()


def test_no_launch_waits_for_the_device(seeing: Seeing, strict: None):
    instance = open_instance(seeing.model, seeing.directory, DEVICE)
    requests = []
    for prompt in seeing.prompts:
        requests += start(instance, [prompt], TOKENS)
        instance.tick()
    instance.finish(requests)
    assert [list(request.tokens["token"]) for request in requests] == seeing.expected
    instance.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_captured_blocks_are_the_towers(seeing: Seeing, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Every number of patches up to the largest size and one beyond, with NaN behind them, against fp32 on the CPU."""
    nodes = [tower_of(seeing, device, own, monkeypatch) for device, own in (("cpu", torch.float32), (DEVICE, dtype))]
    reference, node = nodes
    device = torch.device(DEVICE)
    region = node.regions[ALL_BLOCKS]
    region.capture((64, 128, 256), GraphMemory(device), device, poison=True)
    for sides in ([(2, 2)], [(2, 2), (2, 10), (6, 6)], [(8, 8)], [(4, 6), (12, 4)], [(16, 16)], [(16, 16), (2, 2)]):
        grids = [(1, *side) for side in sides]
        patches = sum(height * width for height, width in sides)
        x = torch.randn(patches, reference.tower.config.hidden_size)
        theirs = blocks_of(reference, x, grids)
        eager = node.tower.run_blocks(x.to(device, dtype), node.tower.segments(grids), range(node.tower.config.depth))
        ours = blocks_of(node, x.to(device, dtype), grids)
        most = 1e-4 if dtype is torch.float32 else 3e-2
        for made in (ours, eager):
            assert made.isfinite().all()
            assert float((made.float().cpu() - theirs).norm() / theirs.norm()) < most, sides


def blocks_of(node: VisionSubmodule, x: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    segments = node.tower.segments(grids)
    assert segments.lengths is not None
    return node.regions[ALL_BLOCKS]({"x": x, "cos": segments.cos, "sin": segments.sin}, segments.lengths)


def tower_of(seeing: Seeing, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> VisionSubmodule:
    """The node of a deployment."""
    found: list[VisionSubmodule] = []
    plain = rank.load_nodes

    def remembering(*args: Any) -> Any:
        nodes = plain(*args)
        found.extend(node for node in nodes.values() if isinstance(node, VisionSubmodule))
        return nodes

    with monkeypatch.context() as patch:
        patch.setattr(rank, "load_nodes", remembering)
        name = str(dtype).removeprefix("torch.")
        open_instance(seeing.model, seeing.directory, device, dtype=name, capture={"enabled": False}).close()
    return found[0]
