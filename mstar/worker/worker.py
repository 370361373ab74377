"""The worker's loop: nine stages, two variables.

One `Worker` per rank, on one thread. `cur` is the step on the device, `nxt` the one being built. The loop holds the
order of the stages; everything else belongs to the part named in the stage. `tick` overlaps planning with the device;
`tick_plain` is the same work without overlap: the specification that `tick` must equal in its outputs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from mstar.communication.bus import Bus
from mstar.engine.engine import Engine
from mstar.engine.execution import Step, StepState
from mstar.graph.protocol import Gate, GraphRuntime, Routed
from mstar.profile.phases import PhaseClock
from mstar.worker.admission import Admission
from mstar.worker.grammars.constrained_rows import ConstrainedRows
from mstar.worker.grammars.constraints import FAULTS_OF_GRAMMARS
from mstar.worker.heartbeat import StepAge
from mstar.worker.inbox import Inbox
from mstar.worker.micro_scheduler import MicroScheduler
from mstar.worker.outbox import Outbox
from mstar.worker.preemption import Preemption
from mstar.worker.step_counters import StepCounters
from mstar.worker.step_end import StepEnd
from mstar.worker.step_log import StepLog
from mstar.worker.teardown import Teardown
from mstar.worker.walks import WalkRunner


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker is made of, wired by the composition root; each part owns its state."""

    bus: Bus
    graph: GraphRuntime
    engine: Engine
    inbox: Inbox
    outbox: Outbox
    walks: WalkRunner
    scheduler: MicroScheduler
    step_end: StepEnd
    admission: Admission
    constrained: ConstrainedRows
    preemption: Preemption
    teardown: Teardown
    counters: StepCounters
    step_log: StepLog
    age: StepAge


class Worker:
    """See the module docstring. `overlap=False` runs the plain loop."""

    def __init__(self, parts: WorkerParts, *, overlap: bool, clock: PhaseClock) -> None:
        self._parts = parts
        self._overlap = overlap
        self._clock = clock
        self._cur: Step | None = None

    def run(self) -> None:
        """Until `Shutdown`. Blocks on the bus whenever there is neither a step nor a row to run."""
        age = self._parts.age
        while not self._parts.inbox.closing:
            age.tick_ns = time.monotonic_ns()
            if not self.tick_once() and not self._parts.inbox.closing:
                age.tick_ns = 0
                self._rest()
            self._parts.counters.refresh_if_due(self._parts.age)

    def tick_once(self) -> bool:
        """One tick of the loop that this worker runs. False: there was nothing to do. A step that was composed and
        cannot run counts: other rows may."""
        return self.tick() if self._overlap else self.tick_plain()

    def tick_plain(self) -> bool:
        """Schedule, run, finish: one step from composition to routing. False: nothing to do."""
        mark = self._clock.mark
        self._clock.begin()
        self.teardown()
        mark("teardown")
        self.intake()
        mark("intake")
        composed = self.compose(None)
        mark("compose")
        step = self.preplan(composed, None)
        mark("preplan")
        if step is not None:
            self.submit(step, None)
            self.draw(step)
            mark("submit")
            self.await_gpu(step, None)
            mark("await_gpu")
            self.event_sync(step, None)
            mark("event_sync")
            self.check_stop(step)
            mark("check_stop")
            self.route(step, None)
            mark("route")
        self._clock.end(step is not None)
        return composed is not None

    def tick(self) -> bool:
        """Build the step after `cur` while the device runs `cur`, submit it, then finish `cur`."""
        mark = self._clock.mark
        cur = self._cur
        self._clock.begin()
        self.teardown()
        mark("teardown")
        self.intake()
        mark("intake")
        composed = self.compose(cur)
        mark("compose")
        nxt = self.preplan(composed, cur)
        mark("preplan")
        if cur is not None:
            nxt = self.await_gpu(cur, nxt)
            mark("await_gpu")
        ended = cur is not None and cur.state is StepState.DONE
        if cur is not None and ended:
            self.event_sync(cur, None)
            mark("event_sync")
            self.check_stop(cur)
            nxt = self.drop_unwanted(nxt)
            mark("check_stop")
        if nxt is not None:
            self.submit(nxt, cur)
            mark("submit")
        if cur is not None and not ended:
            self.event_sync(cur, nxt)
            mark("event_sync")
            self.check_stop(cur)
            mark("check_stop")
        if nxt is not None and nxt.draws_later:
            self.draw(nxt)
            mark("check_stop")
        if cur is not None:
            self.route(cur, nxt)
            mark("route")
        self._cur = nxt
        self._clock.end(cur is not None)
        return cur is not None or composed is not None

    def teardown(self) -> None:
        """Removals of rows that no step holds any more, and victims whose step has ended: who waits gets their room,
        senior first."""
        parts = self._parts
        preemption = parts.preemption
        freed = parts.teardown.run()
        if preemption.waiting:
            freed = preemption.take_marked() or freed
        if freed:
            parts.inbox.enter()
        if preemption.waiting and preemption.readmit(parts.admission.first):
            parts.inbox.enter()
        if preemption.waiting or parts.admission.first is not None:
            self._unblock()

    def _unblock(self) -> None:
        """Somebody waits: it is not for others that rest."""
        parts = self._parts
        while True:
            idle = self._cur is None and not parts.graph.ready_keys()
            failed = parts.preemption.unblock(parts.admission.first, idle=idle)
            if failed is None:
                return
            self._fail_rows(failed)
            if not parts.graph.ready_keys():  # else whoever comes in might take from the one that goes on now
                parts.inbox.enter()

    def intake(self) -> None:
        """Messages since the last tick."""
        messages = self._parts.bus.receive()
        if messages:
            self._parts.inbox.apply(messages)
            self._parts.outbox.flush_cold()
        if self._parts.constrained.has_news:
            self._parts.inbox.take_grammars()

    def compose(self, cur: Step | None) -> Step | None:
        """Rows that go on from `cur`, with fresh rows of the same node, or another node's turn."""
        while True:
            step, failed = self._parts.scheduler.compose(cur)
            if failed:
                self._fail_rows(failed)
            if step is not None:
                self._parts.teardown.hold(step.handles)
            if step is not None or not failed:
                return step

    def preplan(self, step: Step | None, cur: Step | None) -> Step | None:
        """Reserve, plan and advance. Where rows ran short, others give way or some are held, and what is left is
        composed and admitted again, as often as it takes: each time there are fewer rows that can be taken."""
        while step is not None:
            if step.failed:
                self._undo(step)
                return None
            outcome = self._parts.engine.admit(step)
            if outcome.ok:
                break
            self._undo(step)
            self._parts.preemption.refused(outcome, busy=cur is not None)
            step = self.compose(cur)
        if step is None:
            return None
        self._parts.engine.plan(step)
        if step.failed:
            self._fail_rows(step.failed)
            self._undo(step)
            return None
        return step

    def await_gpu(self, cur: Step, nxt: Step | None) -> Step | None:
        """The host part of `cur` has returned; where the device has ended with it, its rows are known. If a row of
        `nxt` goes on from one that failed, `nxt` is abandoned whole: there is no partial reconcile."""
        event = cur.event
        assert event is not None
        event.wait_launched()
        if event.done():
            self._parts.engine.finish(cur)
        if nxt is not None and cur.failed and not cur.failed.keys().isdisjoint(nxt.handles.tolist()):
            self.abandon(nxt)
            return None
        return nxt

    def submit(self, step: Step, before: Step | None) -> None:
        """Hand the step to the device; its transaction closes. Where a row has a grammar, the draw waits until the
        tokens before it are known."""
        step.submitted_ns = time.monotonic_ns()
        if before is None or before.state is StepState.DONE:
            self._parts.age.since_ns = step.submitted_ns
            self._parts.age.step = step
        step.draws_later = self._parts.constrained.draws(step)
        self._parts.engine.submit(step, draw_later=step.draws_later)
        self._parts.counters.submitted(step, before)

    def draw(self, step: Step) -> None:
        """The second half of a step whose draw has waited: no step before it is on the device any more."""
        if step.draws_later:
            self._parts.engine.draw(step, self._parts.constrained.allowed(step))

    def event_sync(self, cur: Step, behind: Step | None) -> None:
        """`cur` has ended on the device: its host rows are readable. `behind` was submitted meanwhile: the device is in
        that one now."""
        event = cur.event
        assert event is not None
        event.wait()
        if cur.state is StepState.SUBMITTED:
            self._parts.engine.finish(cur)
        self._parts.scheduler.ended(cur)
        self._parts.age.since_ns = 0 if behind is None else time.monotonic_ns()
        self._parts.age.step = behind

    def check_stop(self, cur: Step) -> None:
        """Which loops end with `cur`."""
        self._parts.step_end.decide(cur)

    def drop_unwanted(self, nxt: Step | None) -> Step | None:
        """`nxt` is not worth a forward when every row in it has just stopped."""
        if nxt is not None and self._parts.step_end.stops_all(nxt):
            self.abandon(nxt)
            return None
        return nxt

    def route(self, cur: Step, nxt: Step | None) -> None:
        """Complete in the graph, publish, settle what was speculated on top, and send one message per destination."""
        parts = self._parts
        routed = Routed()
        handles = cur.handles
        removed = parts.teardown.removing(handles)
        gone = cur.dropped.union(cur.failed, removed)
        ended = parts.step_end.end_loops(cur, gone)
        carried = [] if nxt is None else [nxt.parts[index].taken.rows for index in nxt.carried]
        for part in cur.parts:
            parts.step_end.complete(cur, part, gone, carried, routed)
        keep = np.fromiter((row not in gone for row in handles.tolist()), np.bool_, len(handles)) if gone else None
        parts.engine.publish(cur, keep)
        if nxt is not None:
            for spec_id, part in zip(nxt.spec_ids, nxt.parts, strict=False):
                kept = part.taken.rows
                if ended or gone:  # a row whose outer loop was stopped may go on in the inner one
                    kept = [row for row in parts.graph.spec_going(spec_id) if row not in gone]
                    nxt.dropped.update(set(part.taken.rows).difference(kept))
                parts.graph.spec_settle(spec_id, kept)
            if gone:
                nxt.dropped.update(row for rows in carried for row in rows if row in gone)
        if cur.failed:
            self._fail_rows({row: why for row, why in cur.failed.items() if row not in cur.dropped})
        parts.outbox.count(routed)
        parts.walks.follow(routed)
        parts.outbox.flush(cur, routed)
        parts.step_log.ended(cur)
        parts.teardown.step_ended(handles)

    def abandon(self, nxt: Step) -> None:
        """Undo an armed step exactly once: rows and stream chunks go back to the front of their queues."""
        self._parts.engine.abandon(nxt)
        self._parts.counters.abandoned()
        self._undo(nxt)

    def _undo(self, step: Step) -> None:
        self._parts.scheduler.put_back(step)
        self._parts.teardown.step_ended(step.handles)

    def _fail_rows(self, failed: dict[int, str]) -> None:
        for handle, why in failed.items():
            self._parts.graph.gate([handle], Gate.FAILED, True)
            self._parts.outbox.fail_handle(handle, why, 400 if why in FAULTS_OF_GRAMMARS else 500)
        self._parts.outbox.flush_cold()

    def close(self) -> None:
        """The step on the device ends before its memory goes."""
        if self._cur is not None and self._cur.event is not None:
            self._cur.event.wait()
        self._parts.engine.close_executor()
        self._parts.constrained.close()
        self._parts.outbox.close()

    def _rest(self) -> None:
        """Nothing to run: publish the gauges and block until a message comes. What asked to leave in this tick goes in
        the next one's teardown, so that is not slept over."""
        if self._parts.inbox.leaving:
            return
        self._parts.counters.refresh(self._parts.age)
        self._parts.outbox.rest()
        self._parts.bus.wait(self._parts.preemption.patience_s, self._parts.constrained.wakeups)
