"""Resources as a model declares them: what each node needs, by key. Sizing is the deployment's (YAML), never here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PagedKVSpec:
    """A paged key/value cache: per layer K and V of `[pages, page_size, num_kv_heads, head_dim]`.

    Tunables (YAML `resources.<key>`): `num_pages` or `memory_fraction`; `host_bytes`.
    """

    key: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 64


ATTENTION_BACKENDS = ("cpu", "flashinfer", "torch_ref", "triton")
"""Names that a deployment may choose from; `mstar.engine.resources.attention_choice` has them."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention over the cache `kv_key`. `scale=None` means `head_dim ** -0.5`. Tunable: `backend`."""

    key: str
    kv_key: str
    num_heads: int
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequency scaling of Llama 3 (`transformers` rope type "llama3") or plain division ("linear")."""

    kind: Literal["llama3", "linear"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Positions of the rows' tokens (they continue the length of `kv_key`) and rotate-half rotary tables.

    `sections`: frequencies that follow the temporal, vertical and horizontal position of a token (interleaved, as in
    Qwen3-VL: frequency i follows the vertical one where i % 3 == 1 and i < 3 · sections[1], the horizontal one where
    i % 3 == 2 and i < 3 · sections[2], the temporal one elsewhere). Media in a prompt have such positions of their own
    (`MediaSpan.grid`); of a text token all three are equal. None: one position for all frequencies.
    """

    key: str
    kv_key: str
    rotary_dim: int
    theta: float
    scaling: RopeScaling | None = None
    sections: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class StateBlock:
    """One tensor of a row's state in one layer. `wide`: fp32 without a choice of the deployment's,
    whatever the dtype of caches."""

    name: str
    shape: tuple[int, ...]
    wide: bool = False


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """Fixed-size state per row and layer, blocks of `[layers, slots, *shape]`, beside the cache `kv_key`: both hold the
    same tokens of a row, and a prefix is reused where there are pages and a snapshot of the state.

    Tunables (YAML `resources.<key>`): `num_slots` or `memory_fraction`; `host_bytes`.
    """

    key: str
    kv_key: str
    num_layers: int
    blocks: tuple[StateBlock, ...]


LINEAR_ATTENTION_BACKENDS = ("cpu", "fla", "torch_ref", "triton")
"""Names that a deployment may choose from; `mstar.engine.resources.linear_attention_choice` has them."""


@dataclass(frozen=True, slots=True)
class LinearAttentionSpec:
    """Gated delta rule (Yang et al. 2024, "Gated Delta Networks") with a causal convolution in front, over the state
    `state_key`, whose blocks are `conv [conv_kernel - 1, channels]` and `delta [num_value_heads, key_dim, value_dim]`
    (wide); channels are 2 · num_key_heads · key_dim + num_value_heads · value_dim. Tunable: `backend`."""

    key: str
    state_key: str
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int = 4


@dataclass(frozen=True, slots=True)
class EncoderCacheSpec:
    """What a media encoder made of the media of earlier requests, by digest: an image that comes again is not encoded
    again. `width`: of a feature. Tunable (YAML `resources.<key>`): `max_bytes`."""

    key: str
    width: int


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """Draws one token per row from logits, and owns the live token column.

    `samples_text=False` for codes beside the text: the request's temperature, top-k, top-p, min-p and seed apply; its
    stop tokens, biases, penalties, minimum length and logprobs speak of text tokens and do not. `draws_in_forward`: the
    node computes with the tokens in the forward that draws them; of its steps only greedy ones are replays.
    """

    key: str
    vocab_size: int
    samples_text: bool = True
    draws_in_forward: bool = False


ResourceSpec = (
    PagedKVSpec | AttentionSpec | RotarySpec | RecurrentStateSpec | LinearAttentionSpec | EncoderCacheSpec | SamplerSpec
)


@dataclass(frozen=True, slots=True)
class NodeResourceSpec:
    """The resources of one node; a node reaches only what it declares."""

    node: str
    resources: tuple[ResourceSpec, ...]
