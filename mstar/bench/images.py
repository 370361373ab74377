"""Images of an image workload, made from a seed: PNG files as data URLs, without an image library.

An image is a mosaic of tiles in random colours: no two are alike, and a large one is some kilobytes, so that encoding
and sending it takes the load generator little. Which image a request has is a function of (seed, request) alone.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

TILE = 8
"""Pixels of a side."""
MOST_PIXELS = 1 << 26


class ImageSize(NamedTuple):
    """In pixels."""

    width: int
    height: int


class ChosenImages(NamedTuple):
    """Those of one request, in order. `seen`: all of them were in earlier requests."""

    urls: tuple[str, ...]
    seen: bool


def parse_sizes(text: str) -> tuple[ImageSize, ...]:
    """`448x336,1024x768` → sizes; one written twice is chosen twice as often. Raises `ValueError`."""
    sizes: list[ImageSize] = []
    for word in text.split(","):
        width, cross, height = word.strip().partition("x")
        if not cross or not (width.isdecimal() and height.isdecimal()):
            raise ValueError(f"{word.strip()!r} is not the size of an image, such as 448x336")
        size = ImageSize(int(width), int(height))
        if not 0 < size.width * size.height <= MOST_PIXELS:
            raise ValueError(f"an image of {word.strip()} pixels: more than 0 and at most {MOST_PIXELS} in all")
        sizes.append(size)
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class ImageChoice:
    """`num_images` of each request, each of one of `sizes`. A share `repeats` of the first `num_requests` have the
    images of an earlier request instead of new ones; requests beyond them have new ones."""

    sizes: Sequence[ImageSize]
    num_images: int
    repeats: float
    seed: int
    num_requests: int
    _made: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def origin(self, request: int) -> int:
        """The request whose images `request` (from 0 on, among those with images) has: itself or an earlier one."""
        while 0 < request < self.num_requests:
            draw = random.Random(f"{self.seed}/repeat/{request}")
            if draw.random() >= self.repeats:
                break
            request = draw.randrange(request)
        return request

    def images(self, request: int) -> ChosenImages:
        """Of a request; made when first asked for. Made before a load, they cost nothing while it runs."""
        origin = self.origin(request)
        if origin not in self._made:
            draw = random.Random(f"{self.seed}/image/{origin}")
            self._made[origin] = tuple(_data_url(mosaic(draw.choice(self.sizes), draw)) for _ in range(self.num_images))
        return ChosenImages(self._made[origin], seen=origin != request)


def mosaic(size: ImageSize, draw: random.Random) -> bytes:
    """A PNG file, 8 bits RGB."""
    rows: list[bytes] = []
    while len(rows) < size.height:
        tiles = [draw.randbytes(3) for _ in range(-(-size.width // TILE))]
        row = b"\0" + b"".join(colour * TILE for colour in tiles)[: 3 * size.width]  # b"\0": no filter
        rows.extend([row] * min(TILE, size.height - len(rows)))
    header = struct.pack(">IIBBBBB", size.width, size.height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
