"""Workloads with images: what is sent, how often it repeats, and how latencies are told apart."""

import base64
import io
import json
import random
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from support.openai_stub import IMAGE_TOKENS, Answer, images_of, openai_stub, text_of
from typer.testing import CliRunner

from mstar.bench.command import app
from mstar.bench.images import ImageChoice, ImageSize, mosaic, parse_sizes
from mstar.bench.records import RequestRecord
from mstar.bench.report import by_kind


def bench(stub, *arguments, code=0):
    common = ["--url", stub.url, "--json", "--warmup", "0", "--output-tokens", "2", "--input-tokens", "30"]
    result = CliRunner().invoke(app, [*common, *arguments])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code != 2 else result.stderr


def opened(url: str) -> Image.Image:
    kind, _, data = url.partition(",")
    assert kind == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    image.load()
    return image


@pytest.mark.parametrize("size", [ImageSize(1, 1), ImageSize(13, 7), ImageSize(64, 200)])
def test_an_image_is_one_to_any_decoder(size):
    image = Image.open(io.BytesIO(mosaic(size, random.Random(3))))
    image.load()
    assert (image.format, image.mode, image.size) == ("PNG", "RGB", size)
    pixels = np.asarray(image)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) == -(-size.width // 8) * -(-size.height // 8)
    assert (pixels[:8, :8] == pixels[0, 0]).all()


def test_images_are_a_function_of_the_seed():
    choices = [
        ImageChoice(parse_sizes("16x16,32x24"), 2, repeats=0.5, seed=seed, num_requests=40) for seed in (1, 1, 2)
    ]
    first, again, other = ([choice.images(request) for request in range(40)] for choice in choices)
    assert first == again
    assert not {url for one in first for url in one.urls} & {url for one in other for url in one.urls}
    assert {opened(url).size for one in first for url in one.urls} == {(16, 16), (32, 24)}


def test_a_share_repeats_and_nothing_beyond_the_load_does():
    choice = ImageChoice(parse_sizes("16x16"), 1, repeats=0.4, seed=5, num_requests=1000)
    origins = [choice.origin(request) for request in range(1000)]
    assert all(origins[origin] == origin <= request for request, origin in enumerate(origins))
    assert sum(origin != request for request, origin in enumerate(origins)) == pytest.approx(400, abs=50)
    few = ImageChoice(parse_sizes("16x16"), 1, repeats=1.0, seed=5, num_requests=10)
    assert [few.origin(request) for request in range(12)] == [0] * 10 + [10, 11]
    assert [few.images(request).seen for request in (0, 9, 10)] == [False, True, False]


def test_images_come_before_the_text_of_their_request():
    with openai_stub() as stub:
        report = bench(
            stub, "--workload", "image_to_text", "--requests", "4", "--images", "3", "--image-sizes", "24x16,8x40"
        )
        bodies = [one.body for one in stub.full()]
    for body in bodies:
        [turn] = body["messages"]
        assert [part["type"] for part in turn["content"]] == ["image_url"] * 3 + ["text"]
        assert {opened(url).size for url in images_of(body)} <= {(24, 16), (8, 40)}
    assert len({url for body in bodies for url in images_of(body)}) == 12
    assert report["prompt_tokens"]["min"] == 30 + 3 * IMAGE_TOKENS
    assert list(report["kinds"]) == ["image_to_text"]
    assert report["workload"]["name"] == "image_to_text"


def test_both_at_once_are_told_apart():
    slow = Answer((0.15, 0.0))
    with openai_stub(lambda index, body: slow if images_of(body) else Answer()) as stub:
        report = bench(
            stub, "--workload", "mix", "--image-share", "0.25", "--requests", "12", "--concurrency", "4", "--seed", "3"
        )
        bodies = [one.body for one in stub.full()]
    assert [bool(images_of(body)) for body in bodies].count(True) == 3
    kinds = report["kinds"]
    assert {name: kind["requests"] for name, kind in kinds.items()} == {"text_to_text": 9, "image_to_text": 3}
    assert kinds["image_to_text"]["ttft_ms"]["p50"] >= 149 > kinds["text_to_text"]["ttft_ms"]["p50"]
    assert all(kinds[name]["itl_ms"]["count"] == kinds[name]["requests"] for name in kinds)
    assert len({text_of(body)[:30] for body in bodies}) == 12, "no two prompts begin alike"


def test_seen_images_are_told_from_new_ones():
    urls: set[str] = set()

    def answer(index, body):
        [url] = images_of(body)
        seen = url in urls
        urls.add(url)
        return Answer(cached_tokens=IMAGE_TOKENS if seen else 0)

    with openai_stub(answer) as stub:
        report = bench(
            stub,
            *("--workload", "image_to_text", "--image-repeats", "0.5", "--requests", "16", "--concurrency", "1"),
            *("--warmup", "4"),
        )
        sent = Counter(url for one in stub.full() for url in images_of(one.body))
    kinds = report["kinds"]
    assert list(kinds) == ["image_to_text", "image_to_text, new", "image_to_text, seen"]
    new, seen = kinds["image_to_text, new"], kinds["image_to_text, seen"]
    assert new["requests"] + seen["requests"] == 16
    assert new["requests"] + 4 == len(sent), "what warms up has images of its own"
    assert (new["cached_tokens"]["max"], seen["cached_tokens"]["min"]) == (0, IMAGE_TOKENS)
    assert report["cached_tokens"]["total"] == IMAGE_TOKENS * seen["requests"]


def test_the_text_report_names_kinds_and_variants():
    with openai_stub(lambda index, body: Answer(cached_tokens=3)) as stub:
        result = CliRunner().invoke(
            app,
            [
                "--url",
                stub.url,
                "--workload",
                "mix",
                "--image-repeats",
                "0.9",
                "--requests",
                "12",
                "--output-tokens",
                "2",
            ],
        )
    assert result.exit_code == 0
    assert "mix, 50% with images: 1 of 448x448 each, 90% seen before" in result.stdout
    for name in ("text_to_text", "image_to_text", "image_to_text, seen", "of them cached: 18, 3 to 3 per request"):
        assert f"\n{name}" in result.stdout or f"  {name}" in result.stdout, name


def test_kinds_with_one_variant_stay_whole():
    records = [RequestRecord("a", 0.0, "new"), RequestRecord("a", 0.0, "new"), RequestRecord("b", 0.0)]
    assert {name: len(some) for name, some in by_kind(records).items()} == {"a": 2, "b": 1}


def test_a_server_without_images_is_exit_code_2():
    with openai_stub(refuse_images=True) as stub:
        error = bench(stub, "--workload", "mix", code=2)
        assert bench(stub, "--requests", "2")["succeeded"] == 2
    assert "with an image failed: HTTP 400: this model reads text only" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("--image-sizes", "448"),
        ("--image-sizes", "0x4"),
        ("--image-sizes", "100000x100000"),
        ("--workload", "mix", "--image-share", "1.5"),
        ("--workload", "image_to_text", "--image-repeats", "-0.1"),
        ("--workload", "image_to_text", "--api", "completions"),
        ("--images", "2"),
    ],
)
def test_options_of_no_use_are_exit_code_2(arguments):
    with openai_stub() as stub:
        bench(stub, *arguments, code=2)
        assert not stub.served


def test_a_workload_that_there_is_not_is_told_in_plain_words():
    with openai_stub() as stub:
        error = bench(stub, "--workload", "images", code=2)
    assert "'images' is not one of" in error and "image_to_text" in error
    assert "Value error" not in error
