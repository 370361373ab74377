"""`GrammarCompiler`: grammars for one vocabulary, by xgrammar.

Compiling releases the interpreter's lock, and can take for ever: a worker compiles what its process of trials has
compiled before (`mstar.worker.grammars.trials`). What comes of it is used on the worker's loop thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mstar.worker.grammars.constraints import GrammarError, Matcher
from mstar.worker.grammars.native import load_core
from mstar.worker.grammars.string_lengths import exact_lengths
from mstar.worker.grammars.vocabulary import Vocabulary

_PLACE = re.compile(r"^\[[^\]]*\] \S+: (Check failed: \(.*?\) is false: )?")
"""Where in xgrammar's sources a message was written."""
MAX_SHOWN = 400
NO_LIMIT = -1


class CompiledGrammar:
    """One grammar, shared by the requests that ask for it."""

    __slots__ = ("_compiled", "num_bytes")

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.num_bytes: int = compiled.memory_size_bytes()

    def matcher(self, end_ids: Sequence[int]) -> Matcher:
        """At the beginning of a text, which `end_ids` end where it is complete."""
        return _TextMatcher(load_core().GrammarMatcher(self._compiled, list(end_ids), False, NO_LIMIT, None))


class _TextMatcher:
    """Without xgrammar's notes for debugging."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept_token(self, token_id: int, /) -> bool:
        return self._matcher.accept_token(token_id, False)

    def fill_next_token_bitmask(self, bitmask: np.ndarray, index: int = 0, /) -> bool:
        return self._matcher.fill_next_token_bitmask(bitmask, index, False)

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()


class GrammarCompiler:
    """Compiles with up to `num_threads` threads."""

    def __init__(self, vocabulary: Vocabulary, num_threads: int) -> None:
        self.end_ids = vocabulary.end_ids
        self.textless = vocabulary.textless
        core = load_core()
        info = core.TokenizerInfo.deserialize_json(vocabulary.info)
        keeps, when_needed = False, False
        self._compiler = core.GrammarCompiler(info, num_threads, keeps, NO_LIMIT, when_needed)

    def compile(self, form: str, behind: str) -> CompiledGrammar:
        """`form` and `behind` as in `mstar.communication.messages.Grammar`.

        Raises:
            GrammarError: it is no grammar; the message is meant for the client.
        """
        wanted = json.loads(form)
        try:
            wanted = exact_lengths(wanted)
            if behind:
                before = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": behind}
                breaks = {"type": "regex", "pattern": "\\n{0,2}"}
                wanted = {"type": "sequence", "elements": [before, breaks, wanted]}
            tag = json.dumps({"type": "structural_tag", "format": wanted})
            return CompiledGrammar(self._compiler.compile_structural_tag(tag))
        except (RuntimeError, ValueError) as error:
            raise GrammarError(_PLACE.sub("", str(error).strip())[:MAX_SHOWN]) from error
