"""Pictures and videos for tests, and what transformers' Qwen3.5 makes of a prompt that holds them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mstar.model.base import ChatMessage, MediaPart, PreparedPrompt, PromptRequest
from mstar.model.qwen3_5.config import MediaTokens

MERGE = 2


def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of smooth colours with noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    base = np.stack([x * 255 / max(width - 1, 1), y * 255 / max(height - 1, 1), (x * seed + y * 13) % 256], -1)
    image = Image.fromarray(np.clip(base + rng.normal(0, 20, base.shape), 0, 255).astype(np.uint8))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _frames(count: int, width: int, height: int, seed: int) -> list[Image.Image]:
    return [Image.open(io.BytesIO(picture(width, height, seed + index))) for index in range(count)]


def animation(count: int, width: int, height: int, seed: int) -> bytes:
    """A GIF of `count` frames, five a second."""
    frames = _frames(count, width, height, seed)
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=200, loop=0)
    return out.getvalue()


def movie(count: int, width: int, height: int, seed: int) -> bytes:
    """An mp4 of `count` frames, eight a second."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in _frames(count, width, height, seed):
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return out.getvalue()


def chat(*parts: str | tuple[str, bytes]) -> PromptRequest:
    """One message of the user; media are (kind, data)."""
    content = tuple(part if isinstance(part, str) else MediaPart(*part) for part in parts)  # type: ignore[arg-type]
    return PromptRequest("chat", messages=(ChatMessage("user", content),))


@contextmanager
def one_thread() -> Iterator[None]:
    """For models so small that a second thread of torch only waits for the first."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class MediaReference:
    """transformers' model on the checkpoint in `directory`, dense or with experts, in fp32. `tokens` None: of text
    alone."""

    def __init__(self, directory: Path, tokens: MediaTokens | None) -> None:
        kind = AutoModelForCausalLM if tokens is None else AutoModelForImageTextToText
        self.model: Any = kind.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokens = tokens

    def inputs(self, prompt: PreparedPrompt, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Arguments of `generate` and `forward` for the prompt's media, and token ids that begin with the prompt's."""
        assert prompt.token_ids is not None
        own = torch.tensor(ids)
        given: dict[str, torch.Tensor] = {
            "input_ids": own[None],
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }
        if not prompt.media:
            return given
        assert self.tokens is not None
        kinds = torch.zeros_like(own)
        kinds[own == self.tokens.image] = 1
        kinds[own == self.tokens.video] = 2
        given["mm_token_type_ids"] = kinds[None].int()
        pixels = torch.from_numpy(prompt.inputs["pixels"]).float() / 127.5 - 1  # mean and deviation are a half
        pieces = pixels.split([span.length * MERGE**2 for span in prompt.media])
        for token, values, grids in (
            (self.tokens.image, "pixel_values", "image_grid_thw"),
            (self.tokens.video, "pixel_values_videos", "video_grid_thw"),
        ):
            mine = [i for i, span in enumerate(prompt.media) if prompt.token_ids[span.start] == token]
            if mine:
                given[values] = torch.cat([pieces[i] for i in mine])
                sizes = [prompt.media[i].grid for i in mine]
                given[grids] = torch.tensor([(t, h * MERGE, w * MERGE) for t, h, w in sizes])
        return given

    def generate(self, prompt: PreparedPrompt, max_tokens: int, stops: Sequence[int]) -> list[int]:
        """Greedy tokens behind the prompt, a stop token included."""
        assert prompt.token_ids is not None
        ids = prompt.token_ids.tolist()
        with one_thread():
            out = self.model.generate(
                **self.inputs(prompt, ids), max_new_tokens=max_tokens, do_sample=False, eos_token_id=list(stops),
                pad_token_id=0,
            )  # fmt: skip
        return out[0, len(ids) :].tolist()

    def last_logits(self, prompt: PreparedPrompt, ids: Sequence[int]) -> torch.Tensor:
        """fp32 [vocab]."""
        return self.model(**self.inputs(prompt, ids)).logits[0, -1]
