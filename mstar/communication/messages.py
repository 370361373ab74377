"""Every message that crosses a process border: tagged structs, columns rather than rows.

Pure declarations. `mstar.communication.wire` builds the codecs and refuses an untyped field at import. Requests are
named by their id (a string): handles never leave a process. Slots, streams and signals are indices into the tables of
`mstar.graph.compile.CompiledGraph`, which every process builds from the same declarations.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "error"]


class HostTensor(msgspec.Struct, array_like=True, frozen=True):
    """A small host tensor that rides in a message: C-contiguous little-endian bytes; dtype by numpy name ("bfloat16" as
    uint16 words)."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the text must look like, from its first token to its last."""

    format: str
    """JSON of a format of xgrammar's structural tags: a schema, a regular expression, alternatives, ... or parts."""
    behind: str = ""
    """It holds for what follows the first occurrence of this text and line breaks; empty: for all."""
    field: str = ""
    """The request's field that asks for it, for errors."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, validated at intake. `top_k=0` means no limit; `temperature=0` means greedy.

    `seed` is always set (the front draws one when the client gave none). `bias_ids` and `bias_values` are parallel.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    num_logprobs: int = -1
    """-1: none; 0: the sampled token's own; n: also the n most likely."""
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    """End tokens of the model and of the request (the model's own are left out under ignore_eos)."""
    grammar: Grammar | None = None
    """Only tokens that it allows are drawn. Its end ends the text, whatever `min_tokens` says."""


class MediaSpan(msgspec.Struct, array_like=True, frozen=True):
    """Prompt tokens `start : start + length` stand for media: `digest` names its bytes and how they were prepared.
    `grid`: time, height and width of what the tokens stand for, in tokens; their product is `length`. (0, 0, 0): a
    sequence like text."""

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int, int] = (0, 0, 0)


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know of a request before its first walk."""

    sampling: SamplingParams
    prompt_ids: HostTensor | None = None
    """int32 [num_prompt_tokens]"""
    inputs: dict[str, HostTensor] = {}
    """Persisted signals bound at open (media features, noise, ...), by signal name."""
    limits: dict[str, int] = {}
    """Loop limits by `LoopLimit` name."""
    ranks: tuple[int, ...] | None = None
    """Workers on which the request is open, where nothing of it is sent to others; None: all of its partitions'."""
    parameters: bytes = b"{}"
    """The model's own request parameters, JSON of its `parameter_schema`."""
    media: tuple[MediaSpan, ...] = ()
    """What stands behind placeholder tokens, in order: equal ids with other media are another prefix."""
    cache_salt: str = ""
    """Prompts with different salts share no cached prefix."""
    priority: int = 0
    """Lower goes first."""
    arrival: int = 0
    """Number of the request at the front: among equals the older goes first, on all workers alike."""


class Open(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Front → worker, for a request that spans several workers: promise room and answer `Opened`.

    The front opens a request on its workers one after the other, in rank order, and starts walks when all have
    answered: no edge can then reach a worker that does not know the request, and two requests cannot wait for each
    other's room.
    """

    rid: str
    open: OpenRequest


class Opened(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → front: the request has its room here."""

    rid: str
    rank: int


class StartWalk(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Front → worker. Carries `open` when the request lives on this worker alone. `walks` are run one after the other
    by the worker alone; `last` says that the partition has no further walk after them. An empty `walks` starts a
    stream-fed partition, or ends one that has walked. `limits`: loop limits of this partition by `LoopLimit` name, on
    top of those that the request was opened with."""

    rid: str
    partition: str
    walks: tuple[str, ...]
    last: bool
    limits: dict[str, int] = {}
    open: OpenRequest | None = None


class WalkDone(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → front: this worker's part of the partition's walks has ended. `emits` counts what was emitted per signal
    over the request's life on this worker, so that the front knows when it has everything.
    `num_computed_prompt_tokens` is 0 from a worker without a cache: others know what was reused."""

    rid: str
    partition: str
    rank: int
    reason: FinishReason
    emits: dict[str, int]
    num_computed_prompt_tokens: int = 0


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Front → worker: a stop string was found; end the loops of this partition now."""

    rid: str
    partition: str


class Unpersist(msgspec.Struct, tag=True, frozen=True):
    """Front → worker: a persisted signal is not needed any more."""

    rid: str
    partition: str
    name: str


class Remove(msgspec.Struct, tag=True, frozen=True):
    """Front → worker: forget the request (finished, aborted, failed or timed out) and free all that it holds."""

    rid: str


class Fail(msgspec.Struct, tag=True, frozen=True):
    """Worker → front: this request failed. `code` is the HTTP status that fits (400, 500, 503); `field`: the request's
    field at fault, if there is one."""

    rid: str
    message: str
    code: int = 500
    field: str = ""


class AskSteps(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Front → worker: report the steps that ended after `since_ns` of the host's monotonic clock. `ask` comes back."""

    ask: int
    since_ns: int


class StepReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → front: its last steps, oldest first. Part i ran `walks[i]` of step `part_steps[i]` with the next
    `part_rows[i]` of `rows`, indices into `rids`, and `part_tokens[i]` tokens. Times are nanoseconds of the host's
    monotonic clock; a step begins when its forward is handed to the device and ends when the host knows that it has."""

    ask: int
    rank: int
    nodes: list[str]
    composed_ns: list[int]
    submitted_ns: list[int]
    began_ns: list[int]
    ended_ns: list[int]
    part_steps: list[int]
    walks: list[str]
    part_rows: list[int]
    part_tokens: list[int]
    rows: list[int]
    rids: list[str]


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """Supervisor or front → worker: end the loop and exit 0."""


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First message of a worker to the front and to each peer. A schema or version mismatch refuses the peer."""

    rank: int
    incarnation: int
    version: str
    schema_hash: str
    pid: int


class PlanRow(msgspec.Struct, frozen=True, array_like=True):
    """One line of the memory plan table."""

    name: str
    detail: str
    num_bytes: int


class MemoryPlan(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → supervisor, before it allocates: what it is going to take."""

    rank: int
    rows: tuple[PlanRow, ...]


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → front: loaded, warmed up, serving. `max_total_tokens`: the most one request can ever hold (its KV)."""

    rank: int
    incarnation: int
    max_total_tokens: int


class LoadProgress(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → supervisor during start-up: one progress bar's state."""

    rank: int
    label: str
    done: int
    total: int


class Heartbeat(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker's heartbeat thread → front. `step_age_s` is 0 between steps. `gauges` are (name with labels, value)
    in Prometheus text form, e.g. `mstar_pages{pool="kv",state="free"}`."""

    rank: int
    incarnation: int
    step_age_s: float
    gauges: dict[str, float]


class PeerUp(msgspec.Struct, tag=True, frozen=True):
    """Supervisor → everyone: the process of `rank` (-1: the front) listens at `address` in this incarnation."""

    rank: int
    incarnation: int
    address: str


class PeerLost(msgspec.Struct, tag=True, frozen=True):
    """Supervisor → everyone: the process of `rank` is gone; fail what depends on it, free what it was to read."""

    rank: int
    incarnation: int
    detail: str


class TensorColumns(msgspec.Struct, frozen=True):
    """The tensors of one frame, in one piece of the sender's arena.

    Run i is `counts[i]` tensors of `dtypes[i]` and `shapes[i]`, one after the other; runs follow each other, each
    beginning at the next multiple of `mstar.communication.arena.ALIGNMENT` bytes. An empty dtype marks a run of absent
    values (`NO_TENSOR`), which take no bytes. The ticket comes back in an `AckFrame` once everything is copied out;
    without bytes the arena is empty and the ticket 0.
    """

    arena: str
    """Name of the shared-memory file."""
    ticket: int
    offset: int
    """Bytes from the file's beginning to the first run."""
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    counts: list[int]


class EdgeFrame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → worker. Value i belongs to slot `slots[i]` of request `rids[i]`; it consists of the next `counts[i]`
    tensors."""

    src: int
    rids: list[str]
    slots: list[int]
    counts: list[int]
    tensors: TensorColumns


class StreamFrame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → worker: items of streaming edges, in order, and the totals of streams that have ended."""

    src: int
    rids: list[str]
    edges: list[int]
    tags: list[int]
    tensors: TensorColumns
    end_rids: list[str]
    end_edges: list[int]
    end_totals: list[int]


class AckFrame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → worker: tensors copied out, and stream items consumed (credit)."""

    src: int
    tickets: list[int]
    credit_rids: list[str]
    credit_edges: list[int]
    credit_counts: list[int]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-softmax of the raw logits: the sampled token's, then the `num_logprobs` most likely. Finite numbers only: one
    of the encodings is JSON, which has no infinity."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class EmitFrame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Worker → front, one per step: emitted tokens inline (row i: `tokens[i]` of signal `signals[i]`), and tensors."""

    src: int
    rids: list[str]
    signals: list[str]
    """One entry when all rows share it."""
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    tensor_rids: list[str] = []
    tensor_signals: list[str] = []
    tensors: list[HostTensor] = []


ToWorker = (
    Open
    | StartWalk
    | Stop
    | Unpersist
    | Remove
    | AskSteps
    | Shutdown
    | PeerUp
    | PeerLost
    | Hello
    | EdgeFrame
    | StreamFrame
    | AckFrame
)
ToFront = Opened | Hello | Ready | Heartbeat | EmitFrame | WalkDone | Fail | StepReport | PeerUp | PeerLost | Shutdown
ToSupervisor = Hello | MemoryPlan | Ready | LoadProgress
Message = ToWorker | ToFront | ToSupervisor
