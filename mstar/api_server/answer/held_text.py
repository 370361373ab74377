"""Holding back the end of a text that may be the beginning of a marker. Pure functions."""

from __future__ import annotations


def num_held(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker` and is shorter than it."""
    begin = max(0, len(text) - len(marker) + 1)
    while (begin := text.find(marker[0], begin)) >= 0:
        if marker.startswith(text[begin:]):
            return len(text) - begin
        begin += 1
    return 0


def may_begin(text: str, *markers: str) -> bool:
    """Whether more text may complete one of `markers` at the beginning of `text`."""
    return any(len(text) < len(marker) and marker.startswith(text) for marker in markers)
