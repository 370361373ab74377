"""`GrammarCompiler`: grammars for the tokenizer of one deployment, by xgrammar.

Loaded and called by the thread of `builds` alone: xgrammar brings transformers along, and a large grammar takes
seconds. What it makes is used on the worker's loop thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import xgrammar
from transformers import PreTrainedTokenizerFast

from mstar.model.loader.tokenizer_files import TOKENIZER_FILE
from mstar.worker.grammars.constraints import GrammarError, Matcher

KEPT_CONTROLS = b"\t\n\r"
"""Other control characters stand in no text worth constraining, and in no JSON."""
_PLACE = re.compile(r"^\[[^\]]*\] \S+: (Check failed: \(.*?\) is false: )?")
"""Where in xgrammar's sources a message was written."""
MAX_SHOWN = 400


class CompiledGrammar:
    """One grammar, shared by the requests that ask for it."""

    __slots__ = ("_compiled", "num_bytes")

    def __init__(self, compiled: xgrammar.CompiledGrammar) -> None:
        self._compiled = compiled
        self.num_bytes = compiled.memory_size_bytes

    def matcher(self, end_ids: Sequence[int]) -> Matcher:
        """At the beginning of a text, which `end_ids` end where it is complete."""
        return xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=list(end_ids))


class GrammarCompiler:
    """`end_ids`: the model's end tokens. `textless`: tokens without text, those among them."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int, end_ids: Sequence[int], num_threads: int) -> None:
        """`vocab_size`: width of the logits.

        Raises:
            GrammarError: there is no tokenizer that texts could be followed with.
        """
        if not end_ids:
            raise GrammarError("this model has no end token, so a constrained text would not come to its end")
        path = tokenizer_dir / TOKENIZER_FILE
        if not path.is_file():
            raise GrammarError("this deployment has no tokenizer that a grammar could be applied to")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
        known = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=list(end_ids))
        specials = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.end_ids = tuple(end_ids)
        self.textless = frozenset(specials.union(end_ids))
        # xgrammar takes special tokens for the text of their names; an empty token is never allowed.
        texts = [
            b"" if token in self.textless or _has_controls(text) else text
            for token, text in enumerate(known.decoded_vocab)
        ]
        self._info = xgrammar.TokenizerInfo(
            texts,
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=list(end_ids),
            add_prefix_space=known.add_prefix_space,
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=num_threads, cache_enabled=False)

    def compile(self, form: str, behind: str) -> CompiledGrammar:
        """`form` and `behind` as in `mstar.communication.messages.Grammar`.

        Raises:
            GrammarError: it is no grammar; the message is meant for the client.
        """
        wanted = json.loads(form)
        if behind:
            before = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": behind}
            breaks = {"type": "regex", "pattern": "\\n{0,2}"}
            wanted = {"type": "sequence", "elements": [before, breaks, wanted]}
        try:
            tag = json.dumps({"type": "structural_tag", "format": wanted})
            return CompiledGrammar(self._compiler.compile_structural_tag(tag))
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_PLACE.sub("", str(error).strip())[:MAX_SHOWN]) from error


def _has_controls(text: bytes) -> bool:
    return any(byte < 0x20 and byte not in KEPT_CONTROLS for byte in text)
