"""What a test needs to deploy the tiny composite model: its checkpoint, placements, and requests with their results."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from support.composite import reference
from support.composite.declarations import CODEC, CODES, ENCODER, FLOW, FRAME, LLM
from support.instance import Instance, Tuning
from support.worker_processes import WorkerProcesses
from tokenizers import Tokenizer, models, pre_tokenizers

from mstar.communication.messages import SamplingParams
from mstar.config.schema import NodeGroup
from mstar.engine.submodule import NodeSubmodule
from mstar.model.base import ModelSetup, PromptRequest
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.registry import build_model, build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

CARD = "support.composite.model:CARD"
"""What a deployment file names as its model; `test` must be on the import path of its processes."""

WEIGHTS_SEED = 0

CONFIG: dict[str, Any] = {
    "architectures": ["TinyComposite"],
    "width": reference.WIDTH,
    "num_heads": reference.NUM_HEADS,
    "num_kv_heads": reference.NUM_KV_HEADS,
    "head_dim": reference.HEAD_DIM,
    "mlp_width": reference.MLP_WIDTH,
    "num_layers": reference.NUM_LAYERS,
    "vocab_size": reference.VOCAB,
    "rope_theta": reference.ROPE_THETA,
    "media_width": reference.MEDIA_WIDTH,
    "num_codes": reference.NUM_CODES,
    "code_vocab": reference.CODE_VOCAB,
    "num_flow_steps": reference.NUM_FLOW_STEPS,
    "latent_rows": reference.LATENT_ROWS,
    "latent_width": reference.LATENT_WIDTH,
    "window": reference.WINDOW,
    "stride": reference.STRIDE,
    "samples": reference.SAMPLES,
    "stream_credit": 256,
    "max_position_embeddings": 256,
}

PLACEMENTS: dict[str, dict[str, int]] = {
    "one_worker": dict.fromkeys((ENCODER, LLM, CODES, FRAME, FLOW, CODEC), 0),
    "codec_apart": {ENCODER: 0, LLM: 0, CODES: 0, FRAME: 0, FLOW: 0, CODEC: 1},
    "language_apart": {ENCODER: 0, FLOW: 0, LLM: 1, CODES: 1, FRAME: 1, CODEC: 1},
    "ends_apart": {LLM: 0, CODES: 0, FRAME: 0, CODEC: 0, ENCODER: 1, FLOW: 1},
    "three_workers": {ENCODER: 0, FLOW: 0, LLM: 1, CODES: 1, FRAME: 1, CODEC: 2},
    "three_workers_encoder_alone": {ENCODER: 0, LLM: 1, CODES: 1, FRAME: 1, FLOW: 2, CODEC: 2},
}
"""Rank of each node, by name of the placement."""


def node_groups(placement: str) -> tuple[NodeGroup, ...]:
    """A placement as a deployment file has it."""
    ranks = PLACEMENTS[placement]
    return tuple(
        NodeGroup(node_names=tuple(node for node, at in ranks.items() if at == rank), ranks=(rank,))
        for rank in sorted(set(ranks.values()))
    )


def write_checkpoint(directory: Path, weights_seed: int = WEIGHTS_SEED, **changes: int) -> Path:
    """`config.json` (with `changes`), the weights that the reference has for this seed, and a tokenizer of words t0, t1
    and so on."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    words = {f"t{token}": token for token in range(reference.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(reference.make_weights(weights_seed), directory / "model.safetensors")
    return directory


@dataclass(frozen=True)
class Request:
    """Inputs of one request; `prompt` is without the places of the media."""

    media: torch.Tensor
    latent: torch.Tensor
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()

    def as_prompt(self) -> PromptRequest:
        inputs: Mapping[str, np.ndarray] = {"media": self.media.numpy(), "latent": self.latent.numpy()}
        return PromptRequest("native", token_ids=self.prompt, inputs=inputs, max_tokens=self.max_tokens)

    def expected(self, weights: dict[str, torch.Tensor]) -> reference.Outputs:
        return reference.run(weights, self.media, self.latent, list(self.prompt), self.max_tokens, self.stop_tokens)


def make_requests(count: int, seed: int = 0, max_tokens: int | None = None) -> list[Request]:
    """Requests of mixed sizes. A third ends by a stop token, sampled after the first one; one has a single token."""
    generator = torch.Generator().manual_seed(seed)
    weights = reference.make_weights(WEIGHTS_SEED)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    made: list[Request] = []
    for index in range(count):
        media = torch.randn(2 * integer(1, 4), reference.MEDIA_WIDTH, generator=generator)
        latent = torch.randn(reference.LATENT_ROWS, reference.LATENT_WIDTH, generator=generator)
        prompt = tuple(integer(0, reference.VOCAB - 2) for _ in range(integer(1, 20)))
        length = max_tokens if max_tokens is not None else 1 if index == 3 else integer(2, 14)
        request = Request(media, latent, prompt, length)
        if index % 3 == 1 and length > 2:
            token = request.expected(weights).tokens[integer(1, length - 2)]
            request = Request(media, latent, prompt, length, (token,))
        made.append(request)
    return made


class Composite:
    """The model with its checkpoint in `directory`: builds instances, submits requests, compares with the reference.
    `changes` are entries of the checkpoint's configuration."""

    def __init__(self, directory: Path, **changes: int) -> None:
        self.directory = directory
        checkpoint = resolve_checkpoint(str(write_checkpoint(directory, **changes)), cache_dir=directory)
        self._weights = reference.make_weights(WEIGHTS_SEED)
        self._expected: dict[int, tuple[Request, reference.Outputs]] = {}
        self.card = find_card(CARD)
        setup = ModelSetup(checkpoint.config(), None, 256)
        self.model = build_model(self.card, setup)
        self.context = SubmoduleContext(setup, checkpoint, torch.float32, torch.device("cpu"))

    def instance(self, placement: str, tuning: Tuning) -> Instance:
        return Instance(self.model, self.build_node, PLACEMENTS[placement], tuning)

    def build_node(self, name: str) -> NodeSubmodule:
        return build_submodule(self.card, name, self.context)

    def submit(self, instance: Instance | WorkerProcesses, rid: str, request: Request) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, stop_token_ids=request.stop_tokens)
        instance.submit(rid, self.model.process_prompt(request.as_prompt()), sampling)

    def expected(self, request: Request) -> reference.Outputs:
        """The reference's outputs, computed once for each request object."""
        known = self._expected.get(id(request))
        if known is None:  # kept with the request, so that no later one is given its id
            known = self._expected[id(request)] = request, request.expected(self._weights)
        return known[1]

    def check(self, instance: Instance | WorkerProcesses, rid: str, request: Request) -> None:
        """Raises `AssertionError` where the request's outputs differ from the reference's."""
        result, expected = instance.results[rid], self.expected(request)
        assert result.failure is None, f"{rid} failed: {result.failure}"
        assert result.tokens == expected.tokens, f"{rid}: tokens {result.tokens}, expected {expected.tokens}"
        (image,) = result.tensors["latent"]
        torch.testing.assert_close(image, expected.image, rtol=1e-3, atol=1e-3, msg=f"{rid}: image")
        audio = result.tensors["audio"]
        lengths = [len(piece) for piece in audio]
        assert lengths == [len(piece) for piece in expected.audio], f"{rid}: audio pieces of {lengths} samples"
        for index, (piece, wanted) in enumerate(zip(audio, expected.audio, strict=True)):
            torch.testing.assert_close(piece, wanted, rtol=1e-3, atol=1e-3, msg=f"{rid}: audio piece {index}")
