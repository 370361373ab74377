"""Page keys: names for the contents of full pages, chained from the first page on. Loop thread, pure functions.

A key is blake2b-128 over the key before it and everything that the page's bytes depend on besides: equal keys, equal
bytes. What is the same for all pages of a cache is in the root of the chain.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mstar.communication.messages import MediaSpan

KEY_BYTES = 16
_SPAN = struct.Struct("<qqI")


class CacheContents(NamedTuple):
    """What the bytes of a cache's pages depend on besides the tokens. `fingerprint` names the weights; `layout` says
    how a page is laid out; `backends` and `positions` say who writes it, and with which positions; `states` are those
    that go with the cache."""

    fingerprint: str
    cache: str
    layout: str
    dtype: str
    page_size: int
    backends: str
    positions: str
    states: str = ""

    def root(self) -> bytes:
        return blake2b(repr(tuple(self)).encode(), digest_size=KEY_BYTES, person=b"mstar.contents").digest()


def salted(root: bytes, salt: str) -> bytes:
    """The root for requests with this `cache_salt`; the empty salt is that of requests without one."""
    if not salt:
        return root
    return blake2b(root + salt.encode(), digest_size=KEY_BYTES, person=b"mstar.salt").digest()


def chain_keys(
    parent: bytes, token_ids: np.ndarray, page_size: int, media: Sequence[MediaSpan] = (), start: int = 0
) -> list[bytes]:
    """Keys of the full pages of `token_ids`, which begin at token `start` of the request (a multiple of `page_size`);
    `parent` is the key of the page before, or the root."""
    num_pages = token_ids.size // page_size
    page_bytes = 4 * page_size
    ids = np.ascontiguousarray(token_ids[: num_pages * page_size], "<i4").tobytes()
    keys: list[bytes] = []
    for index in range(num_pages):
        own = ids[index * page_bytes : (index + 1) * page_bytes]
        if media:
            own += _spans_in(media, start + index * page_size, page_size)
        parent = blake2b(parent + own, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def _spans_in(media: Sequence[MediaSpan], begin: int, page_size: int) -> bytes:
    """Of each span that reaches into the page: its digest, and where it begins, seen from the page."""
    return b"".join(
        _SPAN.pack(span.start - begin, span.length, len(span.digest)) + span.digest
        for span in media
        if span.start < begin + page_size and span.start + span.length > begin
    )
