"""Weights that are drawn while they are written: what readers find, and what it depends on."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mstar.model.loader.checkpoint_writing import RandomTensor, write_random_weights


def normal(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, generator=generator)


TENSORS = [
    RandomTensor("a", (3, 5), normal),
    RandomTensor("b", (7,), normal, torch.float32),
    RandomTensor("c", (40, 2, 3), normal),
    RandomTensor("d", (), normal, torch.float32),
]  # 30, 28, 480 and 4 bytes


def written(directory: Path, **options) -> dict[str, torch.Tensor]:
    directory.mkdir()
    write_random_weights(directory, TENSORS, **{"seed": 0, **options})
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_shapes_and_dtypes_are_those_asked_for(tmp_path):
    found = written(tmp_path / "a")
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.items()} == {
        "a": ((3, 5), torch.bfloat16),
        "b": ((7,), torch.float32),
        "c": ((40, 2, 3), torch.bfloat16),
        "d": ((), torch.float32),
    }
    assert all(tensor.isfinite().all() and tensor.abs().max() > 0 for tensor in found.values())


@pytest.mark.parametrize(
    ("shard_bytes", "shards"), [(1 << 20, ["abcd"]), (60, ["ab", "c", "d"]), (500, ["ab", "cd"]), (1, list("abcd"))]
)
def test_shards_and_their_index(tmp_path, shard_bytes: int, shards: list[str]):
    directory = tmp_path / "a"
    found = written(directory, shard_bytes=shard_bytes)
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert ["".join(sorted(load_file(directory / file))) for file in files] == shards
    if len(shards) > 1:
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 30 + 28 + 480 + 4}
        assert index["weight_map"] == {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    else:
        assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
    whole = written(tmp_path / "b")
    assert all(torch.equal(found[name], whole[name]) for name in "abcd"), "where a tensor lies is no part of it"


def test_a_tensor_depends_on_seed_and_name_alone(tmp_path, monkeypatch):
    first, again, other = written(tmp_path / "a"), written(tmp_path / "b"), written(tmp_path / "c", seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    monkeypatch.setattr(f"{__name__}.TENSORS", [TENSORS[2], RandomTensor("e", (40, 2, 3), normal)])
    fewer = written(tmp_path / "d")
    assert torch.equal(fewer["c"], first["c"])
    assert not torch.equal(fewer["c"], fewer["e"])


def test_blocks_of_a_large_tensor_go_on_where_the_last_one_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("mstar.model.loader.checkpoint_writing._BLOCK", 64)
    found = written(tmp_path / "a")["c"].flatten()
    assert found.unique().numel() > 200  # of 240, in bf16
    assert abs(found.float().mean()) < 0.3
    assert 0.8 < found.float().std() < 1.2


def test_progress_ends_at_what_was_written(tmp_path):
    seen = []
    written(tmp_path / "a", progress=lambda *report: seen.append(report))
    assert seen[0] == ("writing a", 0, 542)
    assert seen[-1] == ("writing a", 542, 542)
