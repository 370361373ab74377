"""`MediaRules`: how images and videos become patches, as a checkpoint's preprocessor files have it. No torch.

Pure arithmetic on sizes, read once per process. Sources: the resizing rule of Qwen2-VL (Wang et al. 2024) and, for
videos, of Qwen3-VL, in the form that the `transformers` processors give them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mstar.model.base import PromptTooLongError

MAX_ASPECT_RATIO = 200


class MediaError(ValueError):
    """Media that cannot be used; the message is meant for the client."""


class MediaTooLongError(MediaError, PromptTooLongError):
    """Media that make more tokens than the context has room for."""


class Size(NamedTuple):
    """In pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Patches are `patch_size` squared and `temporal_patch_size` frames deep; `merge_size` squared of them are a token.

    An image is resized to between `min_pixels` and `max_pixels`; a video so that its sampled frames together have
    between `min_video_pixels` and `max_video_pixels`, with `video_tokens_per_frame` a frame never has more tokens than
    that. `mean` and `std` are of red, green and blue in 0 to 1. Of a video `fps` frames a second are read, at least
    `min_frames` and at most `max_frames`.
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    min_video_pixels: int = 4096
    max_video_pixels: int = 24 * 1024 * 1024
    video_tokens_per_frame: int | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768

    @classmethod
    def read(cls, directory: Path | None) -> MediaRules:
        """From `preprocessor_config.json` and `video_preprocessor_config.json`, or `processor_config.json`, which has
        both; what they do not say is as published for this family.

        Raises:
            ValueError: they ask for something that is not computed here.
        """
        if directory is None:
            return cls()
        both = _json(directory / "processor_config.json")
        image = _json(directory / "preprocessor_config.json") or both.get("image_processor") or {}
        video = _json(directory / "video_preprocessor_config.json") or both.get("video_processor") or {}
        default = cls()
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if image.get(name) is False or video.get(name) is False:
                raise ValueError(f"qwen3_5: {name} false in the preprocessor's configuration is not supported")
        for name in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"):
            if name in image and name in video and image[name] != video[name]:
                raise ValueError(f"qwen3_5: {name} differs between images and videos")
        either = {**video, **image}
        image_size, video_size = image.get("size") or {}, video.get("size") or {}
        capped = video.get("cap_pixels_per_frame")
        return cls(
            patch_size=either.get("patch_size") or default.patch_size,
            temporal_patch_size=either.get("temporal_patch_size") or default.temporal_patch_size,
            merge_size=either.get("merge_size") or default.merge_size,
            min_pixels=image_size.get("shortest_edge") or image.get("min_pixels") or default.min_pixels,
            max_pixels=image_size.get("longest_edge") or image.get("max_pixels") or default.max_pixels,
            min_video_pixels=video_size.get("shortest_edge") or default.min_video_pixels,
            max_video_pixels=video_size.get("longest_edge") or default.max_video_pixels,
            video_tokens_per_frame=(video.get("max_video_tokens") or 768) if capped else None,
            mean=_colours(either.get("image_mean")) or default.mean,
            std=_colours(either.get("image_std")) or default.std,
            fps=video.get("fps") or default.fps,
            min_frames=video.get("min_frames") or default.min_frames,
            max_frames=video.get("max_frames") or default.max_frames,
        )

    @property
    def factor(self) -> int:
        """Pixels along the side of a token."""
        return self.patch_size * self.merge_size

    def image_size(self, height: int, width: int) -> Size:
        """What an image is resized to: multiples of `factor`, the aspect ratio nearly kept.

        Raises:
            MediaError: it is more than 200 times as long as wide.
        """
        return self._resized(height, width, frames=1, rounded_frames=1, least=self.min_pixels, most=self.max_pixels)

    def video_size(self, num_frames: int, height: int, width: int) -> Size:
        """What the `num_frames` sampled frames of a video are resized to. Raises `MediaError` as `image_size`, and for
        fewer frames than a patch is deep."""
        if num_frames < self.temporal_patch_size:
            raise MediaError(f"a video needs at least {self.temporal_patch_size} frames, this one has {num_frames}")
        most = self.max_video_pixels
        if self.video_tokens_per_frame is not None:
            cap = self.video_tokens_per_frame * self.factor**2
            most = num_frames * max(min(cap, most // num_frames), int(1.05 * self.min_video_pixels))
        if height < self.factor or width < self.factor:
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        rounded = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size
        return self._resized(height, width, num_frames, rounded, self.min_video_pixels, most)

    def frame_indices(self, num_frames: int, fps: float) -> list[int]:
        """Which of the `num_frames` frames of a video with `fps` frames a second are read: evenly spread, the first and
        the last among them."""
        count = min(max(int(num_frames / fps * self.fps), self.min_frames), self.max_frames, num_frames)
        if count == 1:
            return [0]
        step = (num_frames - 1) / (count - 1)
        return [round(index * step) for index in range(count - 1)] + [num_frames - 1]

    def _resized(self, height: int, width: int, frames: int, rounded_frames: int, least: int, most: int) -> Size:
        ratio = max(height, width) / min(height, width)
        if ratio > MAX_ASPECT_RATIO:
            raise MediaError(f"an image of {width} x {height} is too narrow: at most {MAX_ASPECT_RATIO} times as long")
        factor = self.factor
        high, wide = round(height / factor) * factor, round(width / factor) * factor
        if rounded_frames * high * wide > most:
            shrink = math.sqrt(frames * height * width / most)
            high = max(factor, math.floor(height / shrink / factor) * factor)
            wide = max(factor, math.floor(width / shrink / factor) * factor)
        elif rounded_frames * high * wide < least:
            grow = math.sqrt(least / (frames * height * width))
            high, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
        return Size(high, wide)


def _json(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _colours(values: list[float] | None) -> tuple[float, float, float] | None:
    if values is None:
        return None
    red, green, blue = values
    return (float(red), float(green), float(blue))
