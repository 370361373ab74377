"""Writes safetensors files of tensors that are drawn while they are written: no more of them is in memory than a block.
Runs in the process that makes a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from mstar.model.loader.directory_files import INDEX, SINGLE
from mstar.model.loader.progress import LoadProgress, counted

Draw = Callable[[int, torch.Generator], torch.Tensor]
"""`draw(num_elements, generator)`: float32 `[num_elements]`."""

SHARD_BYTES = 2_000_000_000
_BLOCK = 1 << 22
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor of a checkpoint that is to be made, and the law of its entries, which are independent."""

    name: str
    shape: tuple[int, ...]
    draw: Draw
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_random_weights(
    directory: Path,
    tensors: Sequence[RandomTensor],
    *,
    seed: int,
    shard_bytes: int = SHARD_BYTES,
    progress: LoadProgress | None = None,
) -> None:
    """`model.safetensors`, or numbered shards with their index where the tensors take more than `shard_bytes`. A shard
    holds more only where a single tensor does. What a tensor holds depends on `seed` and its name alone: not on the
    other tensors, nor on the shard it is in."""
    shards = _in_shards(tensors, shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [_shard_name(n, len(shards)) for n in range(len(shards))]
    total_bytes = sum(tensor.num_bytes for tensor in tensors)
    add = counted(f"writing {directory.name}", total_bytes, progress)
    for name, shard in zip(names, shards, strict=True):
        with (directory / name).open("wb") as file:
            _write_file(file, shard, seed, add)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _in_shards(tensors: Sequence[RandomTensor], shard_bytes: int) -> list[list[RandomTensor]]:
    shards: list[list[RandomTensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.num_bytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_file(file: BinaryIO, tensors: Sequence[RandomTensor], seed: int, add: Callable[[int], None]) -> None:
    """The format: length of the header (u64, little endian), the header as JSON padded to 8 bytes, the tensors' bytes
    without gaps in the header's order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        left = math.prod(tensor.shape)
        while left:
            count = min(left, _BLOCK)
            block = tensor.draw(count, generator).to(tensor.dtype)
            file.write(block.view(torch.uint8).numpy().data)
            add(block.nbytes)
            left -= count
