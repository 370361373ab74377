"""What the code of a model or of a resource raised, in the log: whoever wrote it looks for the line.

Any thread of the process that ran it. Clients see none of this. The traceback of a place is written once, however many
steps fail there.
"""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger(__name__)

MAX_PLACES = 256
_Place = tuple[type[BaseException], str, int]
_written: set[_Place] = set()
"""Places whose traceback is in the log of this process."""


def log_fault(what: str, error: BaseException) -> None:
    """`what`: whose code it was, and what it was asked for."""
    place = _place(error)
    if place in _written or len(_written) >= MAX_PLACES:
        log.error("%s (its traceback is further up)", what)
        return
    _written.add(place)
    log.error("%s", what, exc_info=error)


def _place(error: BaseException) -> _Place:
    frames = traceback.extract_tb(error.__traceback__)
    return type(error), frames[-1].filename if frames else "", (frames[-1].lineno or 0) if frames else 0
