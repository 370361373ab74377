"""Log lines that no client can forge: control characters of a message are shown, not obeyed. Front process."""

from __future__ import annotations

import logging
from typing import Any

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_CONTROL_BUT_NEWLINE = {code: text for code, text in _CONTROL.items() if code != 0x0A}
LINE = "%(asctime)s %(levelname).1s front: %(message)s"


class EscapingFormatter(logging.Formatter):
    """One line per message, with control characters escaped. The lines of a traceback are indented, so that none can
    pass for a message."""

    def __init__(self) -> None:
        super().__init__(LINE, datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_CONTROL)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        text = super().formatException(ei).translate(_CONTROL_BUT_NEWLINE)
        return "\n".join("    " + line for line in text.split("\n"))


def configure_logging(level: str) -> None:
    """Sends this process's log to stderr through `EscapingFormatter`."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # below that it tells of its own start and end
