"""Bytes of a video file → patches and the times of its frames. Runs in the preprocess pool; no torch.

Containers are told by their first bytes and opened as what they are: formats that refer to other files or addresses
(playlists) are never tried. Animations (GIF, WebP, PNG) are read as videos too. Frames are sampled and resized as they
are decoded, so a long video needs no more memory than what is kept of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from PIL import Image

from mstar.model.qwen3_5.image_processing import (
    MAX_SOURCE_PIXELS,
    Patches,
    check_tokens,
    opened_image,
    patches_of,
    resized,
)
from mstar.model.qwen3_5.media_rules import MediaError, MediaRules, Size

_ASSUMED_FPS = 24.0
"""Of videos that do not say."""

_UNKNOWN = "a video could not be recognized; MP4, MOV, Matroska, WebM, AVI and animations (GIF, WEBP, PNG) are read"
_NO_PROTOCOLS = {"protocol_whitelist": "none"}
"""The bytes at hand are all there is to read."""


class VideoPatches(NamedTuple):
    """Patches of all frame groups, and when each group is shown, in seconds from the beginning."""

    patches: Patches
    seconds: tuple[float, ...]


def read_video(data: bytes, rules: MediaRules, max_tokens: int) -> VideoPatches:
    """Groups of `temporal_patch_size` sampled frames; the last frame fills the last group.

    Raises:
        MediaError: not a video that can be read, too large, or one that would make more than `max_tokens` tokens.
    """
    if not data:
        raise MediaError("a video is empty")
    container = _container_of(data)
    if container is None:
        with opened_image(data, _UNKNOWN) as image:
            return _read(_Animation(image), rules, max_tokens)
    with _opened_video(data, container) as video:
        return _read(video, rules, max_tokens)


def num_video_pixels(data: bytes, rules: MediaRules) -> int:
    """By the file's headers: of the frames that are read, of an animation of all frames, because each is drawn upon the
    one before. Raises `MediaError` for a file that is no video."""
    if not data:
        raise MediaError("a video is empty")
    container = _container_of(data)
    if container is None:
        with opened_image(data, _UNKNOWN) as image:
            return image.width * image.height * int(getattr(image, "n_frames", 1))
    with _opened_video(data, container) as video:
        return video.size.height * video.size.width * len(rules.frame_indices(video.num_frames, video.fps))


@contextmanager
def _opened_video(data: bytes, container: str) -> Iterator[_Video]:
    """Raises `MediaError` for a file that cannot be opened, and for damage that is found in the block."""
    try:
        with av.open(
            io.BytesIO(data), "r", format=container, container_options=_NO_PROTOCOLS, metadata_errors="replace"
        ) as opened:
            yield _Video(opened)
    except FFmpegError as error:
        raise MediaError(f"a video could not be read: {error.strerror}") from error


class _Source(Protocol):
    num_frames: int
    fps: float
    size: Size

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """The frames at `indices`, which rise."""
        ...


def _read(source: _Source, rules: MediaRules, max_tokens: int) -> VideoPatches:
    if source.size.height * source.size.width > MAX_SOURCE_PIXELS:
        raise MediaError(f"a video of {source.size.width} x {source.size.height} pixels is too large")
    indices = rules.frame_indices(source.num_frames, source.fps)
    size = rules.video_size(len(indices), *source.size)
    deep = rules.temporal_patch_size
    num_groups = -(-len(indices) // deep)
    check_tokens(num_groups * (size.height * size.width // rules.factor**2), max_tokens, "a video")
    kept = np.empty((num_groups * deep, size.height, size.width, 3), np.uint8)
    count = 0
    for frame in source.frames(indices):
        kept[count] = resized(frame, size)
        count += 1
    if count < len(indices):
        raise MediaError(f"a video is damaged: it ends after {count} of {len(indices)} frames that were asked for")
    kept[count:] = kept[count - 1]
    indices += [indices[-1]] * (num_groups * deep - len(indices))
    seconds = tuple(
        (indices[first] / source.fps + indices[first + deep - 1] / source.fps) / 2
        for first in range(0, len(indices), deep)
    )
    return VideoPatches(patches_of(kept, rules), seconds)


class _Animation:
    """Frames of an image file. A frame's time is its index: animations that change their pace are read at the mean."""

    def __init__(self, image: Image.Image) -> None:
        self._image = image
        self.num_frames = int(getattr(image, "n_frames", 1))
        self.size = Size(image.height, image.width)
        first, last = self._duration(0), self._duration(self.num_frames - 1)
        self.fps = 2000.0 / (first + last) if first + last > 0 else _ASSUMED_FPS

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        for index in indices:
            self._image.seek(index)
            yield self._image

    def _duration(self, index: int) -> float:
        """Milliseconds."""
        self._image.seek(index)
        self._image.load()  # WebP says it no earlier
        return float(self._image.info.get("duration") or 0.0)


class _Video:
    """Frames of a video file's first video stream."""

    def __init__(self, container: InputContainer) -> None:
        if not container.streams.video:
            raise MediaError("a video file has no video stream")
        self._container = container
        self._stream = container.streams.video[0]
        if self._stream.codec_context is None:
            raise MediaError("a video file has a codec that cannot be read")
        self._stream.codec_context.thread_count = 1
        self.size = Size(self._stream.height, self._stream.width)
        if min(self.size) < 1:
            raise MediaError("a video file does not say how large its frames are")
        rate = self._stream.average_rate
        self.fps = float(rate) if rate else _ASSUMED_FPS
        self.num_frames = self._stream.frames or self._count()
        if not self.num_frames:
            raise MediaError("a video has no frames")

    def frames(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        wanted = iter(indices)
        index = next(wanted, None)
        for place, frame in enumerate(self._container.decode(self._stream)):
            if place != index:
                continue
            if (frame.height, frame.width) != self.size:
                raise MediaError("a video whose frames change their size cannot be read")
            yield frame.to_image()
            index = next(wanted, None)
            if index is None:
                return

    def _count(self) -> int:
        """Containers that are written as a stream do not know how many frames they have."""
        count = sum(1 for packet in self._container.demux(self._stream) if packet.size)
        self._container.seek(0, stream=self._stream)
        return count


def _container_of(data: bytes) -> str | None:
    """ffmpeg's name of the demuxer; None: perhaps an animation."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"wide", b"skip"):
        return "mp4"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    return None
