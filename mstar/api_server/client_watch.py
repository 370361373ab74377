"""Ends work that nobody waits for any more: the client's connection is watched while it is done. Front loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from mstar.conductor.events import ABORTED, RefusedError

T = TypeVar("T")


async def client_left(receive: Receive) -> None:
    """Returns when the client's connection ends."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; it is cancelled when the client leaves.

    Raises:
        RefusedError: the client has left.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(client_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise RefusedError(ABORTED)
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
