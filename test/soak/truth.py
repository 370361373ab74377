"""What every text has to be: that of the same request alone on a quiet server.

Two right texts may part where two tokens are as good as equal. Whether that is so at their first difference is decided
by logits that are computed once more from the whole sequence, with other software.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.composite import reference
from support.composite.deployment import WEIGHTS_SEED
from support.sampling_reference import adjusted, choose, uniform
from support.token_parity import MAX_GAP, MAX_SHARE
from transformers import LlamaForCausalLM

from mstar.conductor.request import choice_seed
from soak.asks import Ask
from soak.exchange import Exchange
from soak.models import media_of
from soak.outcomes import Outcome, read_reply

MAX_BORDER = 1e-4
"""Distance of a drawn number from the border between two tokens' shares at which either may be right."""

LastLogits = Callable[[Sequence[int], Sequence[int]], np.ndarray]
"""Logits fp32 `[vocab]` behind a prompt and some output tokens."""


class Truth:
    """Compares outcomes with the answers of the server at `url`, each asked for once."""

    def __init__(self, url: str, logits: LastLogits) -> None:
        self.num_compared = 0
        self.num_alone = 0
        self.accepted: list[str] = []
        self._url = url
        self._logits = logits
        self._known: dict[str, Outcome] = {}

    async def check(self, outcome: Outcome) -> None:
        """Adds to the outcome's `wrong` what differs."""
        ask = outcome.ask
        if not outcome.texts or ask.refused or not (outcome.is_done or ask.repeats):
            return
        alone = await self._alone(ask)
        if not alone.is_done:
            outcome.wrong.append(f"alone it ends otherwise: {alone.status} {alone.error}")
            return
        usage = outcome.usage
        if usage is not None and alone.usage is not None:
            if usage["prompt_tokens"] != alone.usage["prompt_tokens"]:
                outcome.wrong.append(f"prompt_tokens differ: {usage}, alone {alone.usage}")
        if not ask.repeats:
            return
        self.num_compared += 1
        parted = [index for index in outcome.texts if not self._is_same(outcome, alone, index)]
        for index in parted:
            self._judge_difference(outcome, alone, index)
        if outcome.is_done and not parted and usage is not None and alone.usage is not None:
            if usage["completion_tokens"] != alone.usage["completion_tokens"]:
                outcome.wrong.append(f"completion_tokens differ: {usage}, alone {alone.usage}")

    def num_allowed(self) -> int:
        return max(1, int(MAX_SHARE * self.num_compared))

    async def _alone(self, ask: Ask) -> Outcome:
        known = self._known.get(ask.key)
        if known is None:
            path, body = ask.alone()
            known = self._known[ask.key] = Outcome(ask, 0)
            self.num_alone += 1
            reply = await Exchange(self._url).send("POST", path, {"model": "soak", **body})
            read_reply(known, reply, is_whole=True)
        return known

    @staticmethod
    def _is_same(outcome: Outcome, alone: Outcome, index: int) -> bool:
        ours, wanted = outcome.texts[index], alone.texts[index]
        if outcome.is_done:
            return (ours, outcome.reasons[index]) == (wanted, alone.reasons[index])
        return wanted.startswith(ours)

    def _judge_difference(self, outcome: Outcome, alone: Outcome, index: int) -> None:
        ask = outcome.ask
        ours, wanted = (tokens_of(texts[index]) for texts in (outcome.texts, alone.texts))
        at = next((i for i, (a, b) in enumerate(zip(ours, wanted, strict=False)) if a != b), None)
        where = f"choice {index} of request {outcome.number} at token {at}"
        told, told_alone = (f"{one.texts[index]!r} {one.reasons[index]}" for one in (outcome, alone))
        told = f"{where}: {told}, alone {told_alone}"
        if at is None or not ask.prompts:
            outcome.wrong.append(told)
            return
        prompt = ask.prompts[index // ask.fields.get("n", 1)]
        logits = self._adjusted(ask.fields, prompt, wanted[:at])
        if ask.fields.get("temperature", 1) == 0:
            distance, bound = abs(float(logits[ours[at]] - logits[wanted[at]])), MAX_GAP
        else:
            seed = choice_seed(ask.fields["seed"], index % ask.fields.get("n", 1))
            distance, bound = _border(logits, uniform(seed, at), ask.fields, ours[at], wanted[at]), MAX_BORDER
        if distance > bound:
            outcome.wrong.append(f"{told}; tokens {ours[at]} and {wanted[at]} are {distance:.2e} apart")
        else:
            self.accepted.append(f"{where}: {ours[at]} instead of {wanted[at]}, {distance:.2e} apart")

    def _adjusted(self, fields: dict[str, Any], prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        return adjusted(
            self._logits(prompt, output),
            prompt,
            output,
            repetition=fields.get("repetition_penalty", 1.0),
            presence=fields.get("presence_penalty", 0.0),
            frequency=fields.get("frequency_penalty", 0.0),
        )


def tokens_of(text: str) -> list[int]:
    return [int(token) for token in re.findall(r"t(\d+)", text)]


def _border(logits: np.ndarray, number: float, fields: dict[str, Any], ours: int, wanted: int) -> float:
    """How far the drawn number is from where both tokens would have been drawn; 1.0 if that is far."""
    settings = {name: fields[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in fields}
    for distance in (1e-7, 1e-6, 1e-5, MAX_BORDER):
        near = {choose(logits, min(max(number + d, 1e-12), 1 - 1e-12), **settings) for d in (-distance, 0.0, distance)}
        if {ours, wanted} <= near:
            return distance
    return 1.0


def llama_logits(checkpoint: Path) -> LastLogits:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    @torch.no_grad()
    def last(prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        return model(torch.tensor([[*prompt, *output]])).logits[0, -1].numpy()

    return last


def composite_logits() -> LastLogits:
    """Of the language model of the tiny composite model, with greedy codes."""
    weights = reference.make_weights(WEIGHTS_SEED)

    @torch.no_grad()
    def last(prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        features = reference.encode(weights, torch.from_numpy(media_of(prompt, reference.MEDIA_WIDTH)))
        embedding = weights["llm.embed_tokens.weight"]
        inputs = torch.cat([features, embedding[torch.tensor(list(prompt))]])
        hidden = reference.language_model(weights, inputs)[-1]
        frame = (weights["llm.first_frame.weight"] @ hidden).view(reference.NUM_CODES, reference.CODE_VOCAB).argmax(-1)
        for token in output:
            rows = frame + reference.CODE_VOCAB * torch.arange(reference.NUM_CODES)
            step = embedding[token] + weights["llm.code_embeddings.weight"][rows].sum(0)
            inputs = torch.cat([inputs, step[None]])
            hidden = reference.language_model(weights, inputs)[-1]
            frame = reference.predict_codes(weights, hidden)
        return (weights["llm.lm_head.weight"] @ hidden).numpy()

    return last
