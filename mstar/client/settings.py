"""What both clients are made with, and when an answer is worth asking again for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from mstar.client.errors import NoAnswerError, StatusError

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0
FIRST_WAIT_S = 0.5
"""Before the first repetition, where the server does not say when; doubled each time."""
JSON_TYPE = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Settings:
    """`timeout_s`: longest silence of the server. `max_retries`: how often a request is repeated that was refused with
    429 or 503 before anything of it was answered; what the server says of when is kept to, up to `longest_wait_s`."""

    url: str
    api_key: str | None
    timeout_s: float | None
    max_retries: int
    longest_wait_s: float

    def httpx_arguments(self) -> dict[str, Any]:
        """For an httpx client. Redirects are not followed, and proxies of the environment are not used."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {
            "base_url": self.url if "://" in self.url else f"http://{self.url}",
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
            "trust_env": False,
        }

    def wait_s(self, error: StatusError, num_tries: int) -> float | None:
        """Seconds until the request should be repeated, after `num_tries`; None: it should not."""
        if error.status not in (429, 503) or num_tries > self.max_retries:
            return None
        wait_s = FIRST_WAIT_S * 2 ** (num_tries - 1) if error.retry_after_s is None else error.retry_after_s
        return wait_s if wait_s <= self.longest_wait_s else None


def no_answer(error: httpx.HTTPError | httpx.InvalidURL, url: str) -> NoAnswerError:
    """What went wrong on the way, in words that name the server."""
    reason = str(error) or type(error).__name__
    hint = "; is a server running there? mstar serve starts one" if isinstance(error, httpx.ConnectError) else ""
    return NoAnswerError(f"no answer from {url}: {reason}{hint}")
