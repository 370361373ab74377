"""Draws against an independent implementation, and what a draw must not depend on."""

import collections

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import sampling_reference as reference
from support.sampler_rig import SamplerRig

from mstar.engine.resources.random_draw import stream_key, uniforms
from mstar.engine.resources.token_choice import ChoiceParams, choose_tokens

VOCAB = 700


def random_logits(seed: int, vocab: int = VOCAB, spread: float = 3.0, levels: int = 0) -> torch.Tensor:
    """fp32 [vocab]; with `levels`, only so many distinct values, so that ties are everywhere."""
    logits = spread * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    return (logits * levels / spread).round() * spread / levels if levels else logits


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_numbers_equal_the_recipe_in_whole_python_integers(seed: int, draw: int):
    number = uniforms(np.array([stream_key(seed)], np.uint64), np.array([draw], np.int32))
    assert number.dtype == np.float32
    assert float(number[0]) == reference.uniform(seed, draw)


def test_numbers_are_uniform_and_unrelated():
    """Mean, spread and correlation of neighbouring seeds and draws, each within five standard errors."""
    keys = np.array([stream_key(seed) for seed in range(400)], np.uint64)
    table = np.stack([uniforms(keys, np.full(400, draw, np.int32)) for draw in range(100)], 1).astype(np.float64)
    assert table.min() > 0 and table.max() < 1
    assert abs(table.mean() - 0.5) < 5 * (1 / 12) ** 0.5 / table.size**0.5
    assert abs(table.var() - 1 / 12) < 0.002
    for one, other in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 5 / one.size**0.5
    assert len(np.unique(table)) > 0.99 * table.size


SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.5, 20.0]),
        "top_k": st.sampled_from([0, 1, 2, 40, 300, VOCAB, 5000]),
        "top_p": st.sampled_from([1e-4, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
    }
)


@given(
    params=SAMPLING,
    seed=st.integers(0, 2**32),
    logits_seed=st.integers(0, 10**6),
    levels=st.sampled_from([0, 3, 40]),
    spread=st.sampled_from([0.1, 3.0]),
)
def test_a_draw_equals_the_definition(params: dict, seed: int, logits_seed: int, levels: int, spread: float):
    """Sharp and flat distributions, with and without ties, so that both the short list and the whole sort are taken."""
    logits = random_logits(logits_seed, spread=spread, levels=levels)
    number = reference.uniform(seed, 0)
    row = logits.double().numpy()
    assume(reference.border_distance(row, number, **params) > 1e-6)
    rig = SamplerRig(VOCAB)
    rig.open(3, seed=seed, **params)
    assert rig.draw({3: logits})[3] == reference.choose(row, number, **params)


@pytest.mark.parametrize("levels", [0, 2, 50])
@pytest.mark.parametrize("num_candidates", [1, 8, 64, VOCAB - 1])
def test_the_short_list_decides_nothing_wrongly(levels: int, num_candidates: int):
    """However short the list of candidates is, the token is that of the whole sort."""
    logits = torch.stack([random_logits(seed, levels=levels) for seed in range(64)])
    logits[::3, ::2] = float("-inf")
    logits[5] = 1.0  # nothing but ties
    generator = torch.Generator().manual_seed(1)

    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (64, 1), generator=generator)]

    params = ChoiceParams(
        column(0.5, 1.0, 5.0), column(0.0, 1.0, 7.0, 30.0), column(0.3, 0.9, 1.0), column(0.0, 0.2), torch.rand(64, 1)
    )
    whole = choose_tokens(logits.clone(), params, VOCAB, needs_mass=True)
    assert torch.equal(choose_tokens(logits.clone(), params, num_candidates, needs_mass=True), whole)
    assert len(set(whole.tolist())) > 8


def test_a_row_draws_the_same_alone_in_any_company_and_place():
    rows = {handle: random_logits(handle) for handle in range(12)}
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 1.0, "seed": 7, "top_k": 50},
        {"temperature": 1.5, "seed": 9, "top_p": 0.9, "presence_penalty": 1.0},
        {"temperature": 0.7, "seed": 9, "min_p": 0.01, "bias_ids": (3,), "bias_values": (5.0,)},
        {"temperature": 1.0, "seed": 1, "num_logprobs": 3},
    ]

    def history(groups: list[list[int]]) -> dict[int, list[int]]:
        rig = SamplerRig(VOCAB)
        for handle in rows:
            rig.open(handle, prompt=[handle], **kinds[handle % len(kinds)])
        drawn = collections.defaultdict(list)
        for number in range(6):
            for group in groups:
                given_rows = {handle: rows[handle].roll(number) for handle in group}
                for handle, token in rig.draw(given_rows).items():
                    drawn[handle].append(token)
        return drawn

    alone = history([[handle] for handle in rows])
    assert history([list(rows)]) == alone
    assert history([[11, 3, 7], [0, 10, 2, 9, 1], [5, 4, 8, 6]]) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 12


def test_greedy_takes_the_lowest_index_among_equals():
    rig = SamplerRig(6)
    rig.open(0, temperature=0.0)
    rig.open(1, temperature=1.0, top_k=1, seed=3)
    logits = torch.tensor([1.0, 4.0, -2.0, 4.0, 4.0, 0.0])
    assert rig.draw({0: logits, 1: logits}) == {0: 1, 1: 1}


@pytest.mark.parametrize("params", [{"temperature": t} for t in (1e-4, 1e-6, 1e-30)] + [{"top_p": 1e-4}])
def test_almost_zero_behaves_like_greedy(params: dict):
    rig = SamplerRig(VOCAB)
    for handle in range(20):
        rig.open(handle, seed=handle, **params)
    rows = {handle: random_logits(handle) for handle in range(20)}
    assert rig.draw(rows) == {handle: int(row.argmax()) for handle, row in rows.items()}


def test_frequencies_follow_the_probabilities():
    """4000 draws of one distribution: each token within five standard errors."""
    logits = torch.tensor([2.0, 1.0, 0.0, 1.0, -3.0])
    rig = SamplerRig(5, capacity=200)
    for handle in range(200):
        rig.open(handle, seed=1000 + handle)
    counts = collections.Counter(t for _ in range(20) for t in rig.draw(dict.fromkeys(range(200), logits)).values())
    for token, p in enumerate(logits.softmax(0).tolist()):
        assert abs(counts[token] / 4000 - p) < 5 * (p * (1 - p) / 4000) ** 0.5


def test_same_seed_same_text_other_seed_other_text():
    """As four choices of one request: distinct among each other, reproducible, in a handle that was used before."""
    flat = [random_logits(step, spread=0.5) for step in range(12)]

    def texts() -> list[tuple[int, ...]]:
        rig = SamplerRig(VOCAB)
        for handle in range(4):
            rig.open(handle, seed=99)
            rig.draw({handle: flat[0]})
            rig.close(handle)
            rig.open(handle, seed=7 + handle)
        drawn = [rig.draw(dict.fromkeys(range(4), logits)) for logits in flat]
        return [tuple(step[handle] for step in drawn) for handle in range(4)]

    first = texts()
    assert len(set(first)) == 4
    assert all(texts() == first for _ in range(3))


def test_logits_that_are_not_finite_fail_their_row_only():
    rig = SamplerRig(9)
    bad = {0: float("nan"), 1: float("inf"), 2: float("nan"), 3: float("-inf")}
    for handle in range(6):
        rig.open(handle, temperature=float(handle % 2), seed=4)
    rows = {handle: random_logits(handle, 9) for handle in range(6)}
    for handle, value in bad.items():
        rows[handle][handle : 9 if handle == 2 else handle + 1] = value
    rows[5][:8] = float("-inf")  # legal: one token is left
    rows[3][:] = float("-inf")  # not legal: none is
    step = rig.step(rows)
    assert sorted(step.failed) == [0, 1, 2, 3]
    assert "not finite" in step.failed[0]
    assert step.host("token")[5] == 8
    assert step.host("token")[4] == int(rows[4].argmax())


def test_rows_that_do_not_draw_keep_their_token_and_their_place_in_the_stream():
    rig = SamplerRig(VOCAB)
    for handle in (0, 1):
        rig.open(handle, seed=5)
    sampler = rig.rig.sampler
    first = rig.draw({0: random_logits(0), 1: random_logits(0)})
    rig.step({0: random_logits(1), 1: random_logits(1)}, kept=np.array([False, True]))
    assert sampler.live[0].item() == first[0]
    assert sampler.columns.num_draws[:2].tolist() == [1, 2]
    later = {handle: random_logits(2) for handle in (0, 1)}
    drawn = rig.draw(later)
    assert drawn[0] == reference.choose(later[0].numpy(), reference.uniform(5, 1))
    assert drawn[1] == reference.choose(later[1].numpy(), reference.uniform(5, 2))


def test_half_precision_logits_are_drawn_from_in_fp32():
    rig = SamplerRig(VOCAB)
    rig.open(0, seed=3)
    logits = random_logits(5).bfloat16()
    expected = reference.choose(logits.double().numpy(), reference.uniform(3, 0))
    assert rig.draw({0: logits})[0] == expected


def test_codes_ignore_what_speaks_of_text():
    text, codes = SamplerRig(8), SamplerRig(8, text=False)
    logits = torch.tensor([0.0, 3.0, 0, 0, 0, 0, 0, 2.0])
    for rig in (text, codes):
        rig.open(0, temperature=0.0, bias_ids=(7,), bias_values=(50.0,))
    assert text.draw({0: logits}) == {0: 7}
    assert codes.draw({0: logits}) == {0: 1}
    codes.open(1, temperature=0.0, stop_token_ids=(100000,))  # a text token that is no code
    text.open(1, seed=11)
    codes.open(2, seed=11)
    flat = torch.zeros(8)
    ours = [text.draw({1: flat})[1] for _ in range(30)]
    assert ours != [codes.draw({2: flat})[2] for _ in range(30)]  # two samplers of a request are independent
