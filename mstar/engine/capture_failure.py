"""What start-up says when something cannot be captured. Loading thread."""

from __future__ import annotations

from mstar.engine.forward import is_out_of_memory

FAILURES = (RuntimeError, ValueError, TypeError, LookupError, MemoryError)
"""What forwards, hooks and the device raise."""


class CaptureError(Exception):
    """A declared walk or region cannot be captured, or not even be run. Start-up ends with it."""


def describe_failure(what: str, error: BaseException, *, recorded: bool = True) -> str:
    """One line: what failed, why, and which setting helps. `recorded`: it ran while it was captured.

    A recording that fails is ended by a second error, which says less than the first.
    """
    first = error.__context__ or error
    reason = str(error) if first is error else f"{error} (after {type(first).__name__}: {first})"
    if is_out_of_memory(error) or is_out_of_memory(first):
        helps = (
            "; caches leave too little memory: lower resources.KEY.memory_fraction or resources.KEY.num_pages"
            " (KEY names the cache)"
        )
        return f"{what} failed: {reason}{helps}" + (", or the largest of capture.batch_sizes" if recorded else "")
    return f"{what} failed: {reason}" + ("; capture.enabled: false serves without captures" if recorded else "")
