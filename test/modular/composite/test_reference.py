"""The composite's reference function can tell right from wrong: every input and every streamed frame matters."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.composite import reference
from support.composite.deployment import make_requests

WEIGHTS = reference.make_weights(0)
BASE = make_requests(1, seed=3, max_tokens=10)[0]


def _same_audio(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    if [piece.shape for piece in a] != [piece.shape for piece in b]:
        return False
    return all(torch.allclose(x, y, atol=1e-3) for x, y in zip(a, b, strict=True))


def test_it_imports_torch_and_nothing_else():
    tree = ast.parse(Path(reference.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["import torch"]


def test_it_is_deterministic():
    first, second = BASE.expected(WEIGHTS), BASE.expected(reference.make_weights(0))
    assert first.tokens == second.tokens
    assert torch.equal(first.image, second.image)
    assert all(torch.equal(a, b) for a, b in zip(first.audio, second.audio, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": (*BASE.prompt[:-1], (BASE.prompt[-1] + 1) % 63)},
        {"prompt": BASE.prompt[::-1]},
        {"prompt": BASE.prompt[1:]},
        {"media": BASE.media.flip(0)},
        {"media": BASE.media[:-2]},
        {"media": BASE.media + 0.1},
    ],
    ids=["last token", "order", "length", "media order", "media length", "media value"],
)
def test_prompt_and_media_reach_every_output(change):
    ours, other = BASE.expected(WEIGHTS), replace(BASE, **change).expected(WEIGHTS)
    assert ours.tokens != other.tokens
    assert not torch.allclose(ours.image, other.image, atol=1e-3)
    assert not _same_audio(ours.audio, other.audio)


def test_the_noise_reaches_the_image_alone():
    ours, other = BASE.expected(WEIGHTS), replace(BASE, latent=BASE.latent + 0.5).expected(WEIGHTS)
    assert (ours.tokens, ours.frames.tolist()) == (other.tokens, other.frames.tolist())
    assert not torch.allclose(ours.image, other.image, atol=1e-3)


def test_another_seed_of_the_weights_gives_other_outputs():
    ours, other = BASE.expected(WEIGHTS), BASE.expected(reference.make_weights(1))
    assert ours.tokens != other.tokens
    assert not torch.allclose(ours.image, other.image, atol=1e-3)
    assert not _same_audio(ours.audio, other.audio)


def test_dropping_or_swapping_any_frame_changes_the_audio():
    frames = BASE.expected(WEIGHTS).frames
    whole = reference.codec(WEIGHTS, frames)
    for index in range(1, len(frames)):
        assert not _same_audio(whole, reference.codec(WEIGHTS, torch.cat([frames[:index], frames[index + 1 :]])))
    for index in range(len(frames) - 1):
        swapped = frames.clone()
        swapped[[index, index + 1]] = frames[[index + 1, index]]
        assert torch.equal(swapped, frames) or not _same_audio(whole, reference.codec(WEIGHTS, swapped))


def test_no_two_requests_share_an_output():
    outputs = [request.expected(WEIGHTS) for request in make_requests(12, seed=1, max_tokens=8)]
    assert len({tuple(o.tokens) for o in outputs}) == len(outputs)
    assert len({tuple(o.frames.flatten().tolist()) for o in outputs}) == len(outputs)
    assert len({tuple((o.image * 100).round().flatten().tolist()) for o in outputs}) == len(outputs)


def test_a_stop_token_ends_the_loop_with_its_own_iteration():
    tokens = BASE.expected(WEIGHTS).tokens
    place = next(i for i in range(2, 9) if tokens[i] not in tokens[1:i])
    stopped = replace(BASE, stop_tokens=(tokens[place],)).expected(WEIGHTS)
    assert stopped.tokens == tokens[: place + 1]
    assert len(stopped.frames) == place + 1
    first = replace(BASE, stop_tokens=(tokens[0],)).expected(WEIGHTS)
    assert len(first.tokens) > 1


@pytest.mark.parametrize("num_frames", range(1, 9))
def test_windows_cover_every_frame_once_as_new(num_frames: int):
    """Window lengths for `num_frames` frames after the first, counted by hand from WINDOW = 4 and STRIDE = 2."""
    lengths = {1: [1], 2: [2], 3: [3], 4: [4], 5: [4, 3], 6: [4, 4], 7: [4, 4, 3], 8: [4, 4, 4]}[num_frames]
    frames = BASE.expected(WEIGHTS).frames[: num_frames + 1]
    audio = reference.codec(WEIGHTS, frames)
    assert [len(piece) // reference.SAMPLES for piece in audio] == [1, *lengths]


def test_requests_cover_both_ends_of_the_loop():
    requests = make_requests(12)
    lengths = [(len(request.expected(WEIGHTS).tokens), request.max_tokens) for request in requests]
    assert any(length < most for length, most in lengths)
    assert any(length == most > 1 for length, most in lengths)
    assert (1, 1) in lengths
    assert len({len(request.media) for request in requests}) > 2
