"""transformers' own loop as a peer: batched `generate` with its KV cache over the same weights, timed step by step."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmark.local_decode import Rates
from mstar.model.loader.checkpoint import ResolvedCheckpoint


class _StepTimes(StoppingCriteria):
    """Asked after each token; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class ReferenceGenerate:
    """A model of transformers from a checkpoint (dequantized if it is a .gguf file)."""

    def __init__(self, checkpoint: ResolvedCheckpoint, dtype: torch.dtype) -> None:
        path = checkpoint.path
        # Any: the library's own annotations do not describe what its factory returns.
        self._model: Any
        if checkpoint.kind == "gguf":
            self._model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
        else:
            self._model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        self._model.eval()

    @torch.inference_mode()
    def run(self, prompts: np.ndarray, output_tokens: int) -> Rates:
        """As `LocalDecoder.run`."""
        ids = torch.from_numpy(prompts).long()
        steps = _StepTimes()
        begin = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            min_new_tokens=output_tokens,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([steps]),
        )
        first, end = steps.times[0], steps.times[-1]
        starts = tuple(output[:, prompts.shape[1]].tolist())
        num_decoded = prompts.shape[0] * (output_tokens - 1)
        return Rates(prompts.size / (first - begin), num_decoded / (end - first), first - begin, end - first, starts)
