"""Layer handles: what a layer of a model sees of a resource, and how it gets hold of it.

A layer that uses resources is an `nn.Module` with a method `bind_resources(find)`; `bind_layers` calls it once at load
time, after which the layer keeps its handles. The handles' methods run wherever the forward runs, on the plan that
`Resource.begin_forward` has pointed them at; there is no cursor over layers and no look-up during a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from mstar.kernels.fused_norms import GatedNorm, HeadNorms


class RotaryHandle(Protocol):
    """Rotary tables and the positions of this step's tokens."""

    cos: Tensor
    """fp32 [max positions, rotary_dim / 2]"""
    sin: Tensor
    positions: Tensor
    """int32 [tokens] of the step, padding included; with `axes` [tokens, 3]"""
    axes: Tensor | None
    """int32 [rotary_dim / 2]: which of a token's three positions each frequency follows; None: there is one."""


class AttentionHandle(Protocol):
    """One layer of attention over a paged cache (`AttentionSpec.kv_key`)."""

    def attend(
        self, qkv: Tensor, rotary: RotaryHandle | None, out: Tensor | None = None, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate queries and keys of `qkv [tokens, (heads + 2 kv_heads) * head_dim]` (in place; not at all without
        `rotary`; before that `norms` are done to them), write keys and values into the cache unless the step only
        reads it, and attend.

        Returns `[tokens, heads * head_dim]` in the dtype of `qkv`.
        """
        ...


class GatedDeltaWeights(NamedTuple):
    """Of one layer. `conv [channels, conv_kernel]` in the dtype of the weights; `a_log`, `dt_bias` fp32
    [num_value_heads]."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


class LinearAttentionHandle(Protocol):
    """One layer of gated delta rule over the rows' states (`LinearAttentionSpec`)."""

    def mix(
        self,
        qkv: Tensor,
        b: Tensor,
        a: Tensor,
        weights: GatedDeltaWeights,
        out: Tensor | None = None,
        norm: GatedNorm | None = None,
    ) -> Tensor:
        """Convolve `qkv [tokens, channels]` (may be overwritten; queries, keys and values side by side), apply silu,
        and run the gated delta rule with `beta = sigmoid(b)`, `log decay = -exp(a_log) · softplus(a + dt_bias)`; `b`,
        `a` `[tokens, num_value_heads]`. All three may be columns of one wider tensor. The states go on by the step.
        `norm` is done to the result on the way.

        Returns `[tokens, num_value_heads * value_dim]` in the dtype of `qkv`.
        """
        ...


class PendingMedia(NamedTuple):
    """Media of a step's row that is not in the cache: `grid` as in `MediaSpan`; `row` of the step; its tokens are
    `first : first + length` of the row's media tokens. `step` counts the encoding steps of the row before this one."""

    row: int
    first: int
    length: int
    grid: tuple[int, int, int]
    step: int


class EncoderCacheHandle(Protocol):
    """Features of media, by digest (`EncoderCacheSpec`)."""

    def pending_grids(self, handles: np.ndarray) -> Sequence[Sequence[tuple[int, int, int]]]:
        """Host side, loop thread: of each row the grids (as in `MediaSpan`) of the media that it has to encode, in all
        of its steps together. Fixed from the row's first step on until its last; none when all its features are
        there."""
        ...

    def pending(self) -> Sequence[PendingMedia]:
        """What the step's rows have to encode, in order: fixed when a row begins to encode."""
        ...

    def complete(self, features: Sequence[Tensor | None]) -> list[Tensor]:
        """`features[i]`: of `pending()[i]`, `[length, width]`, or None where its encoding is not at its end. Remembers
        them. Returns for each row of the step all its features, `[media tokens, width]`, in written order; an empty
        tensor for a row that is not at its end."""
        ...


class SamplerHandle(Protocol):
    """Draws tokens, and knows what ends a row."""

    def sample(self, logits: Tensor) -> Tensor:
        """int32 [rows]: one token per row of `logits [rows, vocab]` (any float dtype), written to the live column of
        the rows that draw in this step. Fp32 logits are the sampler's to overwrite. Once per forward. The result is a
        buffer of the sampler's that is right only behind the forward: a node returns it as it is, and computes nothing
        from it (`SamplerSpec.draws_in_forward` otherwise)."""
        ...

    def stopped(self, handles: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Host side, loop thread: bool [rows], true where the row's token is one of its `stop_token_ids`. Before
        `min_tokens` a stop token is never drawn, so this needs no count."""
        ...


FindLayer = Callable[[str, int], Any]
"""(resource key, layer index) → the layer handle; `LookupError` for a key that the node does not declare."""


@runtime_checkable
class UsesResources(Protocol):
    def bind_resources(self, find: FindLayer) -> None: ...


class HasLayers(Protocol):
    """The side of a resource that layers are bound to."""

    def layer(self, index: int) -> Any: ...


def bind_layers(node: str, module: nn.Module, resources: Mapping[str, HasLayers]) -> None:
    """Give every layer of `module` its handles.

    Raises:
        LookupError: a layer names a resource that `node` does not declare; names the node, the layer and the key.
    """
    for name, layer in module.named_modules():
        if not isinstance(layer, UsesResources):
            continue

        def find(key: str, index: int, name: str = name) -> Any:
            if key not in resources:
                raise LookupError(
                    f"layer {name!r} of node {node!r} uses resource {key!r}, which the node does not declare "
                    f"(declared: {', '.join(sorted(resources)) or 'none'})"
                )
            return resources[key].layer(index)

        layer.bind_resources(find)
