"""The embedded default model in transformers: the same dequantized weights in fp32, greedy tokens and logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from support.checkpoints import smollm2
from support.response_tokens import ResponseTokens
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mstar.model.loader.tokenizer_files import TokenizerFiles, load_tokenizer
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.loader.weights import iter_weights


class Smollm2Reference:
    """Weights and token ids are compared with transformers' and llama.cpp's in the loader's own tests."""

    def __init__(self) -> None:
        self._directory = TemporaryDirectory()
        self.files: TokenizerFiles = write_tokenizer(smollm2(), Path(self._directory.name))
        self.tokenizer = load_tokenizer(Path(self._directory.name))
        self._responses = ResponseTokens(self.tokenizer, self.stops)

    @cached_property
    def network(self) -> LlamaForCausalLM:
        checkpoint = smollm2()
        config = LlamaConfig(**checkpoint.config())
        with torch.device("meta"):
            network = LlamaForCausalLM(config)
        weights = {name: tensor.clone() for name, tensor in iter_weights(checkpoint, dtype=torch.float32)}
        network.load_state_dict(weights, assign=True, strict=False)
        network.tie_weights()
        network.model.rotary_emb = LlamaRotaryEmbedding(config)
        return network.eval()

    @property
    def stops(self) -> list[int]:
        return list(self.files.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def greedy(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Continuations, a stop token included, in one left-padded batch."""
        width = max(len(ids) for ids in prompts)
        padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        out = self.network.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self.stops,
            pad_token_id=0,
        )[:, width:].tolist()
        return [self._up_to_stop(tokens) for tokens in out]

    def last_logits(self, ids: Sequence[int]) -> torch.Tensor:
        return self.network(torch.tensor([list(ids)])).logits[0, -1]

    def ids_of(self, texts: Sequence[str], finish_reason: str, expected: Sequence[int]) -> list[int]:
        """As `ResponseTokens.ids_of`."""
        return self._responses.ids_of(texts, finish_reason, expected)

    def _up_to_stop(self, tokens: list[int]) -> list[int]:
        ends = [tokens.index(stop) for stop in self.stops if stop in tokens]
        return tokens[: min(ends) + 1] if ends else tokens
