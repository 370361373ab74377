"""A whole instance in one thread with the product's conductor in front of its workers: real ledger, walks and messages.

`Instance` has a front of its own that asks for whole walk plans; here the walks are what the conductor says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from support.conductor_rig import ManualTime
from support.instance import BuildNode, Instance, Tuning

from mstar.communication import host_tensors
from mstar.communication.address import peer_name
from mstar.communication.messages import OpenRequest, PeerUp, Ready, SamplingParams
from mstar.conductor.conductor import Conductor
from mstar.conductor.events import Failure, FinishedEvent, RequestStream, TensorEvent
from mstar.conductor.request import GenerateRequest, PromptInput
from mstar.conductor.request_table import RequestRecord
from mstar.conductor.walks import WalkDirectory
from mstar.conductor.workers import WorkerTable
from mstar.model.base import Model, PreparedPrompt


@dataclass
class Heard:
    """What a client has of one request. `values`: every number of every emitted tensor, by signal, in order."""

    stream: RequestStream
    values: dict[str, list[float]] = field(default_factory=dict)
    finish: str | None = None
    failure: Failure | None = None

    @property
    def done(self) -> bool:
        return self.finish is not None or self.failure is not None

    def take(self) -> None:
        for event in self.stream.take_now():
            match event:
                case TensorEvent(signal=signal, tensor=tensor):
                    self.values.setdefault(signal, []).extend(host_tensors.to_numpy(tensor).ravel().tolist())
                case FinishedEvent(reason=reason):
                    self.finish = reason
                case Failure():
                    self.failure = event
                case _:
                    pass


class ConductedInstance:
    """`tick` gives each worker one turn and the conductor one pass over its inbox."""

    def __init__(self, model: Model, build_node: BuildNode, placement: Mapping[str, int], tuning: Tuning) -> None:
        self.instance = Instance(model, build_node, placement, tuning)
        self.heard: dict[str, Heard] = {}
        time = ManualTime()
        self._walks = WalkDirectory(model, placement)
        self.conductor = Conductor(
            bus=self.instance.front,
            walks=self._walks,
            workers=WorkerTable(self._walks.all_ranks, watchdog_s=10, step_timeout_s=60),
            loop=time,  # type: ignore[arg-type]
            clock=time.clock,
        )
        for rank in self._walks.all_ranks:
            ready = Ready(rank=rank, incarnation=1, max_total_tokens=0)
            self.conductor.on_messages([PeerUp(rank, 1, peer_name(rank)), ready])

    def submit(self, rid: str, prompt: PreparedPrompt, max_tokens: int = 16) -> Heard:
        stream = RequestStream(GenerateRequest("", (PromptInput("native"),)), 0.0)
        self.conductor.num_waiting += 1
        partitions, limits = self._walks.plan(prompt, max_tokens)
        record = RequestRecord(
            rid=rid,
            stream=stream,
            choice=0,
            num_prompt_tokens=0,
            step_metadata=prompt.step_metadata,
            partitions=partitions,
            ranks=self._walks.ranks_of(partitions),
        )
        opening = OpenRequest(
            sampling=SamplingParams(max_tokens=max_tokens),
            inputs={name: host_tensors.from_numpy(array) for name, array in prompt.inputs.items()},
            limits=limits,
            media=prompt.media,
        )
        heard = self.heard[rid] = Heard(stream)
        self.conductor.start(record, opening)
        self.conductor.flush()
        return heard

    def tick(self) -> bool:
        """False: nobody had anything to do."""
        busy = False
        for worker, parts in zip(self.instance.workers, self.instance.parts, strict=True):
            if worker.tick_once():
                busy = True
            else:
                parts.outbox.rest()  # as its loop does before it blocks
        messages = self.instance.front.receive()
        self.conductor.on_messages(messages)
        for heard in self.heard.values():
            heard.take()
        return busy or bool(messages)

    def run(self, max_ticks: int = 5000) -> None:
        """Until every request has ended and is gone from the workers."""
        for _ in range(max_ticks):
            if not self.tick() and not self.instance.num_handles and all(heard.done for heard in self.heard.values()):
                return
        stuck = [rid for rid, heard in self.heard.items() if not heard.done]
        raise AssertionError(f"not done after {max_ticks} ticks: {stuck}; handles {self.instance.num_handles}")

    def close(self) -> None:
        self.conductor.close()
        self.instance.close()
