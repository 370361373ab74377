"""What the sampler knows of each request, as columns by handle. Loop thread, host only.

Written once when a request opens; a step reads them by its handles. The last row is the sink: greedy, nothing asked.
"""

from __future__ import annotations

import math

import numpy as np

from mstar.communication.messages import SamplingParams
from mstar.engine.resources.random_draw import stream_key

COLDEST = 1e-4
"""Temperatures up to here are greedy: the difference between logits that they would magnify is below their rounding."""

NUM_PARAMS = 7
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(NUM_PARAMS)

SAMPLE, CUT, MASS, COUNT, BIAS, LOGPROBS = (1 << bit for bit in range(6))
"""What a row wants of a draw. `SAMPLE`: more than an argmax, and of that `CUT`: a top-k or a top-p, `MASS`: no top-k;
`COUNT`: penalties; `BIAS`: a bias, or a floor under its length."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises `ValueError` naming the field that this vocabulary or arithmetic cannot honour."""
    numbers = {
        "temperature": (params.temperature, 0.0, math.inf),
        "top_p": (params.top_p, 0.0, 1.0),
        "min_p": (params.min_p, 0.0, 1.0),
        "repetition_penalty": (params.repetition_penalty, 0.0, math.inf),
        "presence_penalty": (params.presence_penalty, -math.inf, math.inf),
        "frequency_penalty": (params.frequency_penalty, -math.inf, math.inf),
    }
    for name, (value, low, high) in numbers.items():
        if not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"{name} must be a finite number from {low:g} to {high:g}, not {value}")
    if params.repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty must be greater than 0, not {params.repetition_penalty}")
    if params.top_k < 0:
        raise ValueError(f"top_k must be 0 (no limit) or more, not {params.top_k}")
    if len(params.bias_ids) != len(params.bias_values) or not all(map(math.isfinite, params.bias_values)):
        raise ValueError("logit_bias needs one finite number per token id")
    for name, ids in (("logit_bias", params.bias_ids), ("stop_token_ids", params.stop_token_ids)):
        strangers = [token for token in ids if not 0 <= token < vocab_size]
        if strangers:
            raise ValueError(f"{name}: token id {strangers[0]} is outside the vocabulary (0 to {vocab_size - 1})")


def check_prompt(prompt_ids: np.ndarray, vocab_size: int) -> None:
    """Raises `ValueError` for a prompt with an id that no embedding has."""
    if prompt_ids.size and (prompt_ids.min() < 0 or prompt_ids.max() >= vocab_size):
        stranger = int(prompt_ids[(prompt_ids < 0) | (prompt_ids >= vocab_size)][0])
        raise ValueError(f"prompt: token id {stranger} is outside the vocabulary (0 to {vocab_size - 1})")


def without_text(params: SamplingParams) -> SamplingParams:
    """What is left of a request's parameters for a sampler whose tokens are not text (`SamplerSpec.samples_text`)."""
    return SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=params.seed
    )


class SamplingColumns:
    """One entry per handle: `params` fp32 [handles, 7] as the device table has them, `keys` uint64 (random streams),
    `num_draws`, `min_tokens` (0: no floor), `num_logprobs`, `top_k`, int32; `wants` uint8, of the bits `SAMPLE` to
    `LOGPROBS` (`COUNT` and `BIAS` are set by the sampler, which has their tables); `stop_ids` int32 [handles, most stop
    ids], padded with -1."""

    def __init__(self, num_handles: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.params = np.zeros((num_handles, NUM_PARAMS), np.float32)
        self.keys = np.zeros(num_handles, np.uint64)
        self.num_draws = np.zeros(num_handles, np.int32)
        self.min_tokens = np.zeros(num_handles, np.int32)
        self.num_logprobs = np.zeros(num_handles, np.int32)
        self.top_k = np.ones(num_handles, np.int32)
        self.wants = np.zeros(num_handles, np.uint8)
        self.stop_ids = np.full((num_handles, 1), -1, np.int32)
        for handle in range(num_handles):
            self._set_params(handle, SamplingParams(temperature=0.0), greedy=True)

    def open(self, handle: int, params: SamplingParams, stream: int = 0) -> None:
        """`params` have passed `check_sampling`; `stream` as in `stream_key`."""
        greedy = params.temperature <= COLDEST or params.top_k == 1 or params.top_p <= 0
        self._set_params(handle, params, greedy)
        self.keys[handle] = stream_key(params.seed, stream)
        self.num_draws[handle] = 0
        self.min_tokens[handle] = params.min_tokens if params.stop_token_ids else 0
        if params.num_logprobs >= 0:
            self.num_logprobs[handle] = params.num_logprobs
            self.wants[handle] |= LOGPROBS
        num_stop = len(params.stop_token_ids)
        if num_stop > self.stop_ids.shape[1]:
            wider = np.full((self.stop_ids.shape[0], num_stop), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[handle] = -1
        self.stop_ids[handle, :num_stop] = params.stop_token_ids

    def close(self, handle: int) -> None:
        self.num_draws[handle] = 0
        self.wants[handle] = 0
        self.min_tokens[handle] = 0
        self.stop_ids[handle] = -1

    def stopped(self, handles: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """bool [rows]: the token is one of the row's stop ids."""
        return ((self.stop_ids[handles] == tokens[:, None]) & (tokens[:, None] >= 0)).any(1)

    def _set_params(self, handle: int, params: SamplingParams, greedy: bool) -> None:
        top_k = 1 if greedy else (0 if params.top_k >= self.vocab_size else params.top_k)
        self.params[handle] = (
            1.0 if greedy else params.temperature,
            top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        wants = 0
        if not greedy:
            cuts = top_k > 0 or self.params[handle, TOP_P] < 1
            wants = SAMPLE | (CUT if cuts else 0) | (0 if top_k else MASS)
        self.wants[handle] = wants
