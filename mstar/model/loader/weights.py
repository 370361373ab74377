"""Streams the weights of a checkpoint, whatever its kind, by Hugging Face name. Runs in the worker that loads them."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mstar.model.loader.checkpoint import ResolvedCheckpoint
from mstar.model.loader.directory_files import weight_files
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_header import read_gguf_header
from mstar.model.loader.gguf_weights import hf_names, read_gguf_weights
from mstar.model.loader.progress import LoadProgress, counted

Selection = Collection[str] | Callable[[str], bool] | None


def iter_weights(
    checkpoint: ResolvedCheckpoint,
    *,
    dtype: torch.dtype | None,
    names: Selection = None,
    progress: LoadProgress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, CPU tensor) one by one: floating-point tensors in `dtype`, others as stored. With None all are as
    stored (quantized ones in fp32), which `load_weights` brings to each parameter's own dtype. A tensor may be a view
    of the mapped file, so copy it and never write to it. Tensors of one layer come close together. `names` selects: a
    collection of names that must all exist, or a predicate; None means all. `progress` counts stored bytes.

    Raises:
        CheckpointError: a selected name is absent, a name is in two files, or a file is damaged.
    """
    if checkpoint.kind == "gguf":
        return _iter_gguf(checkpoint.path, dtype or torch.float32, names, progress)
    return _iter_safetensors(checkpoint.path, dtype, names, progress)


def weight_names(checkpoint: ResolvedCheckpoint) -> list[str]:
    """Names of all weights, without reading them."""
    if checkpoint.kind == "gguf":
        return list(hf_names(read_gguf_header(checkpoint.path)))
    return [name for file in weight_files(checkpoint.path) for name in _names_in(file)]


def num_parameters(checkpoint: ResolvedCheckpoint, names: Selection = None) -> int:
    """Elements of all weights, or of those that `names` selects as in `iter_weights`, from the headers."""
    if checkpoint.kind == "gguf":
        entries = hf_names(read_gguf_header(checkpoint.path))
        return sum(math.prod(entries[name].shape) for name in _select(entries, names, checkpoint.path))
    files = {name: file for file in weight_files(checkpoint.path) for name in _names_in(file)}
    selected = _select(files, names, checkpoint.path)
    total = 0
    for file in dict.fromkeys(files.values()):
        with safe_open(file, framework="pt", device="cpu") as opened:
            own = (name for name in selected if files[name] == file)
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in own)
    return total


def _iter_gguf(
    path: Path, dtype: torch.dtype, names: Selection, progress: LoadProgress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    header = read_gguf_header(path)
    entries = hf_names(header)
    selected = _select(entries, names, path)
    add = counted(f"loading {path.name}", sum(entries[name].num_bytes for name in selected), progress)
    for name, tensor, num_bytes in read_gguf_weights(header, selected, dtype):
        yield name, tensor
        add(num_bytes)


def _iter_safetensors(
    directory: Path, dtype: torch.dtype | None, names: Selection, progress: LoadProgress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    files: dict[str, Path] = {}
    for file in weight_files(directory):
        for name in _names_in(file):
            if name in files:
                raise CheckpointError(f"{name} is both in {files[name].name} and in {file.name} of {directory}")
            files[name] = file
    selected = set(_select(files, names, directory))
    shards = {file: sorted(name for name in selected if files[name] == file) for file in dict.fromkeys(files.values())}
    shards = {file: shard for file, shard in shards.items() if shard}
    total = sum(_stored_bytes(file, shard) for file, shard in shards.items())
    add = counted(f"loading {directory.name}", total, progress)
    for file, shard in shards.items():
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in shard:
                tensor = opened.get_tensor(name)
                yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                add(tensor.nbytes)


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return sorted(opened.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error


def _stored_bytes(file: Path, names: list[str]) -> int:
    with safe_open(file, framework="pt", device="cpu") as opened:
        return sum(opened.get_tensor(name).nbytes for name in names)  # views of the mapping: nothing is read


def _select(present: Iterable[str], names: Selection, where: Path) -> list[str]:
    if names is None:
        return list(present)
    if callable(names):
        return [name for name in present if names(name)]
    wanted = set(names)
    chosen = [name for name in present if name in wanted]
    if absent := sorted(wanted.difference(chosen)):
        raise CheckpointError(f"{where} has no weights {', '.join(absent)}")
    return chosen
