"""Image files become the patches of the transformers processor; files that are not what they claim are refused."""

import io
import random
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mstar.model.qwen3_5.image_processing import read_image
from mstar.model.qwen3_5.media_rules import MediaError, MediaRules

RULES = MediaRules(min_pixels=64 * 64, max_pixels=256 * 256)


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth colours with noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([x * 255 / max(width - 1, 1), y * 255 / max(height - 1, 1), (x * 7 + y * 13) % 256], -1)
    return Image.fromarray(np.clip(base + rng.normal(0, 9, base.shape), 0, 255).astype(np.uint8)).convert(mode)


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (64, 64), (100, 37), (37, 100), (640, 480), (300, 2), (97, 255), (32, 96), (50, 50)]
)
def test_patches_are_those_of_transformers(width: int, height: int) -> None:
    image = picture(width, height, seed=width)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": RULES.min_pixels, "longest_edge": RULES.max_pixels},
        patch_size=16, image_mean=RULES.mean, image_std=RULES.std,
    )  # fmt: skip
    expected = processor(images=image, return_tensors="np")
    ours = read_image(file_of(image), RULES, 10_000)
    assert ours.pixels.dtype == np.uint8
    assert [list(ours.grid)] == expected["image_grid_thw"].tolist()
    normalized = (ours.pixels / 255 - 0.5) / 0.5
    np.testing.assert_allclose(normalized, expected["pixel_values"], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", "RGB"), ("JPEG", "CMYK"), ("JPEG", "L"), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "1"), ("PNG", "I;16"),
     ("GIF", "P"), ("WEBP", "RGB"), ("BMP", "RGB"), ("TIFF", "RGB")],
)  # fmt: skip
def test_kinds_and_colours(kind: str, mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.arange(90 * 70, dtype=np.uint16).reshape(70, 90))
    else:
        image = picture(90, 70, mode=mode)
    data = file_of(image, kind)
    with Image.open(io.BytesIO(data)) as read:
        plain = read_image(file_of(read.convert("RGB")), RULES, 1000)
    ours = read_image(data, RULES, 1000)
    assert ours.grid == plain.grid
    np.testing.assert_array_equal(ours.pixels, plain.pixels)


def test_an_image_is_shown_as_its_exif_says() -> None:
    image = picture(96, 64)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = read_image(file_of(image, exif=exif), RULES, 1000)
    plain = read_image(file_of(image.transpose(Image.Transpose.ROTATE_270)), RULES, 1000)
    assert turned.grid == plain.grid == (1, 6, 4)
    np.testing.assert_array_equal(turned.pixels, plain.pixels)


def test_of_an_animation_the_first_frame() -> None:
    frames = [picture(64, 64, seed, "P") for seed in range(3)]
    data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(data)) as first:
        plain = read_image(file_of(first.convert("RGB")), RULES, 1000)
    np.testing.assert_array_equal(read_image(data, RULES, 1000).pixels, plain.pixels)


def png_header(width: int, height: int) -> bytes:
    """A PNG of one colour that says it is so large; its pixels are never needed."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(1 << 16)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("side", [9_000, 20_000, 60_000])
def test_a_bomb_is_refused_by_its_header(side: int, recwarn: pytest.WarningsRecorder) -> None:
    begin = time.monotonic()
    with pytest.raises(MediaError, match="too large"):
        read_image(png_header(side, side), RULES, 1000)
    assert time.monotonic() - begin < 1
    assert not recwarn.list


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg/>", file_of(picture(80, 80), "JPEG")[:900]])
def test_what_is_no_whole_image_is_refused(data: bytes) -> None:
    with pytest.raises(MediaError, match=r"an image (is empty|could not be)"):
        read_image(data, RULES, 1000)


def test_narrow_images_and_those_that_do_not_fit_the_context_are_refused() -> None:
    with pytest.raises(MediaError, match="too narrow"):
        read_image(file_of(Image.new("RGB", (201, 1))), RULES, 1000)
    read_image(file_of(Image.new("RGB", (200, 1))), RULES, 1000)
    image = file_of(picture(256, 256))
    assert read_image(image, RULES, 64).grid == (1, 16, 16)
    with pytest.raises(MediaError, match="64 tokens, more than the context of 63"):
        read_image(image, RULES, 63)


def test_damaged_files_are_refused_whatever_is_damaged() -> None:
    rng = random.Random(5)
    refused = 0
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        whole = file_of(picture(48, 40), kind)
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(rng.randint(1, 6)):
                data[rng.randrange(min(len(data), 400))] = rng.randrange(256)
            try:
                read_image(bytes(data), RULES, 1000)
            except MediaError:
                refused += 1
    assert refused > 60
