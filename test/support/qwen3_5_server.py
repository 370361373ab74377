"""A random Qwen3.5 checkpoint behind `mstar serve`: requests as a client sends them, and transformers' answers."""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from support.qwen3_5_media import MediaReference
from support.response_tokens import ResponseTokens
from support.server import Server, running
from support.token_parity import TokenCase, assert_equal_tokens

from mstar.model.base import MediaPart, ModelSetup, PreparedPrompt, PromptRequest
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.tokenizer_files import load_tokenizer
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.qwen3_5.model import Qwen35Model
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint

MAX_SEQ_LEN = 2048
NAME = "qwen3_5"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
SIGNATURES = {b"\x89PNG": "image/png", b"GIF8": "image/gif"}
"""First bytes of a file and its type; any other is an mp4."""


@dataclass(frozen=True, eq=False)
class Case:
    """One greedy request."""

    request: PromptRequest
    max_tokens: int

    @property
    def route(self) -> str:
        return CHAT if self.request.messages else COMPLETION

    def body(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": NAME, "temperature": 0, "max_tokens": self.max_tokens}
        if not self.request.messages:
            assert self.request.token_ids is not None
            return {**fields, "prompt": list(self.request.token_ids), "logprobs": 0}
        messages = [
            {
                "role": message.role,
                "content": message.content if isinstance(message.content, str) else list(map(_part, message.content)),
            }
            for message in self.request.messages
        ]
        variables = dict(self.request.template_variables)
        return {**fields, "messages": messages, "logprobs": True, "chat_template_kwargs": variables}


def _part(part: str | MediaPart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = SIGNATURES.get(part.data[:4], "video/mp4")
    field = f"{part.kind}_url"
    return {"type": field, field: {"url": f"data:{kind};base64,{b64encode(part.data).decode()}"}}


class ServedQwen:
    """The checkpoint of one size on disk, the model that declares it, and transformers' model of its weights."""

    def __init__(self, directory: Path, size: str, seed: int = 5) -> None:
        self.checkpoint = directory / "checkpoint"
        write_random_checkpoint(size, self.checkpoint, seed=seed)
        loaded = resolve_checkpoint(str(self.checkpoint), cache_dir=directory)
        write_tokenizer(loaded, directory / "tokenizer")
        self.model = Qwen35Model(ModelSetup(loaded.config(), directory / "tokenizer", MAX_SEQ_LEN))
        self.stops = list(self.model.stop_token_ids())
        self._tokenizer = load_tokenizer(directory / "tokenizer")
        self.tokens = ResponseTokens(self._tokenizer, self.stops)
        self.reference = MediaReference(self.checkpoint, self.model.config.media)
        self.prepare = cache(self._prepare)
        self.expected = cache(self._expected)

    @contextmanager
    def serving(self, log: Path, *settings: str, config: str = "qwen3_5", dtype: str = "float32") -> Iterator[Server]:
        """`settings`: of the deployment, as `--set` takes them."""
        given = (
            f"checkpoint={self.checkpoint}",
            f"dtype={dtype}",
            f"max_seq_len={MAX_SEQ_LEN}",
            "num_threads=1",
            *settings,
        )
        arguments = [config, *(word for setting in given for word in ("--set", setting))]
        with running(arguments, log) as server:
            yield server

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text).ids)

    def _prepare(self, case: Case) -> PreparedPrompt:
        return self.model.process_prompt(case.request)

    @torch.no_grad()
    def _expected(self, case: Case) -> list[int]:
        return self.reference.generate(self.prepare(case), case.max_tokens, self.stops)

    def check(self, cases: Sequence[Case], answers: Sequence[dict[str, Any]]) -> None:
        """Every answer has the reference's greedy tokens."""
        accepted = 0
        for case, answer in zip(cases, answers, strict=True):
            prompt, expected = self.prepare(case), self.expected(case)
            assert prompt.token_ids is not None
            assert answer["usage"]["prompt_tokens"] == len(prompt.token_ids)
            ours = self.tokens.of_choice(answer["choices"][0], expected)
            assert answer["usage"]["completion_tokens"] == len(ours)
            compared = TokenCase(prompt.token_ids.tolist(), ours, expected)
            with torch.no_grad():
                accepted += assert_equal_tokens([compared], lambda ids, p=prompt: self.reference.last_logits(p, ids))
        assert accepted <= max(1, len(cases) // 50), f"{accepted} of {len(cases)} answers diverge"


async def _all(server: Server, cases: Sequence[Case], spread_s: float, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def one(case: Case) -> dict[str, Any]:
            await asyncio.sleep(rng.uniform(0, spread_s))
            response = await client.post(case.route, json=case.body())
            assert response.status_code == 200, response.text
            return response.json()

        return await asyncio.gather(*map(one, cases))


def under_load(server: Server, cases: Sequence[Case], *, spread_s: float, seed: int = 3) -> list[dict[str, Any]]:
    """Answers of all, asked at random times within `spread_s`."""
    return asyncio.run(_all(server, cases, spread_s, seed))


def ask(server: Server, case: Case, **fields: Any) -> dict[str, Any]:
    """The answer to one, with nothing beside it; further `fields` of its body."""
    response = server.client.post(case.route, json=case.body() | fields)
    assert response.status_code == 200, response.text
    return response.json()


def cached_tokens(answer: dict[str, Any]) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]
