"""The vision tower against transformers on random weights: media of all sizes, in one forward or spread over steps,
alone or among others; and what the cache of features saves."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from mstar.communication.messages import MediaSpan, SamplingParams
from mstar.engine.device_graph import GraphMemory
from mstar.engine.layer_handles import bind_layers
from mstar.engine.resources.base import OpenConfig, StepContext
from mstar.engine.resources.encoder_cache import EncoderCache
from mstar.engine.spec import EncoderCacheSpec
from mstar.engine.staging import StepShape
from mstar.engine.step import EncodeStep, Rows
from mstar.engine.submodule import EngineInputs, RowColumns
from mstar.engine.transaction import Transaction
from mstar.layers.linear import pack_weights
from mstar.model.base import ModelSetup
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.load_rules import LoadRules
from mstar.model.loader.module_loading import load_weights
from mstar.model.qwen3_5.config import Qwen35Config, VisionConfig
from mstar.model.qwen3_5.vision import Grid, VisionTower
from mstar.model.qwen3_5.vision_submodule import VisionSubmodule, build_vision
from mstar.model.submodule_context import SubmoduleContext

CPU = torch.device("cpu")
MERGE = 2
SIZES = {
    "depth": 5,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "out_hidden_size": 24,
}
CONFIG = VisionConfig(**SIZES, grid_side=7, hidden_act="gelu_pytorch_tanh", rope_theta=1e4)
MEAN, STD = (0.5, 0.4, 0.3), (0.5, 0.25, 0.4)
GRIDS: list[Grid] = [(1, 4, 6), (1, 2, 2), (1, 14, 10), (1, 8, 4), (1, 8, 4), (1, 2, 20)]
"""In patches: several sizes, the smallest one, one that is larger than the learned grid, two alike, a narrow one."""


@pytest.fixture(scope="module")
def reference() -> Qwen3_5VisionModel:
    torch.manual_seed(3)
    model = Qwen3_5VisionModel(Qwen3_5VisionConfig(**SIZES, num_position_embeddings=49)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.2))
            if parameter.ndim == 1:
                parameter += 0.5
    return model


@pytest.fixture(scope="module")
def tower(reference: Qwen3_5VisionModel) -> VisionTower:
    tower = VisionTower(CONFIG, MEAN, STD, dtype=torch.float32, device="meta")
    weights = ((n, p.flatten(1) if n.startswith("patch_embed") and p.ndim > 1 else p.data)
               for n, p in reference.named_parameters())  # fmt: skip
    load_weights(tower, weights, LoadRules())
    pack_weights(tower)
    return tower


def pixels_of(grid: Grid, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (int(np.prod(grid)), 3 * 2 * 4 * 4), np.uint8)


def expected(reference: Qwen3_5VisionModel, pixels: np.ndarray, grid: Grid) -> Tensor:
    values = torch.from_numpy(pixels).float().view(-1, 3, 32) / 255
    values = (values - torch.tensor(MEAN)[:, None]) / torch.tensor(STD)[:, None]
    with torch.no_grad():
        return reference(values.flatten(1), torch.tensor([grid])).pooler_output


def media_span(grid: Grid, pixels: np.ndarray) -> MediaSpan:
    merged = (grid[0], grid[1] // MERGE, grid[2] // MERGE)
    return MediaSpan(0, int(np.prod(merged)), pixels.tobytes()[:32], merged)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


class Rig:
    """A vision node with its cache, stepped by hand as an engine does."""

    def __init__(self, tower: VisionTower, budget: int = 10_000, max_bytes: int = 1 << 20) -> None:
        self.cache = EncoderCache(
            EncoderCacheSpec("encoder", CONFIG.out_hidden_size), capacity=8, max_bytes=max_bytes, dtype=torch.float32,
            device=CPU,
        )  # fmt: skip
        self.node = VisionSubmodule(tower, cache_key="encoder", loop="encode", budget=budget)
        bind_layers("Vision", self.node, {"encoder": self.cache})
        self.pixels: dict[int, Tensor] = {}
        self.hidden: dict[int, Tensor] = {}
        self.iterations: dict[int, int] = {}
        self.features: dict[int, Tensor] = {}
        self.costs: list[int] = []

    def open(self, handle: int, media: Sequence[tuple[Grid, np.ndarray]]) -> None:
        spans = tuple(media_span(grid, pixels) for grid, pixels in media)
        self.cache.introduce(handle, OpenConfig(SamplingParams(), np.zeros(4, np.int32), 8, spans))
        self.pixels[handle] = torch.from_numpy(np.concatenate([pixels for _, pixels in media]))
        self.iterations[handle] = 0

    def columns(self, handles: Sequence[int]) -> RowColumns:
        zeros = np.zeros(len(handles), np.int32)
        iterations = np.array([self.iterations[handle] for handle in handles], np.int32)
        return RowColumns(
            np.array(handles, np.int64), zeros, zeros, zeros, iterations, zeros > 0, [None] * len(handles), frozenset()
        )

    def step(self, handles: Sequence[int], *, keep: bool = True) -> set[int]:
        """One step of those that have a turn among `handles`; returns them."""
        spans = self.node.prepare_batch("encode", self.columns(handles)).spans
        handles = [handle for handle, span in zip(handles, spans.tolist(), strict=True) if span >= 0]
        assert (self.node.prepare_batch("encode", self.columns(handles)).spans == 0).all()
        rows = Rows(np.array(handles, np.int64), np.zeros(len(handles), np.int32))
        ctx, txn = StepContext(rows, 0, False, {}, StepShape(len(handles), 0, 0)), Transaction()
        facts = self.cache.plan(EncodeStep(), ctx)
        self.cache.advance(EncodeStep(), ctx, txn)
        txn.commit()
        self.cache.begin_forward(facts, {})
        columns = self.columns(handles)
        outputs = self.node.forward_batched("encode", self.inputs(handles))
        stopped: set[int] = set()
        for decision in self.node.check_stop("encode", columns, {}):
            assert decision.loop == "encode" and not decision.finish
            stopped |= {handles[index] for index in decision.index.tolist()}
        self.cache.publish(EncodeStep(), rows, facts, None if keep else np.zeros(len(handles), np.bool_))
        for index, handle in enumerate(handles):
            self.iterations[handle] += 1
            self.hidden[handle] = outputs["hidden"][index].clone()
            assert (len(outputs["features"][index]) > 0) == (handle in stopped)
            if handle in stopped:
                self.features[handle] = outputs["features"][index].clone()
        return set(handles)

    def inputs(self, handles: Sequence[int]) -> EngineInputs:
        given = {"pixels": [self.pixels[handle] for handle in handles]}
        if any(self.iterations[handle] for handle in handles):
            given["hidden"] = [self.hidden.get(handle, torch.empty(0)) for handle in handles]
        stacked = {n: torch.stack(v) for n, v in given.items() if len({t.shape for t in v}) == 1}
        ragged = {n: v for n, v in given.items() if n not in stacked}
        return EngineInputs(len(handles), None, None, stacked, ragged, torch.zeros(len(handles), dtype=torch.long))

    def run(self, handles: Sequence[int]) -> list[set[int]]:
        """Steps until all have their features; returns who was in which."""
        steps: list[set[int]] = []
        while going := [handle for handle in handles if handle not in self.features]:
            steps.append(self.step(going))
            assert steps[-1] and len(steps) < 400
        return steps


@pytest.mark.parametrize("grid", GRIDS)
def test_features_are_those_of_transformers(reference, tower, grid: Grid) -> None:
    pixels = pixels_of(grid, 1)
    x = tower.embed(torch.from_numpy(pixels), [grid])
    features = tower.merge(tower.run_blocks(x, tower.segments([grid]), range(CONFIG.depth)))
    close(features, expected(reference, pixels, grid))


def test_frame_groups_of_a_video_see_only_themselves(reference, tower) -> None:
    """One grid of three groups in transformers, three media here."""
    pixels = pixels_of((3, 4, 6), 2)
    theirs = expected(reference, pixels, (3, 4, 6))
    rig = Rig(tower)
    rig.open(0, [((1, 4, 6), piece) for piece in np.split(pixels, 3)])
    rig.run([0])
    close(rig.features[0], theirs)


@pytest.mark.parametrize("budget", [20, 250, 500, 100_000])
def test_media_of_several_requests_in_one_forward(reference, tower, budget: int) -> None:
    """All of them at once, whatever a step may cost: at different places of the tower, and with different numbers."""
    rig = Rig(tower, budget)
    wanted: dict[int, Tensor] = {}
    for handle, grids in enumerate([GRIDS[:3], GRIDS[3:4], GRIDS[4:5], GRIDS[5:]]):
        media = [(grid, pixels_of(grid, 10 * handle + index)) for index, grid in enumerate(grids)]
        rig.open(handle, media)
        wanted[handle] = torch.cat([expected(reference, pixels, grid) for grid, pixels in media])
    if budget < 100_000:
        rig.step([0])  # one is ahead of the others
    steps = rig.run(list(wanted))
    shared = [len(step) for step in steps]
    assert shared == [4] if budget == 100_000 else len(shared) > 3
    for handle, theirs in wanted.items():
        close(rig.features[handle], theirs)


@pytest.mark.parametrize(("picks", "patches"), [((0,), 32), ((3, 4), 64), ((1, 0, 5), 300), (range(6), 300)])
def test_captured_blocks_make_the_same_features(
    reference, tower, picks: Sequence[int], patches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind the patches is NaN."""
    rig = Rig(tower, 100_000)
    rig.node.regions["blocks"].capture((32, 64, 300), GraphMemory(CPU), CPU, poison=True)
    seen: list[int] = []
    run_blocks = VisionTower.run_blocks

    def counted(self, x, segments, blocks):
        seen.append(x.shape[0])
        return run_blocks(self, x, segments, blocks)

    monkeypatch.setattr(VisionTower, "run_blocks", counted)
    media = [(GRIDS[pick], pixels_of(GRIDS[pick], 90 + pick)) for pick in picks]
    for handle, medium in enumerate(media):
        rig.open(handle, [medium])
    rig.run(range(len(media)))
    assert seen in ([patches], [])  # [] is a tape's
    for handle, (grid, pixels) in enumerate(media):
        close(rig.features[handle], expected(reference, pixels, grid))


def test_no_step_costs_much_more_than_the_budget(reference, tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wait for each other where they do not fit together; of one that is too large for a step of one block, parts
    of the block are computed."""
    costs: list[float] = []
    around: list[float] = []
    run_blocks, run_part = VisionTower.run_blocks, VisionTower.run_part
    embed, merge = VisionTower.embed, VisionTower.merge

    def counted_blocks(self, x, segments, blocks):
        costs[-1] += x.shape[0] * len(blocks)
        return run_blocks(self, x, segments, blocks)

    def counted_part(self, state, segments, part):
        costs[-1] += (part.end - part.begin) * (0.25 if part.kind == "project" else 0.75)
        return run_part(self, state, segments, part)

    def counted_embed(self, pixels, grids, *rows):
        x = embed(self, pixels, grids, *rows)
        around[-1] += 0.4 * x.shape[0]
        return x

    def counted_merge(self, x):
        around[-1] += 0.25 * x.shape[0]
        return merge(self, x)

    monkeypatch.setattr(VisionTower, "embed", counted_embed)
    monkeypatch.setattr(VisionTower, "merge", counted_merge)
    monkeypatch.setattr(VisionTower, "run_blocks", counted_blocks)
    monkeypatch.setattr(VisionTower, "run_part", counted_part)
    rig = Rig(tower, budget=70)
    media = [(grid, pixels_of(grid, handle)) for handle, grid in enumerate(GRIDS)]
    for handle, medium in enumerate(media):
        rig.open(handle, [medium])
    while len(rig.features) < len(GRIDS):
        costs.append(0)
        around.append(0)
        rig.step([handle for handle in range(len(GRIDS)) if handle not in rig.features])
    assert max(costs) <= 70
    assert max(around) <= 70 and max(map(sum, zip(costs, around, strict=True))) < 1.65 * 70
    assert sum(around) == pytest.approx(0.65 * sum(int(np.prod(grid)) for grid in GRIDS))
    assert sum(costs) == CONFIG.depth * sum(int(np.prod(grid)) for grid in GRIDS)
    for handle, (grid, pixels) in enumerate(media):
        close(rig.features[handle], expected(reference, pixels, grid))


def test_a_medium_that_comes_again_is_not_encoded_again(reference, tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """A, B, A in one request; then A, C, where only C is computed and fewer steps are needed; then all of them."""
    encoded: list[int] = []
    embed = VisionTower.embed

    def counted(self, pixels, grids):
        encoded.extend(int(np.prod(grid)) for grid in grids)
        return embed(self, pixels, grids)

    monkeypatch.setattr(VisionTower, "embed", counted)
    a, b, c = [(grid, pixels_of(grid, 50 + index)) for index, grid in enumerate([GRIDS[2], GRIDS[3], GRIDS[4]])]
    theirs = {id(m): expected(reference, m[1], m[0]) for m in (a, b, c)}
    rig = Rig(tower, budget=1000)
    for handle, media, patches, steps in ((0, [a, b, a], [140, 32], 3), (1, [a, c], [32], 1), (2, [c, b, a], [], 1)):
        encoded.clear()
        rig.open(handle, media)
        assert len(rig.run([handle])) == steps
        assert encoded == patches
        close(rig.features[handle], torch.cat([theirs[id(m)] for m in media]))
    assert rig.cache.gauges()['mstar_encoder_cache_media_total{cache="encoder",result="hit"}'] == 1 + 1 + 3


def test_weights_come_from_a_checkpoint(reference, tmp_path: Path) -> None:
    tensors = {"model.visual." + name: value.contiguous() for name, value in reference.state_dict().items()}
    save_file(tensors | {"model.language_model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5ForConditionalGeneration"]}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    context = SubmoduleContext(
        ModelSetup({}, tmp_path, 64), resolve_checkpoint(str(tmp_path), cache_dir=tmp_path), torch.float32, CPU
    )
    config = object.__new__(Qwen35Config)
    object.__setattr__(config, "vision", CONFIG)
    node = build_vision(context, config, cache_key="encoder", loop="encode", budget=100)
    pixels = pixels_of(GRIDS[0], 7)
    x = node.tower.embed(torch.from_numpy(pixels), [GRIDS[0]])
    features = node.tower.merge(node.tower.run_blocks(x, node.tower.segments([GRIDS[0]]), range(CONFIG.depth)))
    close(features, expected(reference, pixels, GRIDS[0]))
