"""Log lines that no client can forge: what cannot be seen in a message is shown, not obeyed. Front process."""

from __future__ import annotations

import logging
import unicodedata
from typing import Any

_SHORT = {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control and format characters (such as those that reverse text), surrogates, separators."""
LINE = "%(asctime)s %(levelname).1s front: %(message)s"


class _Escapes:
    """For `str.translate`: an unseen character's escape, another character itself."""

    def __init__(self, kept: str = "") -> None:
        self._kept = frozenset(map(ord, kept))

    def __getitem__(self, code: int) -> int | str:
        if code in self._kept or unicodedata.category(chr(code)) not in _UNSEEN:
            return code
        if code < 0x100:
            return _SHORT.get(code, f"\\x{code:02x}")
        return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_ESCAPES = _Escapes()
_ESCAPES_BUT_NEWLINE = _Escapes(kept="\n")


class EscapingFormatter(logging.Formatter):
    """One line per message, with what cannot be seen escaped. The lines of a traceback are indented, so that none can
    pass for a message."""

    def __init__(self) -> None:
        super().__init__(LINE, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        text = super().formatException(ei).translate(_ESCAPES_BUT_NEWLINE)
        return "\n".join("    " + line for line in text.split("\n"))


def configure_logging(level: str) -> None:
    """Sends this process's log to stderr through `EscapingFormatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # below that it tells of its own start and end
