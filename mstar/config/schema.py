"""The schema of a deployment file: every value that a deployment may choose, with its default and meaning.

Pure data, any process. `extra="forbid"` everywhere: a misspelt key is an error with a suggestion (`mstar.config.load`).
Resource keys and node names are checked against the model's declarations when the deployment is assembled.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are not changed afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ResourceTuning(Section):
    """Size of one resource, by its key. At most one of `num_pages` (of a cache) or `num_slots` (of recurrent states, of
    requests and snapshots together) and `memory_fraction`, of what the weights and everything with a size leave; none:
    a share of the rest, on a CPU the smaller of 4 GiB and a quarter of it, on an accelerator 0.8; half of that for
    states where there are any. `host_bytes`: memory of the
    host that a cache or states may be moved to when a request is preempted, beside their own; 0: none. `max_bytes`: of
    features of images and videos that are kept for later requests; 256 MiB without it. `dtype`: of what recurrent
    states keep in fp32 otherwise."""

    num_pages: Annotated[int, Field(ge=2)] | None = None
    num_slots: Annotated[int, Field(ge=2)] | None = None
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    host_bytes: Annotated[int, Field(ge=0)] = 0
    max_bytes: Annotated[int, Field(ge=0)] | None = None
    backend: str | None = None
    dtype: Literal["float32", "bfloat16"] | None = None

    @model_validator(mode="after")
    def _one_size(self) -> ResourceTuning:
        for name in ("num_pages", "num_slots"):
            if getattr(self, name) is not None and self.memory_fraction is not None:
                raise ValueError(f"give {name} or memory_fraction, not both")
        return self


class PrefixCacheConfig(Section):
    """`enabled`: full pages of prompts stay after their request, and later prompts that begin alike use them instead of
    computing them. `reuse_generated`: pages of generated tokens too. `snapshot_interval`: a model with recurrent states
    also keeps them every so many tokens of a prompt (0: only where prompts end and where they part)."""

    enabled: bool = True
    reuse_generated: bool = False
    snapshot_interval: Annotated[int, Field(ge=0)] = 0


class SchedulerConfig(Section):
    """`async_scheduling`: plan the next step while the device runs. `max_rows`: requests that run at once.
    `max_step_tokens`: tokens that one step may compute. `max_step_patches`: what one step of a media encoder may
    compute, patches times blocks. `max_queue`: requests that may wait for their turn."""

    async_scheduling: bool = True
    max_rows: Annotated[int, Field(ge=1, le=4096)] = 256
    max_step_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    max_step_patches: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    max_queue: Annotated[int, Field(ge=0)] = 1024


class CaptureConfig(Section):
    """Replay of captured steps over padded buffers. `batch_sizes: auto` lets the platform choose; a size above
    `scheduler.max_rows` stands for `max_rows`. Steps of more rows than the largest are not replayed."""

    enabled: bool = True
    batch_sizes: tuple[Annotated[int, Field(ge=1)], ...] | Literal["auto"] = "auto"


class MediaConfig(Section):
    """Media that requests name by URL. `allowed_hosts`: http(s) URLs are fetched from these only: `images.example.com`,
    `*.example.com`, `*` for any, each with `:PORT` where it is not the scheme's own. `max_bytes`: of all media of one
    request together. `max_pixels`: of these as they were sent: of images, of all frames of an animation as a video, and
    of the frames of another video that are read. `timeout_s`: for fetching them all. `allows_private_addresses`:
    hosts may have addresses that are not public."""

    allowed_hosts: tuple[str, ...] = ()
    max_bytes: Annotated[int, Field(ge=1, le=2**30)] = 64 * 1024 * 1024
    max_pixels: Annotated[int, Field(ge=1)] = 1 << 27
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    max_redirects: Annotated[int, Field(ge=0, le=20)] = 3
    allows_private_addresses: bool = False


class ServerConfig(Section):
    """The HTTP side. `api_keys`, with those of `api_keys_file` (one a line, `KEY admin` for one of `admin_keys`)
    and of the environment: none, no key is asked for. `admin_keys`: those that `/debug/` takes. Times are seconds.
    `preprocess_workers`: processes that render templates and tokenize. `served_names`: further names that `model`
    may have in a request. `log_format`: how all processes write their log."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    api_keys: tuple[str, ...] = ()
    api_keys_file: str | None = None
    admin_keys: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    watchdog_s: Annotated[float, Field(gt=0)] = 10.0
    step_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    max_body_bytes: Annotated[int, Field(ge=1024)] = 32 * 1024 * 1024
    preprocess_workers: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    log_format: Literal["text", "json"] = "text"
    cors_origins: tuple[str, ...] = ()
    media: MediaConfig = MediaConfig()


class NodeGroup(Section):
    """Nodes that live on one worker process, or with `tp_size` on as many, each with its share of every weight. Ranks
    count from 0 and leave no gap."""

    node_names: Annotated[tuple[str, ...], Field(min_length=1)]
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    tp_size: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _one_rank_per_share(self) -> NodeGroup:
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) != self.tp_size:
            raise ValueError(f"tp_size {self.tp_size} takes as many different ranks (found {list(self.ranks)})")
        return self


class DeploymentConfig(Section):
    """A whole deployment file."""

    model: str
    checkpoint: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_seq_len: Annotated[int, Field(ge=2)] | None = None
    num_threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    resources: dict[str, ResourceTuning] = {}
    prefix_cache: PrefixCacheConfig = PrefixCacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    capture: CaptureConfig = CaptureConfig()
    server: ServerConfig = ServerConfig()
    node_groups: tuple[NodeGroup, ...] = ()

    @model_validator(mode="after")
    def _ranks_without_gap(self) -> DeploymentConfig:
        ranks = sorted({rank for group in self.node_groups for rank in group.ranks})
        if ranks and ranks != list(range(len(ranks))):
            raise ValueError(f"node_groups: ranks {ranks} must count from 0 without a gap")
        return self

    def rank_of(self, node: str) -> int:
        """The rank that hosts `node`, the first of several; 0 when no group names it."""
        for group in self.node_groups:
            if node in group.node_names:
                return group.ranks[0]
        return 0

    @property
    def num_workers(self) -> int:
        return 1 + max((rank for group in self.node_groups for rank in group.ranks), default=0)
