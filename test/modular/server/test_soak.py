"""A short soak, and that each of its eyes sees what it is there for. `make soak` runs long ones."""

import asyncio
import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from soak.asks import Ask, Leave
from soak.audit import Audit, differences, held_things
from soak.campaign import soak_target
from soak.deployments import Knobs, target_of, write_configs
from soak.exchange import CutOffError, Exchange, Reply
from soak.models import PAGE
from soak.outcomes import Outcome, judge, read_reply
from soak.process_facts import ProcessFacts
from soak.server_log import unexpected_records
from soak.truth import Truth
from support.server import running

NUM_ABORTED = 200
FULL = bool(os.environ.get("MSTAR_TEST_FULL"))
SAID = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("target", "seed", "kills"),
    [
        ("llama", 11, False),
        ("composite_two_workers", 7, False),
        *([("llama", 3, True), ("composite", 1, False), ("composite_two_workers", 6, True)] if FULL else []),
    ],
)
def test_a_short_soak_finds_nothing(target: str, seed: int, kills: bool, tmp_path: Path):
    verdict = soak_target(target, 90 if FULL else 9, seed, tmp_path, kills=kills)
    print(verdict)
    assert verdict.findings == []
    assert verdict.num_requests >= 30
    assert verdict.num_compared >= 10


def test_aborting_200_streams_returns_every_page_within_a_second(tmp_path: Path):
    """Case E1: sockets close before the first token, midway, and of requests that do not stream; some are deleted."""
    knobs = Knobs(24, 4, 3 * PAGE, 8, 2 * NUM_ABORTED, prefix_cache=True, reuse_generated=False, captures=True)
    served, _ = write_configs(target_of("llama"), knobs, tmp_path)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as sockets,
        running([str(served)], tmp_path / "log", MSTAR_SOCKET_DIR=sockets) as server,
    ):
        audit = Audit(server.url, server.pid, Path(sockets))
        asyncio.run(abort_all(server.url, audit))
        assert audit.findings == []
        assert server.stop() == 0


async def abort_all(url: str, audit: Audit) -> None:
    rng = random.Random(1)
    await asyncio.gather(*(leave_one(url, rng, index, wanted=2) for index in range(20)))
    await audit.take_baseline()
    for begin in range(0, NUM_ABORTED, 50):
        await asyncio.gather(*(leave_one(url, rng, index, rng.randint(1, 12)) for index in range(begin, begin + 50)))
        await audit.check_quiet(begin + 50)
    body = {"model": "soak", "prompt": [5, 6], "max_tokens": 4, "ignore_eos": True}
    reply = await Exchange(url).send("POST", "/v1/completions", body)
    assert reply.body["usage"]["completion_tokens"] == 4


async def leave_one(url: str, rng: random.Random, index: int, wanted: int) -> None:
    """A request of 60 to 180 tokens that is not heard to its end."""
    exchange, enough = Exchange(url), asyncio.Event()

    def count() -> None:
        if len(exchange.reply.events) >= wanted:
            enough.set()

    body = {"model": "soak", "prompt": [rng.randint(3, 139) for _ in range(rng.randint(1, 120))], "max_tokens": 60}
    body |= {"ignore_eos": True, "stream": index % 3 != 0}
    sending = asyncio.create_task(
        exchange.send("POST", "/v1/completions", body, request_id=f"leaves-{index}", on_event=count)
    )
    moment = asyncio.create_task(enough.wait())
    after_s = rng.choice((0.0, rng.uniform(0, 0.3))) if index % 3 != 1 else 10
    await asyncio.wait((sending, moment), timeout=after_s, return_when=asyncio.FIRST_COMPLETED)
    moment.cancel()
    if index % 5 == 0:
        await Exchange(url).send("DELETE", f"/v1/requests/leaves-{index}")
    else:
        exchange.leave(reset=index % 2 == 0)
        sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    if not sending.cancelled() and (error := sending.exception()) is not None and not isinstance(error, CutOffError):
        raise error


ASK = Ask("completions", {"prompt": [5, 6, 7, 8], "max_tokens": 2, "temperature": 0}, ((5, 6, 7, 8),))


def ended(ask: Ask = ASK, **body: object) -> Outcome:
    outcome = Outcome(ask, 1)
    read_reply(outcome, Reply(200, body=body), is_whole=True)
    return outcome


def answered(text: str = "t1 t2", reason: str = "length", usage: dict = SAID) -> Outcome:
    return ended(choices=[{"index": 0, "text": text, "finish_reason": reason}], usage=usage)


def wrong_in(outcome: Outcome, *, had_faults: bool = False, had_kills: bool = False, waiting_bound: int = 0) -> str:
    judge(outcome, had_faults=had_faults, had_kills=had_kills, waiting_bound=waiting_bound)
    return "; ".join(outcome.wrong)


def test_right_answers_are_right():
    assert wrong_in(answered()) == ""
    refused = Outcome(replace(ASK, refused=True), 1)
    error = {"code": "context_length_exceeded", "message": "too long"}
    read_reply(refused, Reply(400, body={"error": error}), is_whole=True)
    assert wrong_in(refused) == ""
    deleted = ended(replace(ASK, leave=Leave("delete", 0, 1)), error={"code": "request_aborted", "message": ""})
    assert wrong_in(deleted) == ""


@pytest.mark.parametrize(
    ("outcome", "complaint"),
    [
        (answered(reason="error"), "ended with"),
        (answered(usage=SAID | {"total_tokens": 7}), "does not add up"),
        (answered(usage=SAID | {"completion_tokens": 3, "total_tokens": 7}), "does not add up"),
        (answered(usage=SAID | {"prompt_tokens_details": {"cached_tokens": 4}}), "from the cache"),
        (ended(choices=[], usage=SAID), "have ended"),
        (ended(error={"code": "queue_full", "message": ""}), "queue_full"),
        (ended(error={"code": "worker_lost", "message": ""}), "worker_lost"),
        (ended(error={"code": "request_aborted", "message": ""}), "request_aborted"),
        (ended(error={"code": "request_failed", "message": "injected: forward"}), "injected"),
    ],
)
def test_wrong_answers_are_seen(outcome: Outcome, complaint: str):
    assert complaint in wrong_in(outcome)


def test_an_error_that_nobody_injected_is_seen():
    failed = {"code": "request_failed", "message": "the forward of LLM failed: IndexError"}
    assert "IndexError" in wrong_in(ended(error=failed), had_faults=True, had_kills=True, waiting_bound=9)


def compared(ours: str, alone: str, gap: float) -> list[str]:
    """What is wrong with a text, where the logits of its token 2 and of the right one lie `gap` apart."""
    logits = [0.0] * 10
    logits[3], logits[4] = 1.0, 1.0 - gap
    truth = Truth("", lambda prompt, output: logits)
    truth._known[ASK.key] = answered(alone)
    outcome = answered(ours)
    asyncio.run(truth.check(outcome))
    return outcome.wrong


def test_a_text_that_differs_is_seen_unless_its_tokens_are_as_good_as_equal():
    assert compared("t1 t3 t5", "t1 t3 t5", 0) == []
    assert compared("t1 t4 t5", "t1 t3 t5", 1e-5) == []
    assert "1.00e-02 apart" in compared("t1 t4 t5", "t1 t3 t5", 1e-2)[0]
    assert "alone" in compared("t1 t3", "t1 t3 t5", 0)[0]


def test_what_is_held_and_what_has_grown_is_seen():
    pages = {f'mstar_pages{{pool="kv",state="{state}"}}': 4.0 for state in ("free", "cached", "owned")}
    empty = dict.fromkeys(
        ("mstar_handles", "mstar_running_rows", "mstar_queue_depth", "mstar_tensors", "mstar_live_requests"), 0.0
    ) | {"mstar_waiting_choices": 0.0}
    assert held_things(empty | pages, {"kv": 12}) == {'mstar_pages{pool="kv",state="owned"}': 4.0}
    pages['mstar_pages{pool="kv",state="owned"}'] = 0
    assert held_things(empty | pages, {"kv": 8}) == {}
    assert held_things(empty | pages, {"kv": 12}) == {"kv": 8}
    assert held_things(empty | pages | {"mstar_tensors": 1}, {"kv": 8}) == {"mstar_tensors": 1}
    before = ProcessFacts({"front": 1}, {"front": {"socket": 3}}, {})
    assert differences(before, before) == []
    assert differences(before, ProcessFacts({"front": 1}, {"front": {"socket": 4}}, {})) == [
        "front has 4 of socket open, it had 3"
    ]


def test_idling_while_something_waits_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mstar-0-abcd").mkdir()
    now = 0.0
    monkeypatch.setattr("soak.audit.time.monotonic", lambda: now)
    audit = Audit("", 0, tmp_path)

    def after(steps: float, waiting: float) -> list[str]:
        nonlocal now
        now += 0.2
        audit._sample({'mstar_steps_total{kind="fresh"}': steps, "mstar_queue_depth": waiting})
        return audit.findings

    for index in range(20):
        assert after(index, waiting=1) == [], "steps advance"
    for _ in range(20):
        assert after(19, waiting=0) == [], "nothing waits"
    for _ in range(20):
        after(19, waiting=1)
    assert "mstar_queue_depth" in audit.findings[0]


def test_an_error_in_the_log_is_seen(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text(
        "12:00:00 I front: all is well\n12:00:00 W worker 0: kv holds 224 tokens, fewer than max_seq_len (256): so\n"
        "12:00:01 W worker 0: LLM: out of memory with 3 rows: injected\n"
        "12:00:02 E worker 0: 2 rows fail: slot 3\n  more\n12:00:03 E worker 0: worker 1 was killed by signal 9\n"
    )
    assert unexpected_records(log, had_kills=True) == ["12:00:02 E worker 0: 2 rows fail: slot 3\n  more"]
    assert len(unexpected_records(log, had_kills=False)) == 2
