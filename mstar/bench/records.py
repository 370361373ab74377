"""What the load generator keeps of one request. Times are `time.perf_counter` seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """`scheduled_s`: when the load said that the request should start; latencies count from there, so that a client or
    a server that falls behind does not hide it. `chunk_s`: arrival of every chunk that carried output.
    `prompt_tokens`, `cached_tokens` (of those, from its prefix cache) and `output_tokens` are the server's counts, None
    where it gave none. `error` None: it succeeded."""

    kind: str
    scheduled_s: float
    variant: str = ""
    sent_s: float = 0.0
    end_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0] - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.scheduled_s

    @property
    def num_output_tokens(self) -> int:
        """The server's count, else one per chunk."""
        return len(self.chunk_s) if self.output_tokens is None else self.output_tokens
