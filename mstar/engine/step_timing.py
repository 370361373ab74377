"""Fits `StepCost` to this machine: runs real steps of a node over requests of its own and takes their times.

Start-up only, on the thread that will be the loop thread, before the first request. Everything goes through the engine
as a served step does; what was opened is closed again, and nothing is published.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from mstar.communication.messages import SamplingParams
from mstar.engine.engine import Engine
from mstar.engine.execution import Portion, Step
from mstar.engine.resources.base import OpenConfig
from mstar.engine.step_cost import StepCost
from mstar.graph.protocol import LIVE_COLUMN, ReadyKey, TakenRows

SMALL, LARGE, FAR_LARGE = 16, 128, 64
"""Tokens of the chunks that are timed: two sizes near the begin of a prompt, and `SMALL` and `FAR_LARGE` far behind."""
FAR_START = 4096
DECODE_ROWS = 8
ROUNDS = 6
LEAST_TOKEN_S = 1e-8
NEAR, FAR = 1, 2
"""Handles of the requests whose chunks are timed; those that decode follow. No request has one yet."""


class DecodeWalk(NamedTuple):
    """A walk of the same node that goes on from its own live values alone: `inputs` are their names."""

    key: ReadyKey
    inputs: frozenset[str]


class _Chunk(NamedTuple):
    tokens: int
    start: int
    seconds: float

    @property
    def factors(self) -> tuple[float, float, float, float]:
        """What `base_s`, `token_s`, `context_s` and `pair_s` are taken times."""
        return 1.0, self.tokens, self.start, self.tokens * (self.start + self.tokens / 2)


class _Unmeasured(Exception):
    """A step did not run as asked."""


def measure_step_cost(
    engine: Engine, chunks: ReadyKey, decode: DecodeWalk | None, *, budget_s: float = 1.5
) -> StepCost | None:
    """Time some steps of `chunks`, a chunked walk without graph inputs, and of `decode`. About `budget_s` seconds; a
    machine too slow for that is measured in fewer rounds. None: the node could not run them.
    """
    timing = _Timing(engine, chunks, decode, time.monotonic() + budget_s)
    try:
        return timing.fit()
    except _Unmeasured:
        return None
    finally:
        timing.close()


class _Timing:
    """The temporary requests and their steps."""

    def __init__(self, engine: Engine, chunks: ReadyKey, decode: DecodeWalk | None, deadline: float) -> None:
        self._engine = engine
        self._chunks = chunks
        self._decode = decode
        self._deadline = deadline
        self._opened: list[int] = []

    def close(self) -> None:
        for handle in self._opened:
            self._engine.memory.close(handle)

    def fit(self) -> StepCost:
        """What is measured takes turns, so that something else on the machine slows down all of it alike. Raises
        `_Unmeasured`."""
        most = self._engine.memory.most_tokens() - 1
        large = min(LARGE, (most - 1) // (2 * ROUNDS))
        small = min(SMALL, large // 2)
        if small < 1 or not self._open(NEAR, ROUNDS * (small + large) + 1, 1):  # none is a prompt's last chunk
            raise _Unmeasured
        decoding = self._open_decoding() if self._decode is not None else []
        far = self._open_far(most)
        chunks: dict[tuple[int, int], list[_Chunk]] = defaultdict(list)
        decode: dict[int, list[float]] = defaultdict(list)
        for round_ in range(ROUNDS):
            if round_ == 1:  # the first round found cold memory
                chunks.clear()
                decode.clear()
            for handle, tokens in ((NEAR, small), (NEAR, large), *(((FAR, SMALL), (FAR, FAR_LARGE)) if far else ())):
                chunks[handle, tokens].append(self._chunk(handle, tokens))
            try:
                for rows in {1, len(decoding)} if decoding else ():
                    decode[rows].append(self._decode_once(decoding[:rows]))
            except _Unmeasured:  # no room for them to go on
                decoding = []
            if round_ and time.monotonic() > self._deadline:
                break
        terms = _solve([_typical(found) for found in chunks.values()])
        if not decoding:
            base_s, token_s = terms[:2]
            return StepCost(*terms, base_s, token_s)
        one, all_rows = _quartile(decode[1]), _quartile(decode[len(decoding)])
        row_s = max(0.0, all_rows - one) / max(1, len(decoding) - 1)
        return StepCost(*terms, max(0.0, one - row_s), row_s)

    def _open_decoding(self) -> list[int]:
        """Requests that have drawn their first token. Raises `_Unmeasured`."""
        rows = min(DECODE_ROWS, self._engine.max_rows(self._chunks.node))
        decoding = [handle for handle in range(FAR + 1, FAR + 1 + rows) if self._open(handle, 4, 2 * ROUNDS + 2)]
        if decoding:
            self._run([Portion(_rows(self._chunks, decoding, ()))])
        return decoding

    def _open_far(self, most: int) -> bool:
        """A request whose cache claims much more than the near one's will hold. False: there is no room for one."""
        length = min(most, FAR_START + ROUNDS * (SMALL + FAR_LARGE) + 1)
        start = length - ROUNDS * (SMALL + FAR_LARGE) - 1
        if start < 4 * ROUNDS * (SMALL + LARGE) // 2 or not self._open(FAR, length, 1):
            return False
        self._engine.skip(self._arm([self._portion(FAR, start)]))
        return True

    def _decode_once(self, handles: list[int]) -> float:
        assert self._decode is not None
        return self._run([Portion(_rows(self._decode.key, handles, self._decode.inputs))])

    def _chunk(self, handle: int, tokens: int) -> _Chunk:
        start = int(self._engine.lengths(self._chunks.node, np.array([handle], np.int64))[0])
        return _Chunk(tokens, start, self._run([self._portion(handle, tokens)]))

    def _portion(self, handle: int, tokens: int) -> Portion:
        return Portion(_rows(self._chunks, [handle], ()), np.array([tokens], np.int32))

    def _arm(self, portions: Sequence[Portion]) -> Step:
        step, _ = self._engine.build(portions)
        if step is None or step.failed or not self._engine.admit(step).ok or step.failed:
            raise _Unmeasured
        self._engine.plan(step)
        if step.failed:
            raise _Unmeasured
        return step

    def _run(self, portions: Sequence[Portion]) -> float:
        """Seconds that the step's work took on the device executor."""
        engine, step = self._engine, self._arm(portions)
        engine.submit(step)
        assert step.event is not None
        step.event.wait()
        engine.finish(step)
        engine.publish(step, np.zeros(step.num_rows, np.bool_))
        if step.failed:
            raise _Unmeasured
        return (step.event.ended_ns - step.event.began_ns) / 1e9

    def _open(self, handle: int, num_prompt: int, max_tokens: int) -> bool:
        """False: there is no room."""
        memory = self._engine.memory
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        config = OpenConfig(sampling, np.zeros(num_prompt, np.int32), num_prompt + max_tokens, shares=False)
        memory.introduce(handle, config)
        self._opened.append(handle)
        if not memory.reserve(handle):
            return False
        memory.open(handle)
        return True


def _rows(key: ReadyKey, handles: list[int], inputs: Sequence[str] | frozenset[str]) -> TakenRows:
    count = len(handles)
    return TakenRows(key, handles, {name: [LIVE_COLUMN] * count for name in inputs}, {}, [0] * count, [False] * count)


def _typical(chunks: Sequence[_Chunk]) -> _Chunk:
    """The one at the lower quartile: what else the machine did can only have made a step longer."""
    return sorted(chunks, key=lambda chunk: chunk.seconds)[_quarter(len(chunks))]


def _quartile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[_quarter(len(seconds))]


def _quarter(count: int) -> int:
    return (count - 1) // 4


def _solve(groups: Sequence[_Chunk]) -> tuple[float, float, float, float]:
    """`base_s`, `token_s`, `context_s` and `pair_s` with the least relative errors, none below zero: what would be is
    noise, and counts as zero. Chunks near the begin alone tell the first two, and the others are zero."""
    seconds = np.array([chunk.seconds for chunk in groups])
    factors = np.array([chunk.factors for chunk in groups]) / seconds[:, None]
    best, least = np.zeros(4), math.inf
    for size in range(1, min(4, len(groups)) + 1):
        for terms in map(list, combinations(range(4 if len(groups) > 2 else 2), size)):
            found = np.linalg.lstsq(factors[:, terms], np.ones(len(groups)), rcond=None)[0]
            error = float(np.square(factors[:, terms] @ found - 1).sum())
            if found.min() >= 0 and error < least:
                best, least = np.zeros(4), error
                best[terms] = found
    base_s, token_s, context_s, pair_s = best.tolist()
    return base_s, max(LEAST_TOKEN_S, token_s), context_s, pair_s
