"""The supervisor: starts the processes of an instance, watches them, and is the one path by which all of them end.

Runs on the main thread of `mstar serve`. It blocks on one poller (its socket, the children's descriptors, a wake-up
for signals) and wakes by time only while something has a deadline. No torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mstar import envs
from mstar.communication import arena
from mstar.communication.address import FRONT_RANK, SUPERVISOR, InstanceDir, peer_name, reclaim_stale_dirs
from mstar.communication.bus import ZmqBus
from mstar.communication.messages import LoadProgress, MemoryPlan, PeerLost, PeerUp, Ready, Shutdown, ToSupervisor
from mstar.communication.wakeup import Wakeup
from mstar.communication.wire import decode_to_supervisor
from mstar.launch.children import Child, ChildSpec, PeerAddress, start_child
from mstar.launch.deployment import Deployment

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 30.0
STABLE_S = 60.0
"""A worker that served for this long starts again after the shortest delay when it dies."""
EXIT_GRACE_S = 10.0
"""How long children may take to end after they were told to."""


class StartError(RuntimeError):
    """The instance could not start; the message says which child ended and how."""


@dataclass(slots=True)
class _Post:
    """One child's place: the process that fills it, or when the next is due."""

    rank: int
    child: Child | None = None
    incarnation: int = -1
    ready: Ready | None = None
    ready_at: float = 0.0
    num_failures: int = 0
    due_at: float | None = None

    def plan_restart(self, now: float) -> float:
        """The process has ended: the next is due after the returned seconds, longer each time unless it had served for
        long. Loading does not count: a model that takes minutes to fail must not be loaded for ever."""
        is_stable = self.ready is not None and now - self.ready_at > STABLE_S
        self.num_failures = 1 if is_stable else self.num_failures + 1
        delay_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.num_failures - 1, 16))
        self.due_at = now + delay_s
        return delay_s


@dataclass(frozen=True, slots=True)
class Watchers:
    """What the caller wants to hear: what workers are going to allocate, and how their loads get on."""

    plan: Callable[[MemoryPlan], None] = field(default=lambda _: None)
    progress: Callable[[LoadProgress], None] = field(default=lambda _: None)


class Supervisor:
    """Owns the instance's directory and children. `listener` is bound before anything is loaded."""

    def __init__(self, deployment: Deployment, listener: socket.socket, watchers: Watchers | None = None) -> None:
        base = envs.SOCKET_DIR.get()
        reclaim_stale_dirs(base)
        arena.reclaim_stale()
        self._deployment = deployment
        self._listener = listener
        self._watchers = watchers if watchers is not None else Watchers()
        self._instance = InstanceDir.create(base)
        self._address = self._instance.address(SUPERVISOR, 0)
        self._bus: ZmqBus[ToSupervisor] = ZmqBus(self._address, decode_to_supervisor)
        self._signalled = Wakeup()
        self._num_signals = 0
        self._front = _Post(FRONT_RANK)
        self._workers = [_Post(rank) for rank in range(deployment.config.num_workers)]

    def start(self) -> None:
        """Start everything; returns when the server answers.

        Raises:
            StartError: a child ended. KeyboardInterrupt: a signal came. Everything is stopped in either case.
        """
        self._catch_signals()
        try:
            for post in self._posts():
                self._spawn(post)
            while any(post.ready is None for post in self._posts()):
                self._wait(None)
                self._receive()
                for post in self._posts():
                    if post.child is not None and post.child.exit_code() is not None:
                        raise StartError(f"the {post.child.name} process {post.child.how_it_ended()} during start-up")
                if self._num_signals:
                    raise KeyboardInterrupt
        except BaseException:
            self._kill_all()
            self._close()
            raise

    def run(self) -> int:
        """Watch until a signal asks for the end; returns the exit code."""
        try:
            while not self._num_signals:
                self._wait(self._next_due())
                self._receive()
                if self._front.child is not None and self._front.child.exit_code() is not None:
                    log.error("the front process %s; the server ends", self._front.child.how_it_ended())
                    return 1
                for post in self._workers:
                    self._look_after(post)
            return self._drain()
        finally:
            self._kill_all()
            self._close()

    def _posts(self) -> list[_Post]:
        return [self._front, *self._workers]

    def _spawn(self, post: _Post) -> None:
        post.incarnation += 1
        post.due_at = None
        post.ready = None
        is_front = post is self._front
        spec = ChildSpec(
            role="front" if is_front else "worker",
            instance=self._instance.instance,
            rank=post.rank,
            incarnation=post.incarnation,
            address=self._address_of(post),
            supervisor_address=self._address,
            parent_pid=os.getpid(),
            facts=self._deployment.facts,
            peers=self._peers_of(post),
            listen_fd=self._listener.fileno() if is_front else None,
            log_level=envs.LOG_LEVEL.get(),
            log_format=self._deployment.config.server.log_format,
        )
        post.child = start_child(spec)
        self._bus.connect(peer_name(post.rank), spec.address)
        self._tell_others(post, PeerUp(post.rank, post.incarnation, spec.address))

    def _peers_of(self, post: _Post) -> tuple[PeerAddress, ...]:
        """Processes that run, and for a worker also those that are started behind it: a message that tells of them
        might come after the first request."""
        others = [other for other in self._posts() if other is not post]
        running = [
            PeerAddress(other.rank, other.incarnation, self._address_of(other))
            for other in others
            if other.child is not None
        ]
        if post is self._front:
            return tuple(running)
        return *running, *(
            PeerAddress(other.rank, 0, self._instance.address(peer_name(other.rank), 0))
            for other in others
            if other.incarnation < 0
        )

    def _address_of(self, post: _Post) -> str:
        return self._instance.address(peer_name(post.rank), post.incarnation)

    def _tell_others(self, post: _Post, message: PeerUp | PeerLost) -> None:
        for other in self._posts():
            if other is not post and other.child is not None:
                self._bus.send(peer_name(other.rank), (message,))

    def _look_after(self, post: _Post) -> None:
        if post.child is not None and post.child.exit_code() is not None:
            delay_s = post.plan_restart(time.monotonic())
            self._lost(post, post.child, f"it is started again in {delay_s:.1f} s")
        if post.due_at is not None and time.monotonic() >= post.due_at:
            self._spawn(post)

    def _lost(self, post: _Post, child: Child, outlook: str) -> None:
        """Tell everybody that depends on the process, and clear up behind it."""
        detail = f"{child.name} {child.how_it_ended()}"
        post.child = None
        log.error("%s; %s", detail, outlook)
        self._bus.disconnect(peer_name(post.rank))
        self._tell_others(post, PeerLost(post.rank, post.incarnation, detail))
        arena.reclaim(self._instance.instance, post.rank, post.incarnation)
        child.close()

    def _next_due(self) -> float | None:
        due = [post.due_at for post in self._workers if post.due_at is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _receive(self) -> None:
        for message in self._bus.receive():
            if isinstance(message, LoadProgress):
                self._watchers.progress(message)
            elif isinstance(message, MemoryPlan):
                self._watchers.plan(message)
            elif isinstance(message, Ready):
                post = self._front if message.rank == FRONT_RANK else self._workers[message.rank]
                if message.incarnation == post.incarnation:
                    post.ready = message
                    post.ready_at = time.monotonic()

    def _drain(self) -> int:
        """First signal: the front refuses new requests and ends when the running ones have; then the workers end. A
        second signal ends everything now."""
        log.info("draining: new requests are refused, running ones may take %.0f s", self._drain_s())
        self._bus.send(peer_name(FRONT_RANK), (Shutdown(),))
        if not self._await_exit([self._front], self._drain_s() + EXIT_GRACE_S):
            return 1
        if self._front.child is not None and (code := self._front.child.exit_code()):
            log.error("the front process ended with %d while it drained", code)
            return 1
        for post in self._workers:
            self._bus.send(peer_name(post.rank), (Shutdown(),))
        return 0 if self._await_exit(self._workers, EXIT_GRACE_S) else 1

    def _drain_s(self) -> float:
        return self._deployment.config.server.drain_timeout_s

    def _await_exit(self, posts: list[_Post], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while alive := [post for post in posts if post.child is not None and post.child.exit_code() is None]:
            left_s = deadline - time.monotonic()
            names = ", ".join(peer_name(post.rank) for post in alive)
            if self._num_signals > 1:
                log.warning("a second signal asks for the end at once; killed: %s", names)
                return False
            if left_s <= 0:
                log.error("not ended in time; killed: %s", names)
                return False
            self._wait(left_s)
            self._receive()
            if self._front in posts:
                self._report_losses()
        return True

    def _report_losses(self) -> None:
        """While the front drains: what runs on a worker that has ended fails at once, and nothing new needs another."""
        for post in self._workers:
            if post.child is not None and post.child.exit_code() is not None:
                self._lost(post, post.child, "the server ends, so it is not started again")

    def _wait(self, timeout_s: float | None) -> None:
        children = [
            post.child.pidfd for post in self._posts() if post.child is not None and post.child.exit_code() is None
        ]
        self._bus.wait(timeout_s, (self._signalled.fileno(), *children))
        self._signalled.clear()

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._num_signals += 1
        self._signalled.set()

    def _kill_all(self) -> None:
        for post in self._posts():
            if post.child is not None:
                post.child.kill()
                post.child.close()
                post.child = None
        for post in self._workers:
            arena.reclaim(self._instance.instance, post.rank, max(post.incarnation, 0))

    def _close(self) -> None:
        self._bus.close()
        self._instance.close()
        self._listener.close()
