"""Which workload a run has, by its name: `text_to_text`, `image_to_text`, or a mix of both at once."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from mstar.bench.images import ImageChoice, ImageSize
from mstar.bench.prompts import MakePrompt
from mstar.bench.workloads import Api, ImageToText, Mix, TextToText, Workload

MakePrompts = Callable[[str], MakePrompt]
"""Prompts of a kind by its name, so that no two kinds begin alike."""


class WorkloadName(enum.StrEnum):
    """text_to_text, image_to_text, or mix: both at once."""

    TEXT = "text_to_text"
    IMAGE = "image_to_text"
    MIX = "mix"


@dataclass(frozen=True, slots=True)
class Composition:
    """`image_share` of the requests of a mix have images; the rest as in `ImageChoice`."""

    name: WorkloadName
    image_share: float
    image_sizes: tuple[ImageSize, ...]
    images_per_request: int
    image_repeats: float

    @property
    def described(self) -> str:
        """In words."""
        if self.name is WorkloadName.TEXT:
            return self.name
        sizes = ", ".join(f"{size.width}x{size.height}" for size in self.image_sizes)
        images = f"{self.images_per_request} of {sizes} each, {self.image_repeats:.0%} seen before"
        who = f"{self.image_share:.0%} with images" if self.name is WorkloadName.MIX else "images"
        return f"{self.name}, {who}: {images}"

    def check(self, api: Api) -> None:
        """Raises `ValueError` for what cannot be."""
        if self.name is WorkloadName.TEXT and self.images_per_request != 1:
            raise ValueError(f"--images {self.images_per_request}: --workload text_to_text has none")
        for option, share in (("--image-share", self.image_share), ("--image-repeats", self.image_repeats)):
            if not 0 <= share <= 1:
                raise ValueError(f"{option} {share:g}: a share is between 0 and 1")
        if self.name is not WorkloadName.TEXT and api is not Api.CHAT:
            raise ValueError(f"--workload {self.name}: images are parts of chats, and --api is {api}")

    def build(self, text: TextToText, prompts: MakePrompts, num_requests: int, seed: int) -> Workload:
        """`text` with the prompts of its kind, and requests with images beside it or in its place; the images of the
        first `num_requests` are made, and later requests repeat none of them."""
        plain = replace(text, prompts=prompts(WorkloadName.TEXT))
        if self.name is WorkloadName.TEXT:
            return plain
        share = 1.0 if self.name is WorkloadName.IMAGE else self.image_share
        mix = Mix(plain, plain, share)
        num_images = mix.num_with_images(num_requests)
        choice = ImageChoice(self.image_sizes, self.images_per_request, self.image_repeats, seed, num_images)
        for request in range(num_images):
            choice.images(request)
        with_images = ImageToText(replace(text, prompts=prompts(WorkloadName.IMAGE)), choice)
        return replace(mix, with_images=with_images) if self.name is WorkloadName.MIX else with_images
