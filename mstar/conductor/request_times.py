"""When a request did what: kept while it runs, and of the last ones that ended for a while. Front loop only.

Times are seconds of the conductor's clock. Nothing here is touched per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_RECENT = 1024
"""Requests that have ended and are still known."""


@dataclass(slots=True)
class ChoiceTimes:
    """One choice on the workers. `outcome`: how it ended, as `mstar_requests_total` counts it. `num_outputs`: tokens
    and tensors that were received of it."""

    rid: str
    started_at: float = 0.0
    first_at: float | None = None
    ended_at: float | None = None
    outcome: str = ""
    num_outputs: int = 0

    def end(self, now: float, outcome: str, num_outputs: int) -> None:
        self.ended_at, self.outcome, self.num_outputs = now, outcome, num_outputs


@dataclass(slots=True)
class RequestTimes:
    """One request. `choices`: those that were started; the prompts of a request are prepared before the first is.
    `failure`: the code of what ended all of it; empty while it runs and when it succeeded."""

    request_id: str
    submitted_at: float
    ended_at: float | None = None
    num_prompt_tokens: int = 0
    failure: str = ""
    choices: list[ChoiceTimes] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """For the log, of a request that has ended."""
        firsts = [choice.first_at for choice in self.choices if choice.first_at is not None]
        outcomes = [choice.outcome for choice in self.choices]
        facts: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "outputs": sum(choice.num_outputs for choice in self.choices),
            "outcome": self.failure or ",".join(dict.fromkeys(outcomes)),
            "choices": [choice.rid for choice in self.choices],
        }
        if firsts:
            facts["first_output_s"] = round(min(firsts) - self.submitted_at, 4)
        return facts
