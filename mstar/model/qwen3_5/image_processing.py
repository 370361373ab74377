"""Bytes of an image file → patches. Runs in the preprocess pool, on PIL and numpy; no torch.

A file is judged by its header before anything of it is decoded. Whatever is wrong with it is a `MediaError`.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from mstar.model.qwen3_5.media_rules import MediaError, MediaRules, MediaTooLongError, Size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
UNKNOWN = f"an image could not be recognized; {', '.join(FORMATS)} are read"
MAX_SOURCE_PIXELS = 1 << 26
"""Of an image or a frame as it was sent; decoded, three bytes each."""

_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What PIL raises for files that are not what they claim."""


class Patches(NamedTuple):
    """`pixels` uint8 [times * rows * columns, 3 * temporal_patch_size * patch_size²]: patches of one merged token
    follow each other, tokens run along rows. `grid`: times, rows and columns, in patches."""

    pixels: np.ndarray
    grid: tuple[int, int, int]


def read_image(data: bytes, rules: MediaRules, max_tokens: int) -> Patches:
    """The patches of an image file (of an animation, its first frame).

    Raises:
        MediaError: not an image that can be read, too large, or one that would make more than `max_tokens` tokens.
    """
    with opened_image(data) as image:
        height, width = image.height, image.width
        if image.getexif().get(0x0112) in (5, 6, 7, 8):  # shown lying on its side
            height, width = width, height
        size = rules.image_size(height, width)
        check_tokens(size.height * size.width // rules.factor**2, max_tokens, "an image")
        upright = ImageOps.exif_transpose(image)
        frame = resized(upright, size)
    return patches_of(np.broadcast_to(frame, (rules.temporal_patch_size, *frame.shape)), rules)


def num_image_pixels(data: bytes) -> int:
    """By the file's header. Raises `MediaError` for one that is no image or too large."""
    with opened_image(data) as image:
        return image.width * image.height


@contextmanager
def opened_image(data: bytes, unknown: str = UNKNOWN) -> Iterator[Image.Image]:
    """The image with its header read. Raises `MediaError` for one that is no image (saying `unknown`) or too large, and
    for damage that is found in the block."""
    if not data:
        raise MediaError("an image is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of large images, which are refused here
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                if image.width * image.height > MAX_SOURCE_PIXELS:
                    raise MediaError(
                        f"an image of {image.width} x {image.height} pixels is too large; "
                        f"at most {MAX_SOURCE_PIXELS >> 20} megapixels are read"
                    )
                yield image
    except MediaError:
        raise
    except Image.DecompressionBombError as error:
        raise MediaError(f"an image is too large; at most {MAX_SOURCE_PIXELS >> 20} megapixels are read") from error
    except Image.UnidentifiedImageError as error:
        raise MediaError(unknown) from error
    except _DAMAGE as error:
        raise MediaError(f"an image could not be read: {error}") from error


def check_tokens(num_tokens: int, max_tokens: int, what: str) -> None:
    """Raises `MediaTooLongError`: it alone would fill the context."""
    if num_tokens > max_tokens:
        raise MediaTooLongError(f"{what} makes {num_tokens} tokens, more than the context of {max_tokens}")


def resized(image: Image.Image, size: Size) -> np.ndarray:
    """uint8 [height, width, 3]: as RGB, by bicubic interpolation."""
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    if rgb.size != (size.width, size.height):
        rgb = rgb.resize((size.width, size.height), Image.Resampling.BICUBIC)
    return np.asarray(rgb)


def patches_of(frames: np.ndarray, rules: MediaRules) -> Patches:
    """`frames` uint8 [times * temporal_patch_size, height, width, 3], sides multiples of `rules.factor`."""
    patch, merge, deep = rules.patch_size, rules.merge_size, rules.temporal_patch_size
    count, height, width, colours = frames.shape
    grid = (count // deep, height // patch, width // patch)
    split = frames.reshape(grid[0], deep, grid[1] // merge, merge, patch, grid[2] // merge, merge, patch, colours)
    # By time and token; in a token by patch; in a patch by colour, depth, y and x.
    ordered = np.ascontiguousarray(split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7))
    return Patches(ordered.reshape(grid[0] * grid[1] * grid[2], -1), grid)
