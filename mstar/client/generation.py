"""The answer of `/generate`: text with its token ids, and tensors. Pure; its events are in `mstar.client.events`."""

from __future__ import annotations

from mstar.client.answers import Struct, Usage


class IdLogprob(Struct, frozen=True):
    """A token's id and its log probability."""

    token: int
    logprob: float


class SampledLogprob(Struct, frozen=True):
    """A sampled token by its id, and the likeliest in its place."""

    token: int
    logprob: float
    top: tuple[IdLogprob, ...] = ()


class Tensor(Struct, frozen=True):
    """What a model emits that is no token. `data`: its bytes in row-major order, base64 in the JSON; with numpy,
    `numpy.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)`."""

    signal: str
    modality: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class GeneratedChoice(Struct, frozen=True):
    """All that one choice has emitted."""

    index: int
    text: str
    finish_reason: str
    tokens: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    logprobs: tuple[SampledLogprob, ...] | None = None


class Generation(Struct, frozen=True):
    """Answer of `/generate`. `text` is of its first choice."""

    id: str
    model: str
    choices: tuple[GeneratedChoice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text
