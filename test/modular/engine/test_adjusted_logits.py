"""Penalties, bias, minimum length and logprobs: against an independent implementation, and while planning ahead."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import sampling_reference as reference
from support.engine_rig import EngineRig, prompts, reserve, take
from support.sampler_rig import SamplerRig

from mstar.communication.messages import SamplingParams, TokenLogprobs
from mstar.engine.resources.base import OpenConfig

VOCAB = 40


def logits_of(seed: int) -> torch.Tensor:
    return 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    repetition=st.sampled_from([1.0, 1e-9, 0.5, 1.2, 1e9]),
    presence=st.sampled_from([0.0, -2.0, 0.7]),
    frequency=st.sampled_from([0.0, 0.4, -1.0]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=5),
)
def test_greedy_after_every_adjustment_equals_the_definition(
    prompt: list[int], repetition: float, presence: float, frequency: float, bias: dict[int, float]
):
    rig = SamplerRig(VOCAB)
    rig.open(0, temperature=0.0)  # a neighbour that asks for nothing
    rig.open(
        4,
        prompt=prompt,
        temperature=0.0,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        bias_ids=tuple(bias),
        bias_values=tuple(bias.values()),
    )
    output: list[int] = []
    for step in range(10):
        logits = logits_of(step // 3)  # the same for three steps: what was drawn decides
        expected = reference.adjusted(
            logits.numpy(), prompt, output, repetition=repetition, presence=presence, frequency=frequency, bias=bias
        )
        drawn = rig.draw({0: logits, 4: logits})
        assert drawn[0] == int(logits.argmax())
        gap = expected.max() - expected[drawn[4]]
        assert gap <= 1e-5 * max(1.0, abs(expected.max())), (drawn[4], int(expected.argmax()), gap)
        output.append(drawn[4])


def test_counts_do_not_outlive_their_request():
    rig = SamplerRig(VOCAB)
    logits = logits_of(1)
    favourite = int(logits.argmax())
    for _ in range(3):
        rig.open(2, prompt=[favourite], temperature=0.0, repetition_penalty=1e9)
        assert rig.draw({2: logits})[2] != favourite
        rig.close(2)
        rig.open(2, temperature=0.0, presence_penalty=50.0)
        assert rig.draw({2: logits})[2] == favourite
        assert rig.draw({2: logits})[2] != favourite
        rig.close(2)


def test_tables_grow_while_others_use_them():
    """More penalized requests than the first table has rows, and a longer bias list than the first."""
    rig = SamplerRig(VOCAB)
    logits = logits_of(1)
    favourite = int(logits.argmax())
    rows = {}
    for handle in range(20):
        ids = tuple(range(handle + 1))
        rig.open(handle, temperature=0.0, presence_penalty=100.0, bias_ids=ids, bias_values=tuple(0.0 for _ in ids))
        rows[handle] = logits
        first = rig.draw(rows)
        assert first[handle] == favourite
        assert all(first[other] != favourite for other in range(handle))


def test_no_table_before_somebody_needs_one():
    rig = SamplerRig(VOCAB)
    rig.open(0, seed=1)
    rig.draw({0: logits_of(0)})
    assert rig.rig.sampler._counts.num_bytes == 0
    rig.open(1, seed=1, frequency_penalty=0.1)
    rig.draw({1: logits_of(0)})
    assert rig.rig.sampler._counts.num_bytes > 0


@pytest.mark.parametrize("minimum", [0, 1, 4])
def test_a_favoured_end_token_waits_for_the_minimum_length(minimum: int):
    """The end token biased by +100 with `min_tokens`: exactly that many other tokens come first."""
    rig = SamplerRig(VOCAB)
    end = 9
    rig.open(0, temperature=0.0, bias_ids=(end,), bias_values=(100.0,), min_tokens=minimum, stop_token_ids=(end, 30))
    handle = np.array([0])
    layer = rig.rig.sampler.layer(0)
    drawn = []
    while not drawn or not layer.stopped(handle, np.array(drawn[-1:]))[0]:
        drawn.append(rig.draw({0: logits_of(len(drawn)) + 50 * (torch.arange(VOCAB) == 30)})[0])
    assert len(drawn) == minimum + 1
    assert drawn[-1] == end
    assert not {end, 30} & set(drawn[:-1])


def test_a_longer_list_of_end_tokens_masks_none_of_another_row():
    """Each row's own end tokens wait for its minimum length, whatever lists come later; token 0 is like any other."""
    rig = SamplerRig(VOCAB)
    rig.open(0, temperature=0.0, min_tokens=50, stop_token_ids=(9,))
    rig.open(1, temperature=0.0, min_tokens=50, stop_token_ids=(7,))
    likely = logits_of(1) + 50 * (torch.arange(VOCAB) == 0) + 60 * (torch.arange(VOCAB) == 9)
    assert rig.draw({0: likely, 1: likely}) == {0: 0, 1: 9}
    rig.open(2, temperature=0.0, min_tokens=50, stop_token_ids=(9, 0, 30, 31))
    drawn = rig.draw({0: likely, 1: likely, 2: likely})
    assert (drawn[0], drawn[1]) == (0, 9)
    assert drawn[2] not in (9, 0, 30, 31)


def test_stop_tokens_of_each_row():
    rig = SamplerRig(VOCAB)
    rig.open(0, stop_token_ids=(3,))
    rig.open(1, stop_token_ids=(4, 5, 6))
    rig.open(2)
    stopped = rig.rig.sampler.layer(0).stopped
    assert stopped(np.array([0, 1, 2, 0]), np.array([3, 3, 3, 6])).tolist() == [True, False, False, False]
    assert stopped(np.array([2, 1, 0]), np.array([-1, 6, -1])).tolist() == [False, True, False]


@pytest.mark.parametrize(
    "params", [{"top_k": 1}, {"top_p": 1e-5}, {"temperature": 0.0}, {"temperature": 2.0, "min_p": 0.9}]
)
def test_logprobs_are_those_of_the_raw_logits(params: dict):
    rig = SamplerRig(VOCAB)
    rig.open(0, temperature=0.0)
    rig.open(1, num_logprobs=5, seed=3, bias_ids=(7,), bias_values=(100.0,), **params)
    rig.open(2, num_logprobs=0, seed=3, **params)
    logits = logits_of(3)
    logits[11] = logits[12] = logits.max()  # a tie: the lower id first
    step = rig.step({0: logits, 1: logits, 2: logits})
    logprobs, tokens = step.outputs.logprobs, step.host("token")
    assert logprobs is not None and logprobs[0] is None
    expected = reference.log_softmax(logits.numpy())
    order = sorted(range(VOCAB), key=lambda token: (-float(logits[token]), token))[:5]
    for row, num_top in ((1, 5), (2, 0)):
        found = logprobs[row]
        assert isinstance(found, TokenLogprobs)
        assert found.logprob == pytest.approx(expected[tokens[row]], abs=1e-5)
        assert list(found.top_ids) == order[:num_top]
        assert found.top_logprobs == pytest.approx(expected[order[:num_top]], abs=1e-5)
    assert tokens[1] == 7


def test_logprobs_are_finite_json_even_for_forbidden_tokens():
    rig = SamplerRig(VOCAB)
    rig.open(0, num_logprobs=5, temperature=0.0)
    logits = torch.full((VOCAB,), float("-inf"))
    logits[3] = 0.0
    found = rig.step({0: logits}).outputs.logprobs
    assert found is not None
    text = msgspec.json.encode(found[0])
    assert text == b"[0.0,[3,0,1,2,4],[0.0,-9999.0,-9999.0,-9999.0,-9999.0]]"


ILLEGAL = [
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"top_k": -1}, "top_k"),
    ({"presence_penalty": math.nan}, "presence_penalty"),
    ({"bias_ids": (VOCAB,), "bias_values": (1.0,)}, "logit_bias"),
    ({"bias_ids": (-1,), "bias_values": (1.0,)}, "logit_bias"),
    ({"bias_ids": (1,), "bias_values": (math.inf,)}, "logit_bias"),
    ({"stop_token_ids": (VOCAB,), "min_tokens": 1}, "stop_token_ids"),
]


@pytest.mark.parametrize(("params", "field"), ILLEGAL)
def test_what_cannot_be_honoured_is_refused_by_name_and_leaves_nothing(params: dict, field: str):
    rig = SamplerRig(VOCAB)
    with pytest.raises(ValueError, match=field):
        rig.open(0, **params)
    rig.open(0, temperature=0.0)  # the handle is free
    assert rig.draw({0: logits_of(0)})[0] == int(logits_of(0).argmax())


def test_a_refused_request_keeps_its_promise_until_it_is_closed():
    rig = EngineRig(num_pages={"kv": 10})
    config = OpenConfig(SamplingParams(), np.append(np.arange(38), 61).astype(np.int32), 40)
    rig.engine.memory.introduce(0, config)
    assert rig.engine.memory.reserve(0)
    with pytest.raises(ValueError, match="prompt: token id 61"):
        rig.engine.memory.open(0)
    assert not reserve(rig, 1, 4)
    rig.engine.memory.close(0)
    assert reserve(rig, 2, 40)


PENALTIES = [
    SamplingParams(temperature=0.0, presence_penalty=1.0, max_tokens=24),
    SamplingParams(temperature=0.0, frequency_penalty=0.8, max_tokens=24),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, max_tokens=24),
    SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5, min_tokens=20, stop_token_ids=(5,), max_tokens=24),
]


def test_penalties_do_not_care_how_far_the_loop_plans_ahead():
    """Every count must include the token of the step before, which is not known when the next step is planned.
    Abandoned steps in between count nothing."""
    texts = prompts(4, seed=8)
    outputs = []
    for ahead, abandon in ((False, False), (True, False), (True, True)):
        rig = EngineRig()
        for handle, params in enumerate(PENALTIES):
            rig.open(handle, texts[handle], params)
        if abandon:
            rig.prefill(*range(4))
            for _ in range(15):
                rig.engine.abandon(rig.arm(take("decode", [3, 1])))
                rig.decode(*range(4))
        else:
            rig.generate(range(4), 16, ahead=ahead)
        outputs.append(rig.out)
    assert outputs[0] == outputs[1] == outputs[2]
    plain = EngineRig()
    for handle in range(3):
        plain.open(handle, texts[handle])
    plain.generate(range(3), 16)
    assert all(outputs[0][handle] != plain.out[handle] for handle in range(3))  # the penalties do something
