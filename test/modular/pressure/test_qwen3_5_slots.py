"""Qwen3.5 with few slots for states: what one request left in a slot, the next never sees, and snapshots make way.

Free slots and pages are poisoned: whoever reads what is not theirs gets NaN.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.instance import Instance, Result, Tuning
from support.qwen3_5_instance import QwenInProcess
from support.qwen3_5_media import chat, picture

from mstar.communication.messages import SamplingParams
from mstar.model.base import PreparedPrompt

NUM_TOKENS = 10
TUNINGS = {"plain": Tuning(overlap=False), "threaded": Tuning(threaded=True), "late": Tuning(late=True)}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> QwenInProcess:
    return QwenInProcess(tmp_path_factory.mktemp("tiny"), "tiny", max_seq_len=512)


@pytest.fixture(scope="module")
def prompts(qwen: QwenInProcess) -> list[PreparedPrompt]:
    """Shorter than the convolution's window, around a page, longer, and with an image."""
    rng = random.Random(7)
    lengths = (1, 2, 3, 4, 63, 64, 65, 130, 200)
    texts = [PreparedPrompt(np.array([rng.randrange(5, 900) for _ in range(n)], np.int32)) for n in lengths]
    return [*texts, qwen.model.process_prompt(chat(("image", picture(70, 90, 1)), "What is this?"))]


@pytest.fixture(scope="module")
def alone(qwen: QwenInProcess, prompts: list[PreparedPrompt]) -> list[list[int]]:
    """Each on an instance that has seen nothing."""
    answers = []
    for prompt in prompts:
        instance = qwen.instance(Tuning(overlap=False))
        answers.append(submit(instance, "only", prompt).tokens)
        instance.run()
        instance.close()
    assert len({tuple(tokens) for tokens in answers}) == len(answers)
    return answers


@pytest.fixture(params=TUNINGS)
def tuning(request: pytest.FixtureRequest) -> Tuning:
    return TUNINGS[request.param]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def submit(instance: Instance, rid: str, prompt: PreparedPrompt) -> Result:
    return instance.submit(rid, prompt, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))


def with_slots(tuning: Tuning, num_slots: int, *, prefix_cache: bool = True) -> Tuning:
    engine = {"num_slots": {"state": num_slots}, "prefix_cache": prefix_cache}
    return Tuning(
        overlap=tuning.overlap, threaded=tuning.threaded, late=tuning.late, capture_sizes=(1, 2), engine=engine
    )


def slots(instance: Instance) -> dict[str, float]:
    gauges = instance.gauges(0)
    return {state: gauges[f'mstar_slots{{pool="state",state="{state}"}}'] for state in ("free", "live", "snapshot")}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_one_after_the_other_through_one_slot(qwen, prompts, alone, tuning: Tuning, prefix_cache: bool):
    """Every prompt after every other, submitted one by one and all at once."""
    instance = qwen.instance(with_slots(tuning, 1, prefix_cache=prefix_cache))
    order = [index for first in range(len(prompts)) for second in range(first) for index in (first, second)]
    for at_once in (1, 5):
        for begin in range(0, len(order), at_once):
            some = order[begin : begin + at_once]
            results = [submit(instance, f"{at_once}.{begin + i}", prompts[index]) for i, index in enumerate(some)]
            instance.run()
            assert [result.tokens for result in results] == [alone[index] for index in some]
    assert slots(instance)["live"] == 0
    assert sum(slots(instance).values()) == 1
    instance.close()


def test_snapshots_never_keep_a_request_waiting(qwen, prompts, alone, tuning: Tuning):
    """Every slot is a snapshot but the one that the last request had: as many requests as there are slots still run in
    the same step."""
    instance = qwen.instance(with_slots(tuning, 4))
    long = [index for index, prompt in enumerate(prompts) if len(prompt.token_ids) > 64]
    for index in long:
        submit(instance, f"before{index}", prompts[index])
        instance.run()
    assert slots(instance) == {"free": 1, "live": 0, "snapshot": 3}
    num_steps = len(instance.steps)
    results = [submit(instance, f"r{index}", prompts[index]) for index in range(4)]
    instance.run()
    assert [result.tokens for result in results] == alone[:4]
    assert max(len(step.rows) for step in instance.steps[num_steps:]) == 4
    assert instance.gauges(0)['mstar_evictions_total{kind="snapshot"}'] > 0
    assert slots(instance)["live"] == 0
    instance.close()


def test_a_prompt_finds_its_state_while_another_takes_the_oldest(qwen, prompts, alone, tuning: Tuning):
    """Two that are asked by turns keep their snapshots; those in between, asked once, are what goes."""
    instance = qwen.instance(with_slots(tuning, 4))
    found = []
    for turn in range(4):
        for index in (7, 8):
            before = instance.gauges(0)["mstar_prefix_hit_tokens_total"]
            result = submit(instance, f"{turn}.{index}", prompts[index])
            instance.run()
            assert result.tokens == alone[index]
            found.append(instance.gauges(0)["mstar_prefix_hit_tokens_total"] - before)
        submit(instance, f"{turn}.once", PreparedPrompt(np.array([5 + turn] * 70, np.int32)))
        instance.run()
    assert found == [0, 0, *[128, 192] * 3]
    instance.close()
