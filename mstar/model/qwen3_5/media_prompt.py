"""Media of a prompt: placeholders of the rendered text become as many tokens as each medium has features.

Runs in the preprocess pool; no torch. Whatever is wrong with the media is a `ValueError` with a message for the client.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mstar.model.base import ChatMessage, MediaPart, MediaSpan
from mstar.model.qwen3_5.config import MediaTokens
from mstar.model.qwen3_5.image_processing import Patches, num_image_pixels, read_image
from mstar.model.qwen3_5.media_rules import MediaError, MediaRules, MediaTooLongError

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
_PLACEHOLDER = re.compile(f"{re.escape(IMAGE)}|{re.escape(VIDEO)}")


class MediaPrompt(NamedTuple):
    """Token ids int32 [n]; `pixels` uint8 [num_patches, values] of all media, in written order; where they stand."""

    token_ids: np.ndarray
    pixels: np.ndarray
    media: tuple[MediaSpan, ...]


class _Item(NamedTuple):
    """One image, or one frame group of a video: `tokens` of `token` in its place."""

    token: int
    tokens: int
    span: MediaSpan
    pixels: np.ndarray


def media_of(messages: Sequence[ChatMessage]) -> list[MediaPart]:
    """All media of a conversation, in written order."""
    return [
        part
        for message in messages
        if not isinstance(message.content, str)
        for part in message.content
        if isinstance(part, MediaPart)
    ]


class MediaPrompts:
    """`max_tokens`: tokens that the context has room for. `max_pixels`: of all media of a prompt as they were sent, to
    bound the work of decoding them; None: any number."""

    def __init__(self, tokens: MediaTokens, rules: MediaRules, max_tokens: int, max_pixels: int | None = None) -> None:
        self._tokens = tokens
        self._rules = rules
        self._max_tokens = max_tokens
        self._max_pixels = max_pixels

    def expand(self, text: str, media: Sequence[MediaPart], encode: Callable[[str], Sequence[int]]) -> MediaPrompt:
        """A rendered conversation with its media.

        `text` has one placeholder for each medium, in order; `encode` gives the token ids of a text. A video becomes
        its frame groups, each behind the time when it is shown.

        Raises:
            MediaTooLongError: the media do not fit into the context.
            MediaError: media that cannot be read, or have too many pixels.
            ValueError: a text whose placeholders are not those of the media.
        """
        places = _PLACEHOLDER.findall(text)
        if places != [IMAGE if part.kind == "image" else VIDEO for part in media]:
            raise ValueError(
                f"the prompt has {len(places)} places for images and videos, and {len(media)} were sent: "
                f"{IMAGE} and {VIDEO} cannot be written as text"
            )
        self._check_pixels(media)
        pieces: list[str] = []
        items: list[_Item] = []
        num_tokens = 0
        for part in media:
            if part.kind == "image":
                patches = read_image(part.data, self._rules, self._max_tokens)
                read = [self._item(self._tokens.image, patches)]
                text_of_media = IMAGE * read[0].tokens
            else:
                text_of_media, read = self._video(part.data)
            items += read
            pieces.append(text_of_media)
            num_tokens += sum(item.tokens for item in read)
            if num_tokens > self._max_tokens:
                raise MediaTooLongError(
                    f"the media of this prompt do not fit into the context of {self._max_tokens} tokens: "
                    f"they make at least {num_tokens}"
                )
        replacement = iter(pieces)
        ids = np.asarray(encode(_PLACEHOLDER.sub(lambda _: next(replacement), text)), np.int32)
        spans = tuple(self._placed(ids, items))
        return MediaPrompt(ids, np.concatenate([item.pixels for item in items]), spans)

    def check_text(self, ids: np.ndarray) -> None:
        """Raises `ValueError` if a prompt without media has tokens that stand for some."""
        if np.isin(ids, (self._tokens.image, self._tokens.video)).any():
            raise ValueError(
                f"the prompt has tokens that stand for an image or a video ({IMAGE}, {VIDEO}), but none was sent"
            )

    def _check_pixels(self, media: Sequence[MediaPart]) -> None:
        """By the headers of the files, before anything is decoded."""
        if self._max_pixels is None:
            return
        num_pixels = sum(map(self._num_pixels, media))
        if num_pixels > self._max_pixels:
            raise MediaError(
                f"the media of this request have {num_pixels} pixels together; at most {self._max_pixels} are read "
                "(server.media.max_pixels)"
            )

    def _num_pixels(self, part: MediaPart) -> int:
        if part.kind == "image":
            return num_image_pixels(part.data)
        # As in `_video`.
        from mstar.model.qwen3_5.video_processing import num_video_pixels  # noqa: PLC0415

        return num_video_pixels(part.data, self._rules)

    def _video(self, data: bytes) -> tuple[str, list[_Item]]:
        # Only a prompt with a video pays for the libraries that decode it; front and workers import this module too.
        from mstar.model.qwen3_5.video_processing import read_video  # noqa: PLC0415

        video = read_video(data, self._rules, self._max_tokens)
        times, rows, columns = video.patches.grid
        groups = np.split(video.patches.pixels, times)
        items = [self._item(self._tokens.video, Patches(pixels, (1, rows, columns))) for pixels in groups]
        texts = [
            f"<{seconds:.1f} seconds>{VISION_START}{VIDEO * item.tokens}{VISION_END}"
            for seconds, item in zip(video.seconds, items, strict=True)
        ]
        return "".join(texts), items

    def _item(self, token: int, patches: Patches) -> _Item:
        times, rows, columns = patches.grid
        merge = self._rules.merge_size
        grid = (times, rows // merge, columns // merge)
        digest = hashlib.blake2b(patches.pixels.tobytes(), digest_size=16, person=b"mstar.qwen3_5.v1")
        digest.update(repr((patches.grid, patches.pixels.shape, self._rules)).encode())
        count = grid[0] * grid[1] * grid[2]
        return _Item(token, count, MediaSpan(0, count, digest.digest(), grid), patches.pixels)

    def _placed(self, ids: np.ndarray, items: Sequence[_Item]) -> Iterator[MediaSpan]:
        """The spans where their tokens are. Raises `ValueError` if the tokens are not those of the items."""
        places = np.flatnonzero(np.isin(ids, (self._tokens.image, self._tokens.video)))
        expected = np.repeat([item.token for item in items], [item.tokens for item in items])
        if not np.array_equal(ids[places], expected):
            raise ValueError("the tokenizer does not write placeholders of images and videos as their tokens")
        begin = 0
        for item in items:
            own = places[begin : begin + item.tokens]
            if own[-1] - own[0] + 1 != item.tokens:
                raise ValueError("the tokens of an image are torn apart")
            yield MediaSpan(int(own[0]), item.tokens, item.span.digest, item.span.grid)
            begin += item.tokens
