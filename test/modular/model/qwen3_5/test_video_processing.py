"""Video files become frame groups with their times, as the transformers processor has them; others are refused.

The processor's own arithmetic is called where it needs no torchvision; pixels are compared with frames that are resized
and cut by hand.
"""

import io
import itertools

import av
import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from mstar.model.qwen3_5.media_rules import MediaError, MediaRules
from mstar.model.qwen3_5.video_processing import read_video

RULES = MediaRules(min_video_pixels=4096, max_video_pixels=40_000)


def frames_of(count: int, width: int = 80, height: int = 60) -> list[Image.Image]:
    """Frame i is grey i * 7, with a bright square that wanders."""
    frames: list[Image.Image] = []
    for index in range(count):
        image = np.full((height, width, 3), index * 7 % 200, np.uint8)
        image[10:30, index % 40 : index % 40 + 20] = 230
        frames.append(Image.fromarray(image))
    return frames


def movie(frames: list[Image.Image], kind: str = "mp4", codec: str = "mpeg4", rate: int = 8) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return out.getvalue()


def animation(frames: list[Image.Image], kind: str = "GIF", duration: int = 200) -> bytes:
    out = io.BytesIO()
    options = {"lossless": True} if kind == "WEBP" else {}
    frames[0].save(out, kind, save_all=True, append_images=frames[1:], duration=duration, loop=0, **options)
    return out.getvalue()


def by_hand(frames: list[Image.Image], grid: tuple[int, int, int]) -> np.ndarray:
    """Patches of the frames that were sampled, one by one."""
    times, rows, columns = grid
    kept = [
        np.asarray(frame.convert("RGB").resize((16 * columns, 16 * rows), Image.Resampling.BICUBIC)) for frame in frames
    ]
    kept += [kept[-1]] * (2 * times - len(kept))
    patches: list[np.ndarray] = []
    for time, row, column, y, x in itertools.product(
        range(times), range(rows // 2), range(columns // 2), range(2), range(2)
    ):
        top, left = 16 * (2 * row + y), 16 * (2 * column + x)
        cube = np.stack([frame[top : top + 16, left : left + 16] for frame in kept[2 * time : 2 * time + 2]])
        patches.append(cube.transpose(3, 0, 1, 2).reshape(-1))  # colour, frame, y, x
    return np.stack(patches)


@pytest.mark.parametrize(("count", "duration"), [(2, 100), (3, 500), (9, 200), (24, 120), (25, 100), (5, 1000), (4, 0)])
def test_an_animation_is_sampled_as_transformers_does(count: int, duration: int) -> None:
    frames = frames_of(count)
    data = animation(frames, duration=duration) if duration else animation(frames, "WEBP", 0)
    video = read_video(data, RULES, 10_000)
    fps = 1000 / duration if duration else 24.0
    metadata = VideoMetadata(total_num_frames=count, fps=fps)
    sampler = object.__new__(Qwen3VLVideoProcessor)
    indices = sampler.sample_frames(metadata).tolist()
    height, width = smart_resize(len(indices), 60, 80, 2, 32, RULES.min_video_pixels, RULES.max_video_pixels)
    assert video.patches.grid == (-(-len(indices) // 2), height // 16, width // 16)
    times = Qwen3VLProcessor._calculate_timestamps(None, list(indices), fps, 2)
    assert video.seconds == pytest.approx(times)
    with Image.open(io.BytesIO(data)) as image:
        sampled = []
        for index in indices:
            image.seek(index)
            sampled.append(image.convert("RGB"))
    np.testing.assert_array_equal(video.patches.pixels, by_hand(sampled, video.patches.grid))


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (60, 20), (640, 480), (1920, 1080)])
@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_sizes_are_those_of_transformers(size: tuple[int, int], count: int) -> None:
    height, width = size
    for rules in (RULES, MediaRules()):
        expected = smart_resize(count, height, width, 2, 32, rules.min_video_pixels, rules.max_video_pixels)
        assert rules.video_size(count, height, width) == expected


def test_frames_may_be_capped() -> None:
    """With the processor's own formula for `cap_pixels_per_frame`."""
    rules = MediaRules(video_tokens_per_frame=20)
    most = 12 * max(min(20 * 1024, rules.max_video_pixels // 12), int(1.05 * rules.min_video_pixels))
    assert rules.video_size(12, 480, 640) == smart_resize(12, 480, 640, 2, 32, rules.min_video_pixels, most)


@pytest.mark.parametrize("kind", ["mp4", "mov", "matroska", "avi", "webm"])
def test_containers(kind: str) -> None:
    """18 frames at 8 a second: 4 are read, and what a codec makes of them is near what went in."""
    frames = frames_of(18)
    video = read_video(movie(frames, kind, "libvpx-vp9" if kind == "webm" else "mpeg4"), RULES, 10_000)
    indices = [0, 6, 11, 17]
    assert video.seconds == pytest.approx([(0 + 6) / 16, (11 + 17) / 16])
    expected = by_hand([frames[index] for index in indices], video.patches.grid)
    assert np.abs(video.patches.pixels.astype(int) - expected).mean() < 6


def test_a_video_of_many_frames_is_sampled_to_the_limit() -> None:
    rules = MediaRules(max_frames=6, max_video_pixels=40_000)
    video = read_video(movie(frames_of(60)), rules, 10_000)
    assert video.patches.grid[0] == 3
    assert video.seconds == pytest.approx([(0 + 12) / 16, (24 + 35) / 16, (47 + 59) / 16])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (b"not a video", "a video could not be recognized"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n", "a video could not be recognized"),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "a video could not be recognized"),
        (b"\0\0\0\x18ftypmp42" + bytes(200), "could not be read"),
        (b"\x1a\x45\xdf\xa3" + bytes(200), "could not be read"),
        (movie(frames_of(18))[:1500], "could not be read|damaged"),
        (movie(frames_of(18), "matroska").replace(b"V_MPEG4/", b"V_MPEG9/"), "a codec that cannot be read"),
        (animation(frames_of(1)), "at least 2 frames"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        read_video(data, RULES, 10_000)


@pytest.mark.parametrize("kind", ["mp4", "matroska", "avi"])
def test_titles_in_any_encoding(kind: str) -> None:
    """Nothing of the metadata is read, and cameras write it as they like."""
    data = movie(frames_of(6), kind)
    other = data.replace(b"Lavf", b"L\xe9vf").replace(b"ENCODER", b"\xc9NCODER")
    assert other != data
    np.testing.assert_array_equal(
        read_video(other, RULES, 10_000).patches.pixels, read_video(data, RULES, 10_000).patches.pixels
    )


def test_a_stream_that_is_cut_off_is_read_as_far_as_it_goes() -> None:
    """Its container does not say how long it was."""
    whole = movie(frames_of(40), "matroska")
    video = read_video(whole[: len(whole) // 2], RULES, 10_000)
    assert 1 < video.seconds[-1] < 39 / 8 - 1


def test_a_video_that_does_not_fit_the_context_is_refused() -> None:
    data = animation(frames_of(8))
    tokens = len(read_video(data, RULES, 10_000).patches.pixels) // 4
    read_video(data, RULES, tokens)
    with pytest.raises(MediaError, match=f"{tokens} tokens, more than the context of {tokens - 1}"):
        read_video(data, RULES, tokens - 1)
