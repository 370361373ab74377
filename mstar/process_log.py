"""How the processes of an instance write their log: one line a message, as text or as JSON, told apart by the name of
the process. Any process, once, before its first line.

Nobody can forge a line: what cannot be seen in a message is shown, not obeyed. Lines that are written on behalf of a
request carry its id, which whoever serves it sets in `REQUEST`.
"""

from __future__ import annotations

import json
import logging
import unicodedata
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
REQUEST: ContextVar[dict[str, Any] | None] = ContextVar("mstar_request", default=None)
"""Fields of the request that the running task serves: its `request_id`, and what becomes known of it."""
_SHORT = {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control and format characters (such as those that reverse text), surrogates, separators."""


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


class TextFormatter(logging.Formatter):
    """Time, level, process and message, with what cannot be seen escaped. The lines of a traceback are indented, so
    that none can pass for a message."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process}: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPES)
        request_id = (REQUEST.get() or {}).get("request_id", "")
        if request_id and request_id not in record.message:
            record.message += f" [{request_id}]"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        text = super().formatException(ei).translate(_ESCAPES_BUT_NEWLINE)
        return "\n".join("    " + line for line in text.split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object in ASCII a line: `time` (RFC 3339, UTC), `level`, `process`, `logger`, `message`; `request_id`
    where there is one; `exception` with its traceback; and the fields that the line was given as `extra["fields"]`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = REQUEST.get()
        if request is not None:
            line["request_id"] = request["request_id"]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        line |= getattr(record, "fields", {})
        return json.dumps(line, default=str)


def configure_log(process: str, level: str, log_format: LogFormat = "text") -> None:
    """Lines go to standard error. `process`: name of this process; `level`: as `MSTAR_LOG_LEVEL` has it."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("httpx", "uvicorn.error"):  # of every request of a download; of a server's own start and end
        logging.getLogger(name).setLevel(logging.WARNING)
