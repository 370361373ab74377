"""What grammars need to know of a tokenizer, read from its file: the bytes of each token. No torch, no transformers.

Read in the process that tries grammars; a worker gets what came of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mstar.model.loader.tokenizer_files import TOKENIZER_FILE
from mstar.worker.grammars.constraints import GrammarError
from mstar.worker.grammars.native import BYTE_FALLBACK, BYTE_LEVEL, RAW, load_core

_CONTROLS = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
"""But those of white space: they stand in no text worth constraining, and in no JSON."""
NUM_BYTES = 256


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """`info`: xgrammar's `TokenizerInfo` as JSON. `end_ids`: the model's end tokens. `textless`: tokens without text,
    those among them."""

    info: str
    end_ids: tuple[int, ...]
    textless: frozenset[int]


def read_vocabulary(tokenizer_dir: Path, vocab_size: int, end_ids: Sequence[int]) -> Vocabulary:
    """`vocab_size`: width of the logits.

    Raises:
        GrammarError: there is no tokenizer that texts could be followed with.
    """
    if not end_ids:
        raise GrammarError("this model has no end token, so a constrained text would not come to its end")
    path = tokenizer_dir / TOKENIZER_FILE
    if not path.is_file():
        raise GrammarError("this deployment has no tokenizer that a grammar could be applied to")
    tokenizer = Tokenizer.from_file(str(path))
    known = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    textless = frozenset(end_ids).union(token for token, one in added.items() if one.special)
    written = [""] * vocab_size
    for text, token in known.items():
        if token < vocab_size:
            written[token] = text
    core, ends = load_core(), list(end_ids)
    says = json.loads(core.TokenizerInfo._detect_metadata_from_hf(tokenizer.to_str()))
    found = _writing(known)
    writing = says["vocab_type"] if found is None else found
    puts_space = says["add_prefix_space"] if writing == says["vocab_type"] else _puts_space(tokenizer)
    decoded = core.TokenizerInfo(written, writing, vocab_size, ends, False).decoded_vocab()
    # xgrammar takes special tokens for the text of their names; an empty token is never allowed.
    texts = [b"" if token in textless or _CONTROLS.search(text) else text for token, text in enumerate(decoded)]
    info = core.TokenizerInfo(texts, RAW, vocab_size, ends, puts_space)
    return Vocabulary(info=str(info.serialize_json()), end_ids=tuple(end_ids), textless=textless)


def _writing(known: Mapping[str, int]) -> int | None:
    """How the tokens are written, if the vocabulary shows it: a file may have lost its decoder."""
    if sum(f"<0x{byte:02X}>" in known for byte in range(NUM_BYTES)) >= NUM_BYTES // 2:
        return BYTE_FALLBACK
    letters = frozenset(ByteLevel.alphabet())
    if len(letters.intersection(known)) < NUM_BYTES // 2:
        return None
    num_written = sum(letters.issuperset(text) for text in known)
    return BYTE_LEVEL if num_written >= 0.99 * len(known) else None  # names of added tokens are written as they are


def _puts_space(tokenizer: Tokenizer) -> bool:
    """Whether a text is tokenized as if a space stood before it."""
    tokens = tokenizer.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(("\u2581", "\u0120"))
