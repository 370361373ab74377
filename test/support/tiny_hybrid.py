"""A tiny decoder whose choices also depend on a recurrent state: a running hash of the row's tokens, exact in fp32. A
state of another row, of another length, or of none changes the next token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support.tiny_decoder import NODE, VOCAB, TinyDecoder, decoder_spec
from torch import Tensor, nn

from mstar.engine.layer_handles import FindLayer
from mstar.engine.spec import NodeResourceSpec, RecurrentStateSpec, StateBlock
from mstar.engine.step import RecurrentStep, Rows, SubmoduleStep
from mstar.engine.submodule import EngineInputs

MODULUS, FACTOR = 65521, 31
"""The products stay below 2**24."""


def hybrid_spec() -> NodeResourceSpec:
    """The state is declared before the cache it goes with."""
    state = RecurrentStateSpec("state", "kv", 2, (StateBlock("hash", (1,), wide=True), StateBlock("last", (2,))))
    return NodeResourceSpec(NODE, (state, *decoder_spec().resources))


def hash_of(ids: Sequence[int]) -> int:
    value = 0
    for token in ids:
        value = (value * FACTOR + int(token) + 1) % MODULUS
    return value


class _Hash(nn.Module):
    """The hash in layer 1, the last token and its hash in the other block of layer 0."""

    def bind_resources(self, find: FindLayer) -> None:
        self.hashes = find("state", 1)
        self.lasts = find("state", 0)


class TinyHybrid(TinyDecoder):
    """Its logits are the decoder's, turned by the hash of all tokens so far."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.hash = _Hash()

    def declare_step(self, graph_walk: str, rows: Rows, kept: object) -> SubmoduleStep:
        declared = super().declare_step(graph_walk, rows, kept)  # type: ignore[arg-type]
        return SubmoduleStep({**declared.steps, "state": RecurrentStep()}, rows)

    def embed(self, inputs: EngineInputs) -> Tensor:
        self._turn = self._advance(inputs)
        return super().embed(inputs)

    def logits_of(self, hidden: Tensor) -> Tensor:
        return _turned(super().logits_of(hidden), self._turn)

    def _advance(self, inputs: EngineInputs) -> Tensor:
        """The rows' states go on by the step's tokens; fp32 [rows, 1]."""
        assert inputs.tokens is not None and inputs.last is not None
        tokens, layer = inputs.tokens.float(), self.hash.hashes
        values, lasts = layer.gather("hash"), self.hash.lasts.gather("last")
        spoiled = (lasts[:, :1] != values % 251).any() or values.isnan().any()
        assert torch.compiler.is_compiling() or not spoiled, "a state whose blocks do not belong together"
        if inputs.tokens.shape[0] == inputs.num_rows:
            values = (values * FACTOR + tokens[:, None] + 1) % MODULUS
        else:
            ends = [end + 1 for end in inputs.last.tolist()]
            for row, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                for token in tokens[begin:end]:
                    values[row] = (values[row] * FACTOR + token + 1) % MODULUS
        layer.scatter_("hash", values)
        self.hash.lasts.scatter_("last", (values % 251).expand(-1, 2).contiguous())
        return values

    def reference_greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = [int(token) for token in prompt]
        for _ in range(num_tokens):
            logits = self.reference_logits(ids)[-1:]
            ids.append(int(_turned(logits, torch.tensor([[float(hash_of(ids))]])).argmax()))
        return ids[len(prompt) :]


def _turned(logits: Tensor, turn: Tensor) -> Tensor:
    """Row r's logits, moved up by `turn[r] % VOCAB` places."""
    places = (torch.arange(VOCAB)[None] - turn.long()) % VOCAB
    return logits.gather(1, places)
