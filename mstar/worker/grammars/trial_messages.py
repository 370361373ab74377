"""What a worker and its process of trials say to each other: structs in msgpack, one a message of the pipe."""

from __future__ import annotations

import msgspec

from mstar.worker.grammars.vocabulary import Vocabulary


class TrialSetup(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → process, first: whose tokens, and how many threads compile. `vocab_size`: width of the logits.
    `max_bytes`: memory that one grammar may take. `vocabulary`: as an earlier process has read it."""

    tokenizer_dir: str
    vocab_size: int
    end_ids: tuple[int, ...]
    num_threads: int
    max_bytes: int
    vocabulary: Vocabulary | None = None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Process → worker, to the setup: grammars may come. `vocabulary`: if the process has read it."""

    vocabulary: Vocabulary | None


class Trial(msgspec.Struct, tag=True, frozen=True):
    """Worker → process: compile this; see `mstar.communication.messages.Grammar`."""

    form: str
    behind: str


class Passed(msgspec.Struct, tag=True, frozen=True):
    """Process → worker: it can be compiled, and followed."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Process → worker: why not; meant for the client. To the setup: why nothing ever can."""

    message: str


Order = TrialSetup | Trial
Reply = Ready | Passed | Refused

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(Order).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
