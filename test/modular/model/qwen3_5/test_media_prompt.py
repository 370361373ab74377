"""Media in a prompt: the text and tokens of the transformers processor, spans where they stand, digests that tell media
apart, and prompts that are refused."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from support.qwen3_5_media import animation, chat, movie, picture
from tokenizers import Tokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from mstar.model.base import ChatMessage, MediaPart, ModelSetup, PromptRequest, PromptTooLongError
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.qwen3_5.image_processing import read_image
from mstar.model.qwen3_5.media_prompt import IMAGE, VIDEO, MediaPrompts, media_of
from mstar.model.qwen3_5.media_rules import MediaRules
from mstar.model.qwen3_5.model import Qwen35Model
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint
from mstar.model.qwen3_5.video_processing import read_video
from mstar.model.registry import build_model, find_card

RED, BLUE = (picture(96, 64, seed) for seed in (1, 2))
FILM = animation(5, 64, 64, 3)


def build(directory, size: str, max_seq_len: int = 512, **limits: int) -> Qwen35Model:
    if not (directory / size).exists():
        write_random_checkpoint(size, directory / size, seed=0)
    checkpoint = resolve_checkpoint(str(directory / size), cache_dir=directory)
    write_tokenizer(checkpoint, directory / f"{size}-tokenizer")
    setup = ModelSetup(checkpoint.config(), directory / f"{size}-tokenizer", max_seq_len, **limits)
    return build_model(find_card("qwen3_5"), setup)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def model(directory) -> Qwen35Model:
    return build(directory, "tiny")


def rules(model: Qwen35Model) -> MediaRules:
    return MediaRules.read(model.setup.tokenizer_dir)


def test_text_and_tokens_are_those_of_the_transformers_processor(model: Qwen35Model) -> None:
    request = chat("See ", ("image", RED), " then ", ("video", FILM), "and ", ("image", BLUE), "!")
    prompt = model.process_prompt(request)
    text = model.prompts.text(request)
    images = [read_image(data, rules(model), 10_000) for data in (RED, BLUE)]
    video = read_video(FILM, rules(model), 10_000)
    processor = object.__new__(Qwen3VLProcessor)
    processor.image_token, processor.video_token = IMAGE, VIDEO
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.image_processor = processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    grids = np.array([image.grid for image in images])
    metadata = SimpleNamespace(fps=5.0, frames_indices=rules(model).frame_indices(5, 5.0))
    videos = {"video_grid_thw": np.array([video.patches.grid]), "video_metadata": [metadata]}
    expanded, _ = processor.get_text_with_replacements(
        [text],
        [processor.replace_image_token({"image_grid_thw": grids}, index) for index in range(2)],
        [processor.replace_video_token(videos, 0)],
    )
    tokenizer = Tokenizer.from_file(str(model.setup.tokenizer_dir / "tokenizer.json"))
    assert prompt.token_ids.tolist() == tokenizer.encode(expanded[0], add_special_tokens=False).ids
    pixels = np.concatenate([images[0].pixels, video.patches.pixels, images[1].pixels])
    np.testing.assert_array_equal(prompt.inputs["pixels"], pixels)


def test_spans_are_where_the_tokens_stand(model: Qwen35Model) -> None:
    prompt = model.process_prompt(chat(("image", RED), ("video", FILM), ("image", BLUE)))
    tokens = model.config.media
    stands = np.full(prompt.token_ids.size, -1)
    for index, span in enumerate(prompt.media):
        assert span.length == np.prod(span.grid)
        stands[span.start : span.start + span.length] = index
    np.testing.assert_array_equal(stands >= 0, np.isin(prompt.token_ids, (tokens.image, tokens.video)))
    kinds = [int(prompt.token_ids[span.start]) for span in prompt.media]
    assert kinds == [tokens.image, tokens.video, tokens.video, tokens.image]  # 4 of the 5 frames make two groups
    assert [span.grid for span in prompt.media] == [(1, 2, 3), (1, 2, 2), (1, 2, 2), (1, 2, 3)]
    assert sum(span.length for span in prompt.media) * 4 == prompt.inputs["pixels"].shape[0]


def test_digests_tell_media_apart(model: Qwen35Model, directory) -> None:
    def digests(*media: tuple[str, bytes]) -> list[bytes]:
        return [span.digest for span in model.process_prompt(chat(*media)).media]

    a, b, again = digests(("image", RED), ("image", BLUE), ("image", RED))
    assert a == again != b and len(a) == 16
    assert digests(("image", RED)) == [a]
    (turned,) = digests(("image", picture(64, 96, 1)))
    assert turned not in (a, b)
    assert len(set(digests(("video", FILM)))) == 2
    # The same pixels, prepared by other rules, are another input of the tower.
    tokens = model.config.media
    encode = Tokenizer.from_file(str(model.setup.tokenizer_dir / "tokenizer.json")).encode
    media = [MediaPart("image", RED)]
    for own, same in ((rules(model), True), (MediaRules(min_pixels=1024, max_pixels=65_536, std=(1, 1, 1)), False)):
        prompt = MediaPrompts(tokens, own, 512).expand(IMAGE, media, lambda text: encode(text).ids)
        assert (prompt.media[0].digest == a) == same


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (chat(f"a literal {IMAGE}"), "stand for an image or a video"),
        (chat(f"a literal {VIDEO}"), "stand for an image or a video"),
        (chat(f"{IMAGE} and ", ("image", RED)), "has 2 places .* and 1 were sent"),
        (PromptRequest("completion", text=f"{IMAGE}"), "stand for an image or a video"),
        (chat(("image", b"no image")), "could not be recognized"),
        (chat(("image", RED), ("video", RED)), "at least 2 frames"),
    ],
)
def test_prompts_that_are_refused(model: Qwen35Model, request_: PromptRequest, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        model.process_prompt(request_)


def test_token_ids_that_stand_for_media_are_refused(model: Qwen35Model) -> None:
    tokens = model.config.media
    for token in (tokens.image, tokens.video):
        with pytest.raises(ValueError, match="but none was sent"):
            model.process_prompt(PromptRequest("native", token_ids=(3, token, 4)))
    model.process_prompt(PromptRequest("native", token_ids=(3, tokens.vision_start, 4)))


def test_media_that_together_fill_the_context_are_refused(model: Qwen35Model, directory) -> None:
    tokens = model.process_prompt(chat(("image", RED))).media[0].length
    small = build(directory, "tiny", 2 * tokens)
    small.process_prompt(chat(("image", RED), ("image", BLUE)))
    said = f"do not fit into the context of {2 * tokens} tokens: they make at least {3 * tokens}"
    with pytest.raises(PromptTooLongError, match=said):
        small.process_prompt(chat(("image", RED), ("image", BLUE), ("image", RED)))
    with pytest.raises(PromptTooLongError, match="more than the context"):
        build(directory, "tiny", tokens - 1).process_prompt(chat(("image", RED)))


def test_media_with_too_many_pixels_together_are_refused_by_their_headers(directory) -> None:
    cut, film = RED[:60], movie(12, 64, 32, 6)  # 1.5 s: the least, four frames, are read
    model = build(directory, "tiny", max_media_pixels=3 * 96 * 64)
    model.process_prompt(chat(*[("image", RED)] * 3))
    for media, pixels in (
        ([("image", RED)] * 3 + [("image", cut)], 4 * 96 * 64),
        ([("image", RED)] * 2 + [("video", film)], 2 * 96 * 64 + 4 * 64 * 32),
        ([("video", FILM)], 5 * 64 * 64),
    ):
        said = f"have {pixels} pixels together; at most {3 * 96 * 64} are read"
        with pytest.raises(ValueError, match=said):
            model.process_prompt(chat(*media))
    model.process_prompt(chat(("image", RED), ("video", film)))


def test_a_model_that_reads_text_only_refuses_media(directory) -> None:
    model = build(directory, "tiny-text")
    with pytest.raises(ValueError, match="text"):
        model.process_prompt(chat("What is this? ", ("image", RED)))
    assert not model.process_prompt(chat("What is this?")).inputs


def test_media_of_a_conversation_in_written_order() -> None:
    parts = [MediaPart("image", bytes([index])) for index in range(3)]
    messages = (
        ChatMessage("user", (parts[0], "a", parts[1])),
        ChatMessage("assistant", "b"),
        ChatMessage("user", ("c", parts[2])),
    )
    assert media_of(messages) == parts


def test_an_image_of_another_mode_has_the_digest_of_its_colours(model: Qwen35Model, tmp_path) -> None:
    """What the tower sees counts, not the file."""
    with Image.open(io.BytesIO(RED)) as image:
        image.save(tmp_path / "red.bmp")
        (png,), (bmp,) = (
            model.process_prompt(chat(("image", data))).media for data in (RED, (tmp_path / "red.bmp").read_bytes())
        )
    assert png.digest == bmp.digest
