"""Embeddings through real workers against transformers' hidden states, however prompts are cut, cached and batched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.instance import Instance, Tuning
from support.small_pages import SmallPages
from support.tiny_llama import build_reference as build_llama
from support.tiny_llama import variant as llama_variant
from support.tiny_qwen3_5 import build_reference as build_qwen
from support.tiny_qwen3_5 import variant as qwen_variant
from transformers import PreTrainedModel

from mstar.communication.messages import SamplingParams
from mstar.model.base import ModelSetup, PromptRequest
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.registry import build_model, build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

ONE = SamplingParams(temperature=0.0, max_tokens=1)
LENGTHS = [1, 64, 17, 128, 33, 100]


class Served:
    """A reference, its checkpoint as a worker loads it, and prompts."""

    def __init__(self, family: str, shape: str, directory: Path) -> None:
        self.reference: PreTrainedModel = (
            build_llama(llama_variant(shape)) if family == "llama" else build_qwen(qwen_variant(shape))
        )
        self.reference.save_pretrained(directory)
        checkpoint = resolve_checkpoint(str(directory), cache_dir=directory)
        self.card = find_card(family)
        setup = ModelSetup(checkpoint.config(), None, 256)
        self.model = build_model(self.card, setup)
        context = SubmoduleContext(setup, checkpoint, torch.float32, torch.device("cpu"))
        self.nodes = {
            spec.node: build_submodule(self.card, spec.node, context) for spec in self.model.get_node_resources()
        }
        generator = torch.Generator().manual_seed(7)
        self.prompts = [torch.randint(3, 139, (length,), generator=generator).tolist() for length in LENGTHS]

    def instance(self, page_size: int | None = None, **tuning: object) -> Instance:
        model = self.model if page_size is None else SmallPages(self.model, page_size)
        return Instance(model, self.nodes.__getitem__, dict.fromkeys(self.nodes, 0), Tuning(**tuning))  # pyright: ignore[reportArgumentType]

    def submit(self, instance: Instance, rid: str, ids: list[int]) -> None:
        instance.submit(rid, self.model.process_prompt(PromptRequest("embedding", token_ids=tuple(ids))), ONE)

    def generate(self, instance: Instance, rid: str, ids: list[int], num_tokens: int) -> None:
        prompt = self.model.process_prompt(PromptRequest("native", token_ids=tuple(ids)))
        instance.submit(rid, prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens))

    def expected(self, ids: list[int]) -> torch.Tensor:
        """The last token's state behind the final norm, of length 1."""
        body = getattr(self.reference.model, "language_model", self.reference.model)
        hidden = body(torch.tensor([ids])).last_hidden_state[0, -1]
        return hidden / hidden.norm()

    def check(self, instance: Instance, rid: str, ids: list[int]) -> None:
        result = instance.results[rid]
        assert result.failure is None and result.tokens == []
        (vector,) = result.tensors["embedding"]
        assert vector.dtype == torch.float32 and vector.shape == (self.model.embedding_size(),)
        assert abs(float(vector.norm()) - 1) < 1e-5
        torch.testing.assert_close(vector, self.expected(ids), atol=2e-4, rtol=0)


@pytest.fixture(
    scope="module", params=[("llama", "grouped_queries_tied"), ("qwen3_5", "dense"), ("qwen3_5", "with_tower_tied")]
)
def served(request, tmp_path_factory) -> Served:
    family, shape = request.param
    with torch.no_grad():
        return Served(family, shape, tmp_path_factory.mktemp("checkpoint"))


@torch.no_grad()
def test_prompts_of_all_lengths_beside_streams(served: Served):
    """Chunks of few tokens, rows that decode meanwhile, and prompts that are found in the cache."""
    instance = served.instance(max_step_tokens=48)
    served.generate(instance, "stream", served.prompts[2], 20)
    for index, ids in enumerate(served.prompts):
        served.submit(instance, f"e{index}", ids)
    instance.run()
    served.submit(instance, "again", served.prompts[3])
    instance.run()
    for index, ids in enumerate(served.prompts):
        served.check(instance, f"e{index}", ids)
    served.check(instance, "again", served.prompts[3])
    assert len(instance.results["stream"].tokens) == 20
    steps = [step for step in instance.steps if "embed" in step.walks]
    assert len(steps) > 6, "longer prompts took several steps"
    assert instance.held(0) == {}
    instance.close()


@torch.no_grad()
def test_what_a_stream_writes_is_not_changed_by_embeddings_beside_it(served: Served):
    streams = []
    for num_embeddings in (0, len(served.prompts)):
        instance = served.instance(max_step_tokens=48)
        served.generate(instance, "stream", served.prompts[4], 12)
        for index, ids in enumerate(served.prompts[:num_embeddings]):
            served.submit(instance, f"e{index}", ids)
        instance.run()
        streams.append(instance.results["stream"].tokens)
        instance.close()
    assert streams[0] == streams[1] and len(streams[0]) == 12


@torch.no_grad()
def test_a_prompt_whose_pages_were_taken_is_computed_again(tmp_path):
    served = Served("llama", "grouped_queries_tied", tmp_path)
    instance = served.instance(page_size=8, max_step_tokens=16, num_pages={"kv": 14})
    served.submit(instance, "long", served.prompts[5])
    for _ in range(6):
        instance.tick()
    prompt = served.model.process_prompt(PromptRequest("native", token_ids=tuple(served.prompts[4])))
    instance.submit("urgent", prompt, SamplingParams(temperature=0.0, max_tokens=40), priority=-1)
    instance.run()
    gauges = instance.gauges(0)
    assert gauges['mstar_evictions_total{kind="recompute"}'] == 1, gauges
    assert len(instance.results["urgent"].tokens) == 40
    served.check(instance, "long", served.prompts[5])
    instance.close()
