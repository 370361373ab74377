"""The server's log as records, and which of them are a finding: every warning and error that nobody asked for."""

from __future__ import annotations

import re
from pathlib import Path

from soak.triggers import MARK

_RECORD = re.compile(r"^\d\d:\d\d:\d\d ([DIWEC]) ([^:]+): ")
_INJECTED = re.compile(rf"{MARK}|forward of \w+ r[ua]ns? out of memory")
_OF_KILLS = re.compile(
    r"worker \d+ (was killed by signal 9|has ended)|not ready|worker \d+ is starting|cannot answer now"
)
_OF_TINY_POOLS = re.compile(r"fewer than max_seq_len")
_OF_TIMEOUTS = re.compile(r": 504 ")


def unexpected_records(log: Path, *, had_kills: bool) -> list[str]:
    """Warnings, errors and tracebacks, each with its following lines (cut), but for those of faults that were asked
    for, of kills, of timeouts, and that a pool is smaller than the context."""
    records: list[list[str]] = []
    for line in log.read_text(errors="replace").splitlines():
        if _RECORD.match(line) or not records:
            records.append([line])
        else:
            records[-1].append(line)
    found = []
    for lines in records:
        text = "\n".join(lines)
        match = _RECORD.match(lines[0])
        is_severe = match is not None and match[1] in "WEC"
        if not is_severe and "Traceback" not in text:
            continue
        if _OF_TINY_POOLS.search(lines[0]):
            continue
        if _INJECTED.search(text) or _OF_TIMEOUTS.search(lines[0]) or (had_kills and _OF_KILLS.search(text)):
            continue
        found.append(text[-1500:] if len(text) > 1500 else text)
    return found
