"""`ConductorHandle`: the one door between the HTTP side and the conductor. Front loop only.

It takes requests on or refuses them, prepares their prompts in the preprocess pool and puts them on the workers; what
happens from there on comes back through the `RequestStream`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from mstar.communication.host_tensors import from_numpy
from mstar.communication.messages import OpenRequest, StepReport
from mstar.conductor.admission import check_choices, check_length, check_prompt_length, grant_tokens
from mstar.conductor.conductor import Conductor
from mstar.conductor.events import ABORTED, Failure, PreparedEvent, RefusedError, RequestStream
from mstar.conductor.model_facts import ModelFacts
from mstar.conductor.preprocess import PreprocessPool
from mstar.conductor.queue_bound import Load, QueueBound
from mstar.conductor.request import GenerateRequest, PromptInput, choice_seed
from mstar.conductor.request_table import RequestRecord
from mstar.conductor.request_times import MAX_RECENT, RequestTimes
from mstar.conductor.statistics import Statistics
from mstar.conductor.walks import StartPlan, WalkDirectory
from mstar.conductor.workers import WorkerTable
from mstar.model.base import Model, PreparedPrompt
from mstar.process_log import REQUEST

logger = logging.getLogger(__name__)
RETRY_NOT_READY_S = 2
PROMPT_TAIL = 8
SHUT_DOWN = Failure(503, "server_shutting_down", "The server is shutting down.")


class ConductorHandle:
    """See the module docstring. A worker runs `max_rows` choices at once, and `max_queue` more may wait.
    `request_timeout_s`: longest time from submission to the end; a request may ask for less."""

    def __init__(
        self,
        *,
        model: Model,
        conductor: Conductor,
        walks: WalkDirectory,
        workers: WorkerTable,
        pool: PreprocessPool,
        max_rows: int,
        max_queue: int,
        request_timeout_s: float | None = None,
    ) -> None:
        self.facts = ModelFacts.of(model)
        self.is_draining = False
        self._conductor = conductor
        self._walks = walks
        self._workers = workers
        self._pool = pool
        self._bound = QueueBound(max_rows, max_queue)
        self._num_live_choices = 0
        self._request_timeout_s = request_timeout_s
        self._preparing: dict[RequestStream, asyncio.Task[None]] = {}
        self._live: set[RequestStream] = set()
        self._recent: deque[RequestTimes] = deque(maxlen=MAX_RECENT)
        self._numbers = itertools.count()
        self._drained: asyncio.Event | None = None
        self._run_tag = secrets.token_hex(4)

    @property
    def statistics(self) -> Statistics:
        return self._conductor.statistics

    @property
    def num_waiting(self) -> int:
        """Choices that have emitted nothing yet."""
        return self._conductor.num_waiting

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def why_not_ready(self) -> str | None:
        return self._workers.why_not_ready(self._conductor.now())

    @property
    def modality_of(self) -> Mapping[str, str]:
        """What each emitted signal is, by signal."""
        return self._walks.modality_of

    @property
    def num_worker_restarts(self) -> int:
        return self._workers.num_restarts

    def worker_gauges(self) -> dict[str, float]:
        return self._workers.summed_gauges()

    def now(self) -> float:
        return self._conductor.now()

    def times_since(self, since: float) -> list[RequestTimes]:
        """Requests that run or ended after `since`, of the last that ended."""
        ended = [times for times in self._recent if times.ended_at is not None and times.ended_at > since]
        return [*ended, *(stream.times for stream in self._live)]

    async def steps_since(self, since: float) -> dict[int, StepReport | None]:
        """Steps of every worker, by rank; None for one that does not answer."""
        ranks = self._workers.connected
        reports = await self._conductor.step_reports.ask(ranks, max(0, int(since * 1e9)))
        return {rank: reports.get(rank) for rank in self._workers.states}

    def worker_states(self) -> list[tuple[int, str | None, float]]:
        """Of each worker its rank, why it cannot be used now (None: it can), and the age of the step that it is in."""
        now = self._conductor.now()
        states = self._workers.states.items()
        return [(rank, self._workers.why_not_ready(now, (rank,)), state.step_age_s) for rank, state in states]

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Takes a request on. Its prompts are prepared behind this call; what is wrong with them comes as a `Failure`.

        Raises:
            RefusedError: 429 the queue is full, 503 draining or no worker, 400 what could never fit.
        """
        try:
            self._admit(request)
        except RefusedError as refused:
            self.statistics.refusals[refused.failure.code] += 1
            raise
        stream = RequestStream(request, self._conductor.now())
        self._conductor.num_waiting += request.num_results
        self._num_live_choices += request.num_results
        self._live.add(stream)
        stream.on_close = self._choices_ended
        task = asyncio.create_task(self._prepare_and_start(stream))
        self._preparing[stream] = task
        task.add_done_callback(lambda _: self._preparing.pop(stream, None))
        stream.on_end.append(partial(self._ended, stream, self._start_timer(stream), REQUEST.get()))
        return stream

    def stop(self, stream: RequestStream, choice: int) -> None:
        """The consumer found a stop string: no further text of this choice is wanted."""
        self._conductor.stop(stream, choice)

    def abort(self, stream: RequestStream, failure: Failure = ABORTED) -> None:
        """Ends a request at once; what it holds on the workers is freed. Without effect on one that has ended."""
        task = self._preparing.pop(stream, None)
        if task is not None:
            task.cancel()
        self._conductor.fail(stream, failure)
        self._conductor.flush()

    async def tokenize(self, prompt: PromptInput) -> list[int]:
        """Token ids of a prompt as the model would see them.

        Raises:
            RefusedError: the prompt is at fault.
        """
        check_prompt_length(prompt, self.facts.max_seq_len)
        prepared = await self._pool.prepare(prompt, b"{}", 1)
        return [] if prepared.token_ids is None else prepared.token_ids.tolist()

    def begin_drain(self) -> None:
        """From now on new requests are refused."""
        self.is_draining = True

    async def drained(self, timeout_s: float) -> None:
        """Returns when no request runs any more; those left after `timeout_s` are failed with 503."""
        self._drained = asyncio.Event()
        if self._live:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
            except TimeoutError:
                logger.warning("after %g s of draining, running requests: %d", timeout_s, len(self._live))
        for stream in list(self._live):
            self.abort(stream, SHUT_DOWN)

    def _start_timer(self, stream: RequestStream) -> asyncio.TimerHandle | None:
        """The deadline holds wherever the request is then: prepared, waiting on a worker, running, preempted."""
        limits_s = [limit for limit in (stream.request.timeout_s, self._request_timeout_s) if limit is not None]
        if not limits_s:
            return None
        failure = Failure(504, "request_timeout", f"The request has not ended within {min(limits_s):g} s.")
        return asyncio.get_running_loop().call_later(min(limits_s), self.abort, stream, failure)

    def _choices_ended(self, num_choices: int) -> None:
        self._num_live_choices -= num_choices
        self._bound.ended(num_choices, self._conductor.now())

    def _ended(self, stream: RequestStream, timer: asyncio.TimerHandle | None, noted: dict[str, object] | None) -> None:
        """`noted`: what the log will say of the request."""
        stream.times.ended_at = self.now()
        self._recent.append(stream.times)
        if noted is not None:
            noted.update(stream.times.facts())
        if timer is not None:
            timer.cancel()
        self._live.discard(stream)
        if not self._live and self._drained is not None:
            self._drained.set()

    def _admit(self, request: GenerateRequest) -> None:
        if self.is_draining:
            raise RefusedError(SHUT_DOWN)
        if reason := self._workers.why_none_ready(self._conductor.now()):
            raise RefusedError(
                Failure(503, "not_ready", f"The server cannot answer now: {reason}.", retry_after_s=RETRY_NOT_READY_S)
            )
        check_length(request, self.facts.max_seq_len)
        check_choices(request, self._bound.most)
        load = Load(self._num_live_choices, self.num_waiting, int(self._workers.gauge("mstar_queue_depth")))
        self._bound.admit(request.num_results, load, self._conductor.now())

    async def _prepare_and_start(self, stream: RequestStream) -> None:
        request = stream.request
        parameters = request.parameters.model_dump_json().encode()
        most = self.facts.max_seq_len if request.max_tokens is None else request.max_tokens
        try:
            prepared = [await self._pool.prepare(prompt, parameters, most) for prompt in request.prompts]
            stream.request = request = request.without_words()
            self._start(stream, prepared, parameters)
        except RefusedError as refused:
            self._conductor.fail(stream, refused.failure)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("starting a request failed")
            self._conductor.fail(stream, Failure(500, "internal_error", "The server failed to start the request."))
        self._conductor.flush()

    def _start(self, stream: RequestStream, prepared: Sequence[PreparedPrompt], parameters: bytes) -> None:
        request = stream.request
        lengths = [0 if prompt.token_ids is None else len(prompt.token_ids) for prompt in prepared]
        bound = self._workers.max_total_tokens
        granted = [grant_tokens(request, length, self.facts.max_seq_len, bound) for length in lengths]
        plans = [
            [self._walks.plan(prompt, max_tokens) for _ in range(request.num_choices)]
            for prompt, max_tokens in zip(prepared, granted, strict=True)
        ]
        needed = sorted({rank for choices in plans for parts, _ in choices for rank in self._walks.ranks_of(parts)})
        if reason := self._workers.why_not_ready(self._conductor.now(), needed):
            raise RefusedError(
                Failure(503, "worker_lost", f"The server cannot answer now: {reason}.", retry_after_s=RETRY_NOT_READY_S)
            )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        for index, (prompt, max_tokens) in enumerate(zip(prepared, granted, strict=True)):
            self._start_prompt(stream, index, prompt, max_tokens, plans[index], seed, parameters)

    def _start_prompt(
        self,
        stream: RequestStream,
        index: int,
        prompt: PreparedPrompt,
        max_tokens: int,
        plans: Sequence[StartPlan],
        seed: int,
        parameters: bytes,
    ) -> None:
        """Puts all choices of one prompt on the workers, each by its own of `plans`."""
        request, ids = stream.request, prompt.token_ids
        length = 0 if ids is None else len(ids)
        self.statistics.num_prompt_tokens += length
        stream.times.num_prompt_tokens += length
        tail = () if ids is None else tuple(ids[-PROMPT_TAIL:].tolist())
        stream.push(PreparedEvent(index, length, tail, prompt.opens_reasoning))
        grammar = request.sampling.grammar
        if grammar is not None and grammar.behind and not prompt.opens_reasoning:
            grammar = msgspec.structs.replace(grammar, behind="")
        prompt_ids = None if ids is None else from_numpy(ids)
        inputs = {name: from_numpy(array) for name, array in prompt.inputs.items()}
        for i, (partitions, limits) in enumerate(plans):
            number = next(self._numbers)
            opening = OpenRequest(
                sampling=msgspec.structs.replace(
                    request.sampling, seed=choice_seed(seed, i), max_tokens=max_tokens, grammar=grammar
                ),
                prompt_ids=prompt_ids,
                inputs=inputs,
                limits=limits,
                parameters=parameters,
                media=prompt.media,
                cache_salt=request.cache_salt,
                priority=request.priority,
                arrival=number,
            )
            record = RequestRecord(
                rid=f"{self._run_tag}-{number:x}",
                stream=stream,
                choice=index * request.num_choices + i,
                num_prompt_tokens=length,
                step_metadata=prompt.step_metadata,
                partitions=partitions,
                ranks=self._walks.ranks_of(partitions),
            )
            self._conductor.start(record, opening)
