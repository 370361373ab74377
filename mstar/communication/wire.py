"""The wire format: how a message becomes the bytes of one frame, and back. Any process, any thread, no torch.

The first byte of a frame names its encoding; the rest is the message in it. `MSTAR_WIRE_CODEC` decides here, and
nowhere else, how this process encodes; decoding follows the first byte, whatever this process encodes with. Every
message type is walked at import and an untyped field ends the import. There is no pickle, and no fallback.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final, TypeVar, get_args

import msgspec

from mstar import envs
from mstar.communication.messages import Hello, Message, ToFront, ToSupervisor, ToWorker
from mstar.communication.wire_types import describe

T = TypeVar("T")
Frame = bytes | bytearray | memoryview

CODEC_IDS: Final = {"msgpack": 0x01, "json": 0x02}
"""Name of an encoding → first byte of its frames. 0x01 and 0x02 begin no text and no MessagePack map."""


class WireError(ValueError):
    """A frame that is not a message this process may receive: empty, of an unknown encoding, or of a wrong shape."""


_PACKERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "msgpack": msgspec.msgpack.Encoder().encode,
    "json": msgspec.json.Encoder().encode,
}
_checked: dict[object, str] = {}
"""Type → its canonical text, for every type an encoder or decoder was made of."""


def _encoder(message_type: type[T], codec: str | None = None) -> Callable[[T], bytes]:
    """The function that makes a frame of a message of this type; `codec` overrides MSTAR_WIRE_CODEC.

    Raises:
        TypeError: the type has an untyped field.
    """
    _check(message_type)
    name = codec or envs.WIRE_CODEC.get()
    pack, first = _PACKERS[name], bytes((CODEC_IDS[name],))
    return lambda message: first + pack(message)


def _decoder(message_type: object) -> Callable[[Frame], Any]:
    """The function that makes a message of a frame, for a message type or a union of them."""
    _check(message_type)
    unpackers = {
        CODEC_IDS["msgpack"]: msgspec.msgpack.Decoder(message_type).decode,
        CODEC_IDS["json"]: msgspec.json.Decoder(message_type).decode,
    }

    def decode(frame: Frame) -> Any:
        if not len(frame):
            raise WireError("empty frame")
        unpack = unpackers.get(frame[0])
        if unpack is None:
            raise WireError(f"unknown encoding {frame[0]:#04x}; this process reads {sorted(CODEC_IDS)}")
        try:
            return unpack(memoryview(frame)[1:])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"frame of {len(frame)} bytes: {error}") from error

    return decode


def _check(message_type: object) -> None:
    if message_type not in _checked:
        _checked[message_type] = describe(message_type)


_encoders: Final[dict[type, Callable[[Any], bytes]]] = {kind: _encoder(kind) for kind in get_args(Message)}
_schema: Final = hashlib.sha256("\n".join(sorted(_checked.values())).encode()).hexdigest()[:16]

decode_to_worker: Final[Callable[[Frame], ToWorker]] = _decoder(ToWorker)
decode_to_front: Final[Callable[[Frame], ToFront]] = _decoder(ToFront)
decode_to_supervisor: Final[Callable[[Frame], ToSupervisor]] = _decoder(ToSupervisor)
decode: Final[Callable[[Frame], Message]] = _decoder(Message)
"""Decoders raise `WireError`, and only that, for whatever bytes they are given."""


def encode(message: Message) -> bytes:
    """One frame.

    Raises:
        TypeError: not one of the types in `mstar.communication.messages.Message`.
    """
    pack = _encoders.get(type(message))
    if pack is None:
        raise TypeError(f"{type(message).__name__} is no message; messages are listed in mstar.communication.messages")
    return pack(message)


def schema_hash() -> str:
    """16 hex digits that are equal exactly where all message types, with all their fields, are."""
    return _schema


def why_refused(hello: Hello, version: str) -> str | None:
    """Why a peer that introduces itself like this cannot be talked to, or None. `version` is this process's own."""
    if hello.version != version:
        return f"rank {hello.rank} runs mstar {hello.version}, this process {version}; install the same everywhere"
    if hello.schema_hash != _schema:
        return (
            f"rank {hello.rank} has message schema {hello.schema_hash}, this process {_schema}, both as {version}: "
            "one of them runs changed sources; restart the whole instance"
        )
    return None
