"""`ConstrainedRows`: which requests of a worker have a grammar, who waits for one, and what a step's rows may draw.

Runs on the worker's loop thread. A request joins the line of those that wait for room when its grammar is compiled;
from then on each of its tokens is accepted when its step has ended, before the next one is drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mstar.engine.engine import Engine
from mstar.engine.execution import AllowedTokens, Step
from mstar.worker.admission import RequestRefused
from mstar.worker.grammars.builds import Compiled, GrammarBuilds, GrammarKey
from mstar.worker.grammars.constraints import Constraint
from mstar.worker.requests import Request
from mstar.worker.rid_table import HandleMap, RidTable


class Answered(NamedTuple):
    """A request whose grammar is there, or that is refused."""

    request: Request
    refusal: RequestRefused | None


class ConstrainedRows:
    """`vocab_size`: of the text that the nodes here draw, 0 if they draw none: grammars are then others' business.
    `builds`: None where there is no tokenizer."""

    def __init__(self, engine: Engine, rids: RidTable, builds: GrammarBuilds | None, vocab_size: int) -> None:
        self._engine = engine
        self._builds = builds
        self._draws_text = vocab_size > 0
        self._waiting: dict[GrammarKey, list[Request]] = {}
        self._constraints: HandleMap[Constraint] = rids.handle_map("constraints")
        self._bits = np.empty((0, -(-vocab_size // 32)), np.int32)
        """Of the step that draws next: no other reads it by then."""

    # requests

    def check(self, request: Request) -> None:
        """Refuse at once what can never be constrained."""
        grammar = request.open.sampling.grammar
        if grammar is not None and self._draws_text and self._builds is None:
            why = "this deployment has no tokenizer that a grammar could be applied to"
            raise RequestRefused(why, 400, grammar.field)

    def join(self, request: Request) -> bool:
        """Whether the request has all that it needs. False: `answered` will name it."""
        grammar = request.open.sampling.grammar
        if grammar is None or self._builds is None:
            return True
        key = GrammarKey.of(grammar)
        compiled = self._builds.find(key)
        if compiled is None:
            self._builds.start(key)
            self._waiting.setdefault(key, []).append(request)
            return False
        self._constrain(request, compiled)
        return True

    def withdraw(self, request: Request) -> None:
        """It leaves, and may wait for its grammar."""
        for key, requests in list(self._waiting.items()):
            if request in requests:
                requests.remove(request)
                if not requests and self._builds is not None:
                    del self._waiting[key]
                    self._builds.cancel(key)

    @property
    def has_news(self) -> bool:
        return self._builds is not None and self._builds.has_news

    def answered(self) -> list[Answered]:
        """Requests that have waited and need not any more."""
        assert self._builds is not None
        answered: list[Answered] = []
        for built in self._builds.take():
            for request in self._waiting.pop(built.key, ()):
                refusal = None
                if built.compiled is None:
                    grammar = request.open.sampling.grammar
                    refusal = RequestRefused(built.error, built.code, "" if grammar is None else grammar.field)
                else:
                    self._constrain(request, built.compiled)
                answered.append(Answered(request, refusal))
        return answered

    def _constrain(self, request: Request, compiled: Compiled) -> None:
        assert self._builds is not None and self._builds.compiler is not None
        sampling = request.open.sampling
        end_ids = [token for token in sampling.stop_token_ids if token in self._builds.compiler.textless]
        ends = end_ids or self._builds.compiler.end_ids
        self._constraints[request.handle] = Constraint(
            compiled.matcher(ends), ends, sampling.min_tokens, ends_alone=not end_ids
        )

    # steps

    def draws(self, step: Step) -> bool:
        """Whether rows of the step draw only what `allowed` says."""
        return bool(len(self._constraints)) and bool(self._places(step))

    def accept(self, step: Step) -> list[int]:
        """The step has ended: its tokens are part of the texts. Rows that cannot go on are added to `failed`. Returns
        rows whose text is over although none of their end tokens was drawn."""
        ended: list[int] = []
        if not len(self._constraints):
            return ended
        places = self._places(step)
        if not places or step.error is not None:
            return ended
        tokens = self._engine.drawn(step)
        for place in places:
            handle = int(step.handles[place])
            constraint = self._constraints[handle]
            if handle in step.failed or handle in step.dropped or constraint.is_over:
                continue
            if why := constraint.accept(int(tokens[place])):
                step.failed[handle] = why
            elif constraint.is_over and constraint.ends_alone:
                ended.append(handle)
        return ended

    def allowed(self, step: Step) -> AllowedTokens | None:
        """What the rows of a planned step may draw, now that all their tokens are known. Rows that cannot go on are
        added to `failed`."""
        places = [place for place in self._places(step) if not self._constraints[int(step.handles[place])].is_over]
        if not places:
            return None
        if len(places) > len(self._bits):
            self._bits = np.empty((max(len(places), 2 * len(self._bits)), self._bits.shape[1]), np.int32)
        for index, place in enumerate(places):
            handle = int(step.handles[place])
            if why := self._constraints[handle].fill(self._bits, index):
                step.failed[handle] = why
        return AllowedTokens(np.array(places, np.int64), self._bits[: len(places)])

    def _places(self, step: Step) -> list[int]:
        """Positions of constrained rows that draw in this step."""
        draws = self._engine.draws(step)
        return [i for i, handle in enumerate(step.handles.tolist()) if handle in self._constraints and draws[i]]

    # the loop

    def warm(self) -> None:
        """Have what compiles grammars ready before the first one comes."""
        if self._builds is not None:
            self._builds.warm()

    @property
    def wakeups(self) -> tuple[int, ...]:
        """Descriptors that end the loop's sleep."""
        return () if self._builds is None else (self._builds.wakeup.fileno(),)

    def close(self) -> None:
        if self._builds is not None:
            self._builds.close()
