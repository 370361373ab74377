"""A tiny Llama as a deployment has it: reference, node and prompts for worker tests."""

from pathlib import Path

import torch
from support.instance import Instance, Result, Tuning
from support.small_pages import SmallPages
from support.tiny_llama import Variant, build_reference, save_checkpoint, variant
from transformers import LlamaForCausalLM

from mstar.communication.messages import SamplingParams
from mstar.engine.submodule import NodeSubmodule
from mstar.model.base import Model, ModelSetup, PreparedPrompt, PromptRequest
from mstar.model.llama.model import NODE
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.registry import build_model, build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext


class TinyLlama:
    """`reference` is transformers' model of the weights that `build_node` loads anew at each call."""

    def __init__(self, directory: Path, shape: str | Variant = "grouped_queries_tied", card: str = "llama") -> None:
        self.reference: LlamaForCausalLM = build_reference(variant(shape) if isinstance(shape, str) else shape)
        self.card = find_card(card)
        self.checkpoint = resolve_checkpoint(str(save_checkpoint(self.reference, directory)), cache_dir=directory)
        self.setup = ModelSetup(self.checkpoint.config(), None, 128)
        self._continued: dict[tuple[int, ...], list[int]] = {}
        self._alone: dict[tuple[int, ...], list[int]] = {}
        self._solo: Instance | None = None
        self.model: Model = build_model(self.card, self.setup)

    def build_node(self) -> NodeSubmodule:
        context = SubmoduleContext(self.setup, self.checkpoint, torch.float32, torch.device("cpu"))
        return build_submodule(self.card, NODE, context)

    def instance(self, tuning: Tuning, node: NodeSubmodule | None = None, *, page_size: int | None = None) -> Instance:
        """`page_size`: tokens of a page, where the model's own is too large for the test."""
        built = self.build_node() if node is None else node
        model = self.model if page_size is None else SmallPages(self.model, page_size)
        return Instance(model, lambda _: built, {NODE: 0}, tuning)  # pyright: ignore[reportArgumentType]

    def prompt(self, length: int, seed: int = 0) -> PreparedPrompt:
        generator = torch.Generator().manual_seed(1000 * length + seed)
        ids = torch.randint(3, self.reference.config.vocab_size, (length,), generator=generator).tolist()
        return self.model.process_prompt(PromptRequest("native", token_ids=tuple(ids)))

    def submit(
        self, instance: Instance, rid: str, prompt: PreparedPrompt, *, priority: int = 0, **sampling: object
    ) -> Result:
        """Greedy, unless `sampling` says otherwise; without end tokens, so `max_tokens` decides the length."""
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **sampling})  # pyright: ignore[reportArgumentType]
        return instance.submit(rid, prompt, params, priority=priority)

    def greedy(self, prompt: PreparedPrompt, num_tokens: int) -> list[int]:
        """The reference's continuation, computed without a cache; kept, so that tests may ask again."""
        assert prompt.token_ids is not None
        ids = self._continued.setdefault(tuple(prompt.token_ids.tolist()), prompt.token_ids.tolist())
        with torch.no_grad():
            while len(ids) < len(prompt.token_ids) + num_tokens:
                ids.append(int(self.reference(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt.token_ids) : len(prompt.token_ids) + num_tokens]

    def alone(self, prompt: PreparedPrompt, num_tokens: int) -> list[int]:
        """What the plain loop gives to a greedy request that has an instance to itself, with room for everything and
        nothing reused: for texts that are too many for `greedy`."""
        assert prompt.token_ids is not None
        key = tuple(prompt.token_ids.tolist())
        if len(self._alone.get(key, [])) < num_tokens:
            if self._solo is None:
                self._solo = self.instance(Tuning(overlap=False, engine={"prefix_cache": False}))
            result = self.submit(self._solo, f"{len(self._solo.results)}", prompt, max_tokens=num_tokens)
            self._solo.run()
            self._alone[key] = result.tokens
        return self._alone[key][:num_tokens]
