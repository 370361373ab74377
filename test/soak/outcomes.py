"""What came of one request, read from its answer, and whether the answer is one that the request may have."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from soak.asks import Ask
from soak.exchange import Reply
from soak.triggers import MARK, Fault

OK, BAD, TOO_MANY, FAILED, LOST, TIMED_OUT, ABORTED = 200, 400, 429, 500, 503, 504, 499


@dataclass
class Outcome:
    """`ended`: how the client saw it end: `done`, `failed` (an error), `left` (the client went), or `broken`.
    `texts`, `reasons`: by choice. `error`: the server's."""

    ask: Ask
    number: int
    ended: str = "broken"
    status: int = 0
    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    reasons: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    took_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.ended == "done"

    def __str__(self) -> str:
        return f"request {self.number} ({self.ended}, {self.status}, {self.error}): {self.ask}"


def read_reply(outcome: Outcome, reply: Reply, *, is_whole: bool) -> None:
    """`is_whole`: the answer came to its end."""
    outcome.status = reply.status
    parts = reply.events or ([reply.body] if isinstance(reply.body, dict) else [])
    for part in parts:
        if "error" in part:
            outcome.error = part["error"]
        for choice in part.get("choices", ()):
            index = choice["index"]
            said = choice.get("text")
            if said is None:
                said = (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            outcome.texts[index] += said
            if choice.get("finish_reason") is not None:
                outcome.reasons[index].append(choice["finish_reason"])
        if part.get("usage"):
            outcome.usage = part["usage"]
    if not is_whole:
        return
    if outcome.error is not None:
        outcome.ended = "failed"
        if reply.is_done:
            outcome.wrong.append("an error event and [DONE]")
    elif reply.status == OK and (reply.is_done or not reply.events):
        outcome.ended = "done"
    else:
        outcome.wrong.append(f"an answer of status {reply.status} that has neither an end nor an error")


def judge(outcome: Outcome, *, had_faults: bool, had_kills: bool, waiting_bound: int) -> None:
    """Adds to `wrong` what this request's answer may not be. `had_faults`: requests with faults were on their way with
    it; `waiting_bound`: choices that were on their way when it was sent, with its own, less the queue."""
    ask, error = outcome.ask, outcome.error
    if outcome.is_done:
        _judge_done(outcome)
        return
    if outcome.ended == "left":
        return
    if error is None:
        if not had_kills:
            outcome.wrong.append("no answer and no error")
        return
    status, code = (outcome.status, error["code"]) if outcome.status != OK else (0, error["code"])
    message = error["message"]
    if ask.refused and code in ("context_length_exceeded", "request_too_large") and status == BAD:
        return
    if code == "queue_full" and status == TOO_MANY and waiting_bound > 0:
        return
    if code == "request_failed" and status in (0, FAILED) and had_faults and is_injected(message):
        return
    if code in ("worker_lost", "not_ready") and status in (0, LOST) and had_kills:
        return
    if code == "request_timeout" and status in (0, TIMED_OUT) and "timeout" in ask.fields:
        return
    if code == "request_aborted" and status in (0, ABORTED) and ask.leave is not None and ask.leave.how == "delete":
        return
    outcome.wrong.append(f"{status} {code}: {message}")


def is_injected(message: str) -> bool:
    return MARK in message or re.search(r"forward of \w+ r[ua]ns? out of memory", message) is not None


def _judge_done(outcome: Outcome) -> None:
    ask, usage = outcome.ask, outcome.usage
    if ask.refused:
        outcome.wrong.append("a request that cannot be served was answered")
    if set(outcome.reasons) != set(range(ask.num_choices)):
        outcome.wrong.append(f"choices {sorted(outcome.reasons)} of {ask.num_choices} have ended")
    for index, reasons in outcome.reasons.items():
        if len(reasons) != 1 or reasons[0] not in ("stop", "length"):
            outcome.wrong.append(f"choice {index} ended with {reasons}")
    if ask.fault is Fault.prepare:
        outcome.wrong.append("a request whose hook fails was answered")
    wants_usage = not ask.streams or bool(ask.fields.get("stream_options"))
    if (usage is not None) != wants_usage:
        outcome.wrong.append(f"usage is {usage}")
    if usage is not None:
        num_prompt, num_output = usage["prompt_tokens"], usage["completion_tokens"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        most = ask.fields["max_tokens"] * ask.num_choices
        if usage["total_tokens"] != num_prompt + num_output or not 0 <= num_output <= most:
            outcome.wrong.append(f"usage does not add up: {usage}, max_tokens for all choices {most}")
        if not 0 <= num_cached < max(1, num_prompt):
            outcome.wrong.append(f"{num_cached} of {num_prompt} prompt tokens are from the cache")
