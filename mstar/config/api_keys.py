"""Which API keys a server accepts: those of its configuration, of a file, and of the environment. Any process.

A file or the environment keeps keys out of configurations that are shared. Keys are never shown, in errors neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mstar import envs
from mstar.config.load import ConfigError
from mstar.config.schema import ServerConfig

MAX_KEY = 512
ADMIN = "admin"


class AcceptedKeys(NamedTuple):
    """`keys`: with none, requests need no key. `admin_keys`: the accepted keys that may see what others do, under
    `/debug/`; with none, every accepted key may."""

    keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()


def accepted_keys(server: ServerConfig) -> AcceptedKeys:
    """All of them, each once.

    Raises:
        ConfigError: the file cannot be read or holds no key, or something is no key.
    """
    keys = [*server.api_keys, *envs.API_KEYS.get()]
    admin_keys = list(server.admin_keys)
    if server.api_keys_file is not None:
        in_file, admins_in_file = _read(Path(server.api_keys_file).expanduser())
        keys += in_file
        admin_keys += admins_in_file
    keys += admin_keys
    for key in keys:
        if not (key and key.isprintable() and " " not in key and len(key) <= MAX_KEY):
            raise ConfigError(f"an API key has 1 to {MAX_KEY} printable characters without a space; one has not")
    return AcceptedKeys(tuple(dict.fromkeys(keys)), tuple(dict.fromkeys(admin_keys)))


def _read(path: Path) -> tuple[list[str], list[str]]:
    """Keys, and those marked as an administrator's, of a file with one a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise ConfigError(f"server.api_keys_file: cannot read {path}: {reason}") from None
    keys: list[str] = []
    admin_keys: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or words[1:] not in ([], [ADMIN]):
            raise ConfigError(f"server.api_keys_file: line {number} of {path} is not a key, or a key and '{ADMIN}'")
        (admin_keys if len(words) == 2 else keys).append(words[0])
    if not keys and not admin_keys:  # else a file that was emptied by mistake would open the server to everybody
        raise ConfigError(f"server.api_keys_file: there is no key in {path}")
    return keys, admin_keys
