"""The door: requests with arrays, several prompts and choices, through a real preprocess pool onto a bus."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from support.composite.declarations import MEDIA_TOKEN
from support.composite.deployment import CONFIG, PLACEMENTS
from support.composite.model import CARD as COMPOSITE
from support.conductor_rig import ConductorRig
from support.planned_model import PLACEMENT as PLANNED_PLACEMENT
from support.planned_model import PlannedModel, prompt

from mstar.communication.host_tensors import to_numpy
from mstar.communication.messages import Opened, OpenRequest, PeerLost, SamplingParams, StartWalk
from mstar.conductor.events import Failure, PreparedEvent, RefusedError
from mstar.conductor.handle import ConductorHandle
from mstar.conductor.preprocess import PreprocessPool
from mstar.conductor.request import GenerateRequest, PromptInput, choice_seed
from mstar.model.base import ModelSetup, PreparedPrompt
from mstar.model.registry import build_model

SETUP = ModelSetup(CONFIG, None, 64)
MEDIA = np.arange(2 * CONFIG["media_width"], dtype=np.float32).reshape(2, -1)
LATENT = np.ones((CONFIG["latent_rows"], CONFIG["latent_width"]), np.float32)


class PlannedPool:
    """A pool without processes: a prompt's text is its walks."""

    async def prepare(self, given: PromptInput, parameters: bytes, max_tokens: int) -> PreparedPrompt:
        return prompt(1, *(given.text or "").split(","))


def native(*ids: int) -> PromptInput:
    return PromptInput("native", token_ids=ids, inputs={"media": MEDIA, "latent": LATENT})


def request(*prompts: PromptInput, **fields) -> GenerateRequest:
    return GenerateRequest("mine", prompts, **fields)


def with_handle(
    use: Callable[[ConductorHandle, ConductorRig], Awaitable[None]], placement: str = "one_worker", **options
) -> None:
    async def run() -> None:
        model = build_model(COMPOSITE, SETUP)
        rig = ConductorRig(model, PLACEMENTS[placement])
        rig.bring_up()
        pool = PreprocessPool(COMPOSITE, SETUP, 1)
        handle = ConductorHandle(
            model=model,
            conductor=rig.conductor,
            walks=rig.walks,
            workers=rig.workers,
            pool=pool,
            **({"max_rows": 4, "max_queue": 8} | options),
        )
        try:
            await pool.start()
            await use(handle, rig)
            assert handle.num_live == handle.num_waiting == len(rig.conductor.requests) == 0
        finally:
            pool.close()

    asyncio.run(run())


async def openings(rig: ConductorRig, count: int) -> list[OpenRequest]:
    found: list[OpenRequest] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            await asyncio.sleep(0.01)
            found += [m.open for m in rig.sent() if isinstance(m, StartWalk) and m.open is not None]
    return found


def test_arrays_limits_and_seeds_reach_the_worker():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        sampling = SamplingParams(temperature=0.5, top_k=3)
        stream = handle.submit(
            request(native(5, 6), native(7), num_choices=2, seed=11, max_tokens=9, sampling=sampling)
        )
        opened = await openings(rig, 4)
        assert [to_numpy(o.prompt_ids).tolist()[-2:] for o in opened] == [
            [5, 6],
            [5, 6],
            [MEDIA_TOKEN, 7],
            [MEDIA_TOKEN, 7],
        ]
        np.testing.assert_array_equal(to_numpy(opened[3].inputs["media"]), MEDIA)
        assert opened[0].limits == {"speak_steps": 8}
        expected = [choice_seed(11, i) for i in (0, 1, 0, 1)]
        assert [o.sampling.seed for o in opened] == expected, "a prompt alone has the seeds that it has among others"
        assert {(o.sampling.temperature, o.sampling.top_k, o.sampling.max_tokens) for o in opened} == {(0.5, 3, 9)}
        assert [event for event in rig.events(stream) if isinstance(event, PreparedEvent)] == [
            PreparedEvent(0, 3, (MEDIA_TOKEN, 5, 6)),
            PreparedEvent(1, 2, (MEDIA_TOKEN, 7)),
        ]
        handle.abort(stream)

    with_handle(use)


def test_media_salt_and_priority_reach_the_worker():
    """Equal ids with other media must be told apart by the digest; equal media must not."""

    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        variants = [MEDIA, MEDIA.copy(), MEDIA + 1, np.repeat(MEDIA, 2, axis=0)]
        prompts = [PromptInput("native", token_ids=(5,), inputs={"media": m, "latent": LATENT}) for m in variants]
        stream = handle.submit(request(*prompts, cache_salt="ours", priority=-7))
        same, again, other, longer = (opening.media for opening in await openings(rig, 4))
        assert [(span.start, span.length) for span in (*same, *other, *longer)] == [(0, 1), (0, 1), (0, 2)]
        assert same == again
        assert len({span.digest for span in (*same, *other, *longer)}) == 3
        handle.abort(stream)

        stream = handle.submit(request(native(5), cache_salt="ours", priority=-7))
        (opened,) = await openings(rig, 1)
        assert (opened.cache_salt, opened.priority) == ("ours", -7)
        handle.abort(stream)

    with_handle(use)


def test_what_the_model_refuses_is_a_failure_of_the_stream():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        stream = handle.submit(request(native(5), native(10_000)))
        (failure,) = await stream.take()
        assert isinstance(failure, Failure) and failure.status == 400 and "prompt ids" in failure.message
        assert await stream.take() == [], "nothing follows a failure"
        assert rig.sent() == [], "no choice is started when one prompt is refused"

    with_handle(use)


def test_a_worker_that_dies_while_a_prompt_is_prepared():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        stream = handle.submit(request(native(5)))
        rig.workers.states[0].is_lost = True
        (failure,) = await stream.take()
        assert isinstance(failure, Failure) and (failure.status, failure.code) == (503, "worker_lost")

    with_handle(use)


def test_a_worker_that_a_request_does_not_need_may_be_away():
    model = PlannedModel(ModelSetup({}, None, 64))
    rig = ConductorRig(model, PLANNED_PLACEMENT)
    rig.bring_up()

    async def run() -> None:
        pool = PlannedPool()
        handle = ConductorHandle(
            model=model,
            conductor=rig.conductor,
            walks=rig.walks,
            workers=rig.workers,
            pool=pool,  # type: ignore[arg-type]
            max_rows=4,
            max_queue=8,
        )
        rig.say(PeerLost(1, 0, "killed by signal 9"))
        assert handle.why_not_ready() is not None, "the server as a whole is not well"
        here = handle.submit(request(PromptInput("native", text="think")))
        there = handle.submit(request(PromptInput("native", text="think"), PromptInput("native", text="think,speak")))
        [opened] = await openings(rig, 1)
        assert opened.ranks == (0,)
        [failure] = [event for event in await there.take() if isinstance(event, Failure)]
        assert (failure.status, failure.code) == (503, "worker_lost")
        assert rig.sent(0) == [], "no choice is started when one of them cannot be"
        handle.abort(here)
        rig.say(PeerLost(0, 0, "killed by signal 9"))
        with pytest.raises(RefusedError) as caught:
            handle.submit(request(PromptInput("native", text="think")))
        assert caught.value.failure.code == "not_ready"

    asyncio.run(run())


def test_an_abort_before_the_start_starts_nothing():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        stream = handle.submit(request(native(5)))
        handle.abort(stream)
        handle.abort(stream)
        (failure,) = await stream.take()
        assert isinstance(failure, Failure) and failure.code == "request_aborted"
        other = handle.submit(request(native(6)))
        (opened,) = await openings(rig, 1)
        assert to_numpy(opened.prompt_ids).tolist()[-1] == 6
        handle.abort(other)

    with_handle(use)


def test_a_request_of_several_workers_waits_for_each():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        stream = handle.submit(request(native(5)))
        async with asyncio.timeout(20):
            while not rig.sent(0):
                await asyncio.sleep(0.01)
        rig.say(Opened(rid=stream.rids[0], rank=0))
        assert [type(m).__name__ for m in rig.sent(1)] == ["Open"]
        rig.say(Opened(rid=stream.rids[0], rank=1))
        assert [type(m).__name__ for m in rig.sent(1)] == ["StartWalk"]
        handle.abort(stream)

    with_handle(use, "codec_apart")


def test_admission_counts_choices_until_they_end():
    """Two run and one waits, whoever has emitted; a place is free as soon as a choice has ended or was aborted."""

    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        first = handle.submit(request(native(5), num_choices=2))
        with pytest.raises(RefusedError) as caught:
            handle.submit(request(native(5), num_choices=2))
        assert (caught.value.failure.status, caught.value.failure.code) == (429, "queue_full")
        assert (handle.num_live, handle.num_waiting) == (1, 2), "nothing is left of the refused one"
        await openings(rig, 2)
        rig.emit(*first.rids)
        second = handle.submit(request(native(6)))
        with pytest.raises(RefusedError):
            handle.submit(request(native(5)))
        handle.abort(first)
        third = handle.submit(request(native(5), num_choices=2))
        handle.begin_drain()
        with pytest.raises(RefusedError) as draining:
            handle.submit(request(native(5)))
        assert draining.value.failure.status == 503
        handle.abort(second)
        handle.abort(third)
        await handle.drained(0.1)
        assert handle.statistics.refusals == {"queue_full": 2, "server_shutting_down": 1}

    with_handle(use, max_rows=2, max_queue=1)


def test_more_choices_than_there_are_places_are_the_clients_fault():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        for asked, field in ((request(native(5), num_choices=4), "n"), (request(*[native(5)] * 4), "prompt")):
            with pytest.raises(RefusedError) as caught:
                handle.submit(asked)
            assert (caught.value.failure.status, caught.value.failure.param) == (400, field)
        handle.abort(handle.submit(request(native(5), num_choices=3)))

    with_handle(use, max_rows=2, max_queue=1)


def test_the_deadline_of_a_request_or_of_the_server():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        loop = asyncio.get_running_loop()
        for own_s, at_least, at_most in ((0.1, 0.1, 0.4), (None, 0.4, 5.0), (9.0, 0.4, 5.0)):
            began = loop.time()
            stream = handle.submit(request(native(5), timeout_s=own_s))
            events = [event async for event in stream]
            assert isinstance(events[-1], Failure) and (events[-1].status, events[-1].code) == (504, "request_timeout")
            assert at_least <= loop.time() - began < at_most

    with_handle(use, request_timeout_s=0.4)


def test_a_drain_fails_what_is_left_after_its_time():
    async def use(handle: ConductorHandle, rig: ConductorRig) -> None:
        stream = handle.submit(request(native(5)))
        await openings(rig, 1)
        handle.begin_drain()
        await handle.drained(0.05)
        events = [event async for event in stream]
        assert isinstance(events[-1], Failure) and events[-1].code == "server_shutting_down"

    with_handle(use)
