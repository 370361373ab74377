"""Greedy tokens of tiny Qwen3.5s through real workers against transformers' `generate`, however rows are batched."""

import random

import pytest
import torch
from support.instance import Instance, Tuning
from support.random_arrivals import run_random_arrivals
from support.tiny_qwen3_5 import Variant, build_reference, save_checkpoint, variant
from support.token_parity import TokenCase, assert_equal_tokens

from mstar.communication.messages import SamplingParams
from mstar.model.base import ModelSetup, PromptRequest
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.registry import build_model, build_submodule, card_for_config, find_card
from mstar.model.submodule_context import SubmoduleContext

CARD = find_card("qwen3_5")
SHARED = 130
LENGTHS = [1, 64, 17, 128, 33, 150, 90, 65, 5, 200]
SHARING = {5, 6, 9}
"""Prompts that begin with the same tokens."""
MAX_TOKENS = [20, 1, 2, 24, 17, 24, 9, 30, 12, 24]


class Served:
    """A reference, its checkpoint loaded by our loader, and prompts with the reference's continuations."""

    def __init__(self, v: Variant, directory) -> None:
        self.reference = build_reference(v)
        checkpoint = resolve_checkpoint(str(save_checkpoint(self.reference, directory)), cache_dir=directory)
        assert card_for_config(checkpoint.config()) is CARD
        setup = ModelSetup(checkpoint.config(), None, 256)
        self.model = build_model(CARD, setup)
        context = SubmoduleContext(setup, checkpoint, torch.float32, torch.device("cpu"))
        self.nodes = {node.node: build_submodule(CARD, node.node, context) for node in self.model.get_node_resources()}
        generator = torch.Generator().manual_seed(11)
        prompts = [torch.randint(3, 139, (n,), generator=generator).tolist() for n in LENGTHS]
        first = prompts[9]
        self.prompts = [
            [*first[:SHARED], *prompt[SHARED:]][: len(prompt)] if index in SHARING else prompt
            for index, prompt in enumerate(prompts)
        ]
        self._expected: dict[int, list[int]] = {}

    def expected(self, index: int) -> list[int]:
        """The reference's greedy tokens, generated when first asked for."""
        if index not in self._expected:
            prompt = self.prompts[index]
            ids = torch.tensor([prompt])
            out = self.reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS[index],
                do_sample=False,
                eos_token_id=2,
                pad_token_id=0,
            )
            self._expected[index] = out[0, len(prompt) :].tolist()
        return self._expected[index]

    def check(self, instance: Instance, indices: list[int]) -> None:
        cases = [TokenCase(self.prompts[i], instance.results[f"r{i}"].tokens, self.expected(i)) for i in indices]
        assert_equal_tokens(cases, lambda ids: self.reference(torch.tensor([ids])).logits[0, -1])

    def submit(self, instance: Instance, index: int) -> None:
        prompt = self.model.process_prompt(PromptRequest("native", token_ids=tuple(self.prompts[index])))
        stops = tuple(self.model.stop_token_ids())
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS[index], stop_token_ids=stops)
        instance.submit(f"r{index}", prompt, sampling)

    def instance(self, tuning: Tuning) -> Instance:
        return Instance(self.model, self.nodes.__getitem__, dict.fromkeys(self.nodes, 0), tuning)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """`served(name)`, each variant built once."""
    made: dict[str, Served] = {}

    def get(name: str) -> Served:
        if name not in made:
            with torch.no_grad():
                made[name] = Served(variant(name), tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", ["as_many_value_heads_tied", "experts", "with_tower_tied"])
@torch.no_grad()
def test_a_batch_of_everything_at_once(served, name: str):
    one = served(name)
    indices = [0, 3, 4, 6, 7, 9]
    assert len({tuple(one.expected(index)) for index in indices}) == len(indices), "the reference repeats itself"
    instance = one.instance(Tuning(threaded=True))
    for index in indices:
        one.submit(instance, index)
    instance.run()
    one.check(instance, indices)
    instance.close()


TUNINGS = {
    "plain, captured": Tuning(overlap=False, capture_sizes=(1, 2, 4, 8)),
    "overlap, threaded, captured": Tuning(threaded=True, capture_sizes=(1, 3, 6)),
    "overlap, late, captured": Tuning(late=True, capture_sizes=(1, 3, 6)),
    "prompts captured": Tuning(capture_sizes=(1, 3, 6), engine={"capture_tokens": (24, 60, 256)}),
    "three rows at once": Tuning(threaded=True, max_rows=3),
    "small steps": Tuning(threaded=True, max_step_tokens=64),
    "few pages and slots": Tuning(threaded=True, num_pages={"kv": 6}, engine={"num_slots": {"state": 4}}),
}


@pytest.mark.parametrize("name", TUNINGS)
@torch.no_grad()
def test_random_arrivals_and_aborts(served, name: str):
    one = served("dense")
    rng = random.Random(name)
    instance = one.instance(TUNINGS[name])
    finished = run_random_arrivals(instance, one.submit, len(LENGTHS), rng)
    one.check(instance, finished)
    held = instance.held(0)
    assert not {name: value for name, value in held.items() if "live" in name or "owned" in name}, held
    assert instance.gauges(0)["mstar_tensors"] == instance.gauges(0)["mstar_handles"] == 0
    instance.close()
