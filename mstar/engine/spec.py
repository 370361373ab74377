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


ATTENTION_BACKENDS = ("cpu", "torch_ref")
"""Names that a deployment may choose from; `mstar.engine.resources.attention_backends` implements them."""


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
    """Positions of the rows' tokens (they continue the length of `kv_key`) and rotate-half rotary tables."""

    key: str
    kv_key: str
    rotary_dim: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """Draws one token per row from logits, and owns the live token column.

    `samples_text=False` for codes beside the text: the request's temperature, top-k, top-p, min-p and seed apply; its
    stop tokens, biases, penalties, minimum length and logprobs speak of text tokens and do not.
    """

    key: str
    vocab_size: int
    samples_text: bool = True


ResourceSpec = PagedKVSpec | AttentionSpec | RotarySpec | SamplerSpec


@dataclass(frozen=True, slots=True)
class NodeResourceSpec:
    """The resources of one node; a node reaches only what it declares."""

    node: str
    resources: tuple[ResourceSpec, ...]
