"""The preprocess pool: results, refusals, and processes that misbehave and are replaced."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from support.stepwise_model import CARD

from mstar.conductor import preprocess
from mstar.conductor.events import Failure, RefusedError
from mstar.conductor.preprocess import PreprocessError, PreprocessPool, auto_processes
from mstar.conductor.preprocess_messages import Reply
from mstar.conductor.request import PromptInput
from mstar.model.base import ChatMessage, ModelCard, ModelSetup
from mstar.platforms import host

SETUP = ModelSetup({}, None, 64)
T = TypeVar("T")


def in_pool(use: Callable[[PreprocessPool], Awaitable[T]], num_processes: int = 1, **options: float) -> T:
    async def run() -> T:
        pool = PreprocessPool(CARD, SETUP, num_processes, **options)
        try:
            await pool.start()
            return await use(pool)
        finally:
            pool.close()

    return asyncio.run(run())


async def ask(pool: PreprocessPool, text: str) -> np.ndarray:
    prepared = await pool.prepare(PromptInput("completion", text=text), b"{}", 5)
    assert prepared.token_ids is not None
    return prepared.token_ids


async def failure_of(pool: PreprocessPool, text: str) -> Failure:
    with pytest.raises(RefusedError) as caught:
        await ask(pool, text)
    return caught.value.failure


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_prompt_goes_there_and_back_whole():
    async def use(pool: PreprocessPool) -> None:
        prompt = PromptInput(
            "chat",
            messages=(ChatMessage("user", "x", {"name": "Ann"}), ChatMessage("assistant", "é\0")),
            inputs={"media": np.arange(6, dtype=np.float32).reshape(2, 3)},
        )
        prepared = await pool.prepare(prompt, b"{}", 5)
        np.testing.assert_array_equal(prepared.inputs["media"], [[0, 2, 4], [6, 8, 10]])
        assert prepared.step_metadata == {"roles": "user,assistant", "most": 5}
        np.testing.assert_array_equal(await ask(pool, "aé"), [97, 0xC3, 0xA9])
        large = "x" * 3_000_000
        assert len(await ask(pool, large)) == len(large)
        assert (await ask(pool, "threads")).tolist() == [1]

    in_pool(use)


def test_a_refusal_is_the_clients_and_a_bug_is_ours():
    async def use(pool: PreprocessPool) -> None:
        refused = await failure_of(pool, "refuse")
        assert (refused.status, refused.param) == (400, "prompt")
        assert refused.message == "this text is refused\nin two lines"
        assert refused.code == "invalid_prompt"
        too_long = await failure_of(pool, "too long")
        assert (too_long.status, too_long.code, too_long.param) == (400, "context_length_exceeded", "prompt")
        bug = await failure_of(pool, "bug")
        assert bug.status == 500 and "KeyError" in bug.message and "a bug" not in bug.message
        assert pool.num_replaced == 0
        assert (await ask(pool, "a")).tolist() == [97]

    in_pool(use)


def test_its_log_has_the_format_of_the_other_processes(capfd):
    in_pool(lambda pool: failure_of(pool, "bug"))
    assert re.search(r"^\d\d:\d\d:\d\d E preprocess: process_prompt failed$", capfd.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_dies_fails_one_request_and_is_replaced(how: str):
    async def use(pool: PreprocessPool) -> None:
        results = await asyncio.gather(*(ask(pool, text) for text in ("a", how, "b", "c")), return_exceptions=True)
        assert [r.tolist() for r in (results[0], results[2], results[3])] == [[97], [98], [99]]
        assert isinstance(results[1], RefusedError) and results[1].failure.status == 500
        assert pool.num_replaced == 1

    in_pool(use)


@pytest.mark.parametrize(("text", "status", "says"), [("loop", 400, "took longer"), ("hang", 503, "Try again")])
def test_a_job_that_takes_too_long_is_ended_with_its_process(
    monkeypatch: pytest.MonkeyPatch, text: str, status: int, says: str
):
    """The prompt is at fault where the process was at work."""
    monkeypatch.setattr(preprocess, "LEAST_CPU_SHARE", 0.03)  # other tests may keep the cores busy

    async def use(pool: PreprocessPool) -> None:
        first = (await ask(pool, "pid"))[0]
        refused = await failure_of(pool, text)
        assert refused.status == status and says in refused.message
        assert refused.retry_after_s == (1 if status == 503 else None)
        assert (await ask(pool, "pid"))[0] != first
        assert not is_running(int(first))

    in_pool(use, job_timeout_s=0.3)


@pytest.mark.parametrize("too_large", [2**64, -(2**63) - 1])
def test_a_job_that_cannot_be_sent_fails_alone(too_large: int):
    async def use(pool: PreprocessPool) -> None:
        with pytest.raises(OverflowError):
            await pool.prepare(PromptInput("completion", text="a"), b"{}", too_large)
        with pytest.raises(OverflowError):
            await pool.prepare(PromptInput("completion", token_ids=(1, too_large)), b"{}", 5)
        async with asyncio.timeout(20):
            assert (await ask(pool, "b")).tolist() == [98]
        assert pool.num_replaced == 0

    in_pool(use)


@pytest.mark.parametrize("how", [msgspec.DecodeError("odd"), OSError("odd"), ValueError("odd")])
def test_a_reply_that_cannot_be_understood_fails_one_request(monkeypatch: pytest.MonkeyPatch, how: Exception):
    async def use(pool: PreprocessPool) -> None:
        def broken(_: bytes) -> Reply:
            raise how

        with monkeypatch.context() as patch:
            patch.setattr(preprocess, "decode_reply", broken)
            failure = await failure_of(pool, "a")
        assert failure.status == 500
        async with asyncio.timeout(20):
            assert (await ask(pool, "b")).tolist() == [98]
        assert pool.num_replaced == 1

    in_pool(use)


def test_a_replacement_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    def no_process(_: str) -> None:
        raise OSError("no descriptor left")

    async def use(pool: PreprocessPool) -> None:
        async with asyncio.timeout(20):
            with monkeypatch.context() as patch:
                patch.setattr(preprocess, "_spawn", no_process)
                assert (await failure_of(pool, "exit")).status == 500
                assert (await failure_of(pool, "a")).status == 500
            assert (await failure_of(pool, "a")).status == 500
            assert (await ask(pool, "b")).tolist() == [98]

    in_pool(use)


def test_jobs_are_served_whatever_ends_the_task_that_serves_them():
    async def use(pool: PreprocessPool) -> None:
        pool._servers[0].cancel()
        hanging = asyncio.create_task(failure_of(pool, "hang"))
        async with asyncio.timeout(20):
            while pool._jobs.qsize() or pool._processes[0].is_in_step:
                await asyncio.sleep(0.01)
            pool._servers[0].cancel()
            assert (await hanging).status == 500
            assert (await ask(pool, "b")).tolist() == [98]

    in_pool(use)


def test_one_slow_process_does_not_hold_up_the_others():
    async def use(pool: PreprocessPool) -> None:
        hanging = asyncio.create_task(failure_of(pool, "hang"))
        await asyncio.sleep(0)
        assert (await ask(pool, "a")).tolist() == [97]
        assert not hanging.done()
        hanging.cancel()

    in_pool(use, num_processes=2)


def test_a_client_that_left_is_not_worked_for():
    async def use(pool: PreprocessPool) -> None:
        left = asyncio.create_task(ask(pool, "exit"))
        waiting = asyncio.create_task(ask(pool, "pid"))
        left.cancel()
        await asyncio.wait([left, waiting])
        assert pool.num_replaced == 0

    in_pool(use)


def test_a_client_that_leaves_does_not_hold_up_those_behind_it():
    async def use(pool: PreprocessPool) -> None:
        first = (await ask(pool, "pid"))[0]
        leaving = asyncio.create_task(ask(pool, "hang"))
        while pool._processes[0].is_in_step:
            await asyncio.sleep(0.01)
        leaving.cancel()
        async with asyncio.timeout(20):
            assert (await ask(pool, "pid"))[0] != first
        assert not is_running(int(first)) and pool.num_replaced == 1

    in_pool(use, job_timeout_s=60)


def test_a_job_that_is_soon_done_keeps_its_process_when_its_client_leaves():
    async def use(pool: PreprocessPool) -> None:
        first = (await ask(pool, "pid"))[0]
        leaving = asyncio.create_task(ask(pool, "x" * 1_000_000))
        while pool._processes[0].is_in_step:
            await asyncio.sleep(0)
        leaving.cancel()
        assert (await ask(pool, "pid"))[0] == first

    in_pool(use)


def test_a_model_that_cannot_be_built_is_an_error_at_start():
    async def run() -> None:
        pool = PreprocessPool(ModelCard("x", "support.no_such:Model", ""), SETUP, 1)
        with pytest.raises(PreprocessError):
            await pool.start()

    asyncio.run(run())


def test_processes_end_with_the_pool():
    async def use(pool: PreprocessPool) -> int:
        return int((await ask(pool, "pid"))[0])

    assert not is_running(in_pool(use))


ORPHANS = """
import asyncio, sys
from mstar.conductor.preprocess import PreprocessPool
from mstar.conductor.request import PromptInput
from mstar.model.base import ModelSetup
from support.stepwise_model import CARD
async def main():
    pool = PreprocessPool(CARD, ModelSetup({}, None, 64), 2)
    await pool.start()
    print(*[process.process.pid for process in pool._processes], flush=True)
    await pool.prepare(PromptInput("completion", text="hang"), b"{}", 5)
asyncio.run(main())
"""


def test_processes_die_with_a_killed_parent():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()

    async def gone() -> None:
        async with asyncio.timeout(10):
            while any(map(is_running, pids)):
                await asyncio.sleep(0.02)

    asyncio.run(gone())


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_as_many_processes_as_the_machine_has_cores_for(cores: int, processes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "num_cores", lambda: cores)
    assert auto_processes() == processes
