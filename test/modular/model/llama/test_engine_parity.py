"""Greedy tokens of tiny Llamas through real workers against transformers' `generate`, however rows are batched."""

import random

import pytest
import torch
from support.instance import Instance, Tuning
from support.random_arrivals import run_random_arrivals
from support.tiny_llama import VARIANTS, Variant, build_reference, save_checkpoint, variant
from support.token_parity import TokenCase, assert_equal_tokens

from mstar.communication.messages import SamplingParams
from mstar.model.base import ModelSetup, PromptRequest
from mstar.model.llama.model import NODE, LlamaModel
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.registry import build_model, build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

CARD = find_card("llama")
LENGTHS = [1, 3, 17, 16, 33, 8, 47, 15, 64, 2]
MAX_TOKENS = [20, 1, 2, 24, 17, 24, 9, 30, 12, 24]


class Served:
    """A reference, its checkpoint loaded by our loader, and prompts with the reference's continuations."""

    def __init__(self, v: Variant, directory) -> None:
        self.reference = build_reference(v)
        checkpoint = resolve_checkpoint(str(save_checkpoint(self.reference, directory)), cache_dir=directory)
        setup = ModelSetup(checkpoint.config(), None, 128)
        model = build_model(CARD, setup)
        assert isinstance(model, LlamaModel)
        self.model = model
        context = SubmoduleContext(setup, checkpoint, torch.float32, torch.device("cpu"))
        self.node = build_submodule(CARD, NODE, context)
        generator = torch.Generator().manual_seed(11)
        vocab = self.reference.config.vocab_size
        self.prompts = [torch.randint(12, vocab, (n,), generator=generator).tolist() for n in LENGTHS]
        self._expected: dict[int, list[int]] = {}

    def expected(self, index: int) -> list[int]:
        """The reference's greedy tokens, generated when first asked for."""
        if index not in self._expected:
            self._expected[index] = self._generate(self.prompts[index], MAX_TOKENS[index])
        return self._expected[index]

    def _generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()

    def sampling(self, index: int) -> SamplingParams:
        stops = tuple(self.model.stop_token_ids())
        return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS[index], stop_token_ids=stops)

    def check(self, instance: Instance, indices: list[int]) -> None:
        cases = [TokenCase(self.prompts[i], instance.results[f"r{i}"].tokens, self.expected(i)) for i in indices]
        assert_equal_tokens(cases, lambda ids: self.reference(torch.tensor([ids])).logits[0, -1])

    def submit(self, instance: Instance, index: int) -> None:
        prompt = self.model.process_prompt(PromptRequest("native", token_ids=tuple(self.prompts[index])))
        instance.submit(f"r{index}", prompt, self.sampling(index))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`served(v)`, each variant built once."""
    made: dict[str, Served] = {}

    def get(v: Variant) -> Served:
        if v.name not in made:
            with torch.no_grad():
                made[v.name] = Served(v, tmp_path_factory.mktemp(v.name))
        return made[v.name]

    return get


def _instance(one: Served, tuning: Tuning) -> Instance:
    return Instance(one.model, lambda _: one.node, {NODE: 0}, tuning)


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
@torch.no_grad()
def test_a_batch_of_everything_at_once(served, v: Variant):
    one = served(v)
    indices = [0, 3, 4, 6, 7]
    assert len({tuple(one.expected(index)) for index in indices}) == len(indices), "the reference repeats itself"
    instance = _instance(one, Tuning(threaded=True))
    for index in indices:
        one.submit(instance, index)
    instance.run()
    one.check(instance, indices)
    instance.close()


TUNINGS = {
    "plain": Tuning(overlap=False),
    "plain, captured": Tuning(overlap=False, capture_sizes=(1, 2, 4, 8)),
    "overlap, inline": Tuning(),
    "overlap, threaded, captured": Tuning(threaded=True, capture_sizes=(1, 3, 6)),
    "overlap, late, captured": Tuning(late=True, capture_sizes=(1, 3, 6)),
    "prompts captured": Tuning(capture_sizes=(1, 3, 6), engine={"capture_tokens": (24, 60, 256)}),
    "three rows at once": Tuning(threaded=True, max_rows=3),
    "small steps": Tuning(threaded=True, max_step_tokens=8),
    "few pages": Tuning(threaded=True, num_pages={"kv": 3}),
}


@pytest.mark.parametrize("name", TUNINGS)
@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_random_arrivals_and_aborts(served, name: str, seed: int):
    one = served(variant("three_end_tokens"))
    rng = random.Random(seed)
    instance = _instance(one, TUNINGS[name])
    finished = run_random_arrivals(instance, one.submit, len(LENGTHS), rng)
    one.check(instance, finished)
    gauges = instance.gauges(0)
    assert gauges['mstar_pages{pool="kv",state="owned"}'] == 0
    assert gauges["mstar_tensors"] == gauges["mstar_handles"] == gauges["mstar_running_rows"] == 0
    instance.close()
