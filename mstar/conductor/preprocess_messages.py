"""Messages between the front and its preprocess processes: typed frames with a length over a socket pair. Pure data."""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from mstar.communication.messages import HostTensor, MediaSpan

LENGTH = struct.Struct("<I")


class MediaFile(msgspec.Struct, array_like=True, frozen=True):
    """See `mstar.model.base.MediaPart`."""

    kind: Literal["image", "video"]
    data: bytes


class MessageContent(msgspec.Struct, array_like=True, frozen=True):
    """One chat message; `extra` is a JSON object."""

    role: str
    content: str | tuple[str | MediaFile, ...]
    extra: bytes


class PromptJob(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Front → process: run `Model.process_prompt`. `parameters`: JSON of the model's parameter schema; `tools`: a JSON
    list; `template_variables`: a JSON object."""

    kind: str
    messages: tuple[MessageContent, ...] = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    inputs: dict[str, HostTensor] = {}
    parameters: bytes = b"{}"
    max_tokens: int
    continue_final_message: bool = False
    tools: bytes = b"[]"
    template_variables: bytes = b"{}"


class PromptDone(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Process → front: what the model made of the prompt."""

    token_ids: HostTensor | None
    inputs: dict[str, HostTensor]
    step_metadata: dict[str, int | float | str | bool]
    media: tuple[MediaSpan, ...] = ()
    opens_reasoning: bool = False


class PromptRefused(msgspec.Struct, tag=True, frozen=True):
    """Process → front: the request is at fault; the message is for the client. `field`: empty for the prompt itself.
    `code`: of the API's error."""

    message: str
    field: str = ""
    code: str = "invalid_prompt"


class PromptFailed(msgspec.Struct, tag=True, frozen=True):
    """Process → front: the model's code failed. The message is for the client: the log has what was raised."""

    message: str


class Started(msgspec.Struct, tag=True, frozen=True):
    """Process → front: the model is built, jobs may come."""


class ModelToLoad(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Front → process, first: the model's import string and its setup (`config` as JSON)."""

    model: str
    config: bytes
    tokenizer_dir: str | None
    max_seq_len: int
    max_step_patches: int
    max_media_pixels: int | None


Reply = PromptDone | PromptRefused | PromptFailed | Started
Order = ModelToLoad | PromptJob

encode = msgspec.msgpack.Encoder().encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_order = msgspec.msgpack.Decoder(Order).decode


def framed(message: Reply | Order) -> bytes:
    body = encode(message)
    return LENGTH.pack(len(body)) + body
