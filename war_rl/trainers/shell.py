# SPDX-License-Identifier: Apache-2.0
"""What every router shares: the asynchronous shell around the pure :class:`GlobalScheduler`.

It knows no transport: Ray actors and HTTP servers call it alike. Events go in, the scheduler decides, waiters wake. All
calls happen on one asyncio loop, so no state needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

decisions = logging.getLogger("war_rl.decisions")
"""Every decision with its reason and the costs compared, and why a turn is held; at DEBUG."""

MIN_WAKEUP_S = 0.001
"""Shortest sleep before the scheduler is asked again, so that a wakeup in the past cannot spin the loop."""


class NoReplicaError(RuntimeError):
    """There is no replica left that could run the turn."""


class LeaseExpired(RuntimeError):
    """The turn's client has not been heard of for ``war.scheduler.lease_s``; a client that lives asks again."""


class SchedulerShell:
    """Holds the futures of waiting turns and calls the scheduler on every event.

    Args:
        scheduler: decides; nobody else may send it events.
        clock: seconds on a clock that never goes back.
    """

    def __init__(self, scheduler: GlobalScheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._replicas: dict[str, ReplicaInfo] = {}
        self._waiting: dict[str, asyncio.Future[tuple[str, str]]] = {}
        self._turns: set[str] = set()
        self._homes: dict[str, str] = {}
        self._at: float | None = None
        self._asked: list[str] = []
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_at = 0.0
        self._next_expiry = 0.0

    @contextmanager
    def together(self) -> Iterator[float]:
        """All events inside happen at one time, which is given, and are decided upon together when it is over.

        Nothing may be awaited inside.
        """
        if self._at is not None:
            yield self._at
            return
        now = self._at = self.clock()
        try:
            yield now
        finally:
            self._at = None
            self._decide(now)

    # ------------------------------------------------------------------ turns

    async def acquire(self, request: TurnRequest, client: str = "") -> tuple[str, str]:
        """Wait until the turn may start. Returns (replica id, the scheduler's reason).

        A caller that is cancelled while it waits has nothing to release. ``client`` names who will release the turn;
        see :meth:`release_client`.

        Raises:
            NoReplicaError: there is no replica, or the last one was lost while the turn waited.
            ValueError: a turn with this key waits or runs already.
            LeaseExpired: the client was taken for dead while the turn waited.
            Exception: what :meth:`turn_away` was given.
        """
        future = self.submit(request, client)
        try:
            return await future
        except BaseException:
            self.release(request.key, None)
            raise

    def submit(self, request: TurnRequest, client: str = "") -> asyncio.Future[tuple[str, str]]:
        """As :meth:`acquire`, for callers that do not wait on the spot: what it would return or raise, in time.

        The caller must :meth:`release` the turn whatever comes of it.

        Raises:
            NoReplicaError: there is no replica.
            ValueError: a turn with this key waits or runs already.
        """
        if not self._replicas:
            raise NoReplicaError("No available servers in load balancer")
        with self.together() as now:
            self.scheduler.submit(request, now, client)
            future: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
            self._waiting[request.key] = future
            self._turns.add(request.key)
            self._asked.append(request.key)
        return future

    def turn_away(self, error: Exception) -> int:
        """Fail every waiting turn with ``error``. Returns how many there were."""
        waiting = [f for f in self._waiting.values() if not f.done()]
        for future in waiting:
            future.set_exception(error)
        return len(waiting)

    def release(self, key: str, result: TurnResult | None) -> None:
        """The turn is over; None when it was cancelled. An unknown key and a second release are ignored."""
        if key not in self._turns:
            return
        with self.together() as now:
            self._turns.discard(key)
            self._homes.pop(key, None)
            waiter = self._waiting.pop(key, None)
            if waiter is not None and not waiter.done():
                waiter.cancel()
            self.scheduler.release(key, result, now)

    def home(self, key: str) -> str | None:
        """The replica on which the turn runs; None while it waits and after it is over."""
        return self._homes.get(key)

    # ------------------------------------------------------------------ clients

    def renew(self, client: str) -> None:
        """The client is alive."""
        self.scheduler.renew(client, self.clock())

    def release_client(self, client: str) -> list[str]:
        """The client is gone: its turns and trajectories end. Returns the keys of the turns."""
        with self.together() as now:
            keys = self.scheduler.release_client(client, now)
            self._forget(keys)
        return keys

    # ------------------------------------------------------------------ trajectories and steps

    def finish(self, trajectory: TrajectoryId) -> None:
        """No further turn of this trajectory will come."""
        with self.together() as now:
            self.scheduler.finish(trajectory, now)

    def weights_updated(self, step: int) -> None:
        """All replicas hold the weights of ``step``; what they had cached is gone."""
        self.scheduler.weights_updated(step, self.clock())

    # ------------------------------------------------------------------ replicas

    def add(self, info: ReplicaInfo) -> None:
        """A replica takes turns from now on; for a known id, its new description."""
        self._replicas[info.id] = info
        with self.together() as now:
            self.scheduler.add_replica(info, now)

    def lose(self, replica_id: str, reason: str) -> list[str]:
        """A replica is gone. Returns the keys of the turns that ran there: forgotten, to be acquired again.

        Losing the last replica fails every waiting turn with :class:`NoReplicaError`.
        """
        with self.together() as now:
            self._replicas.pop(replica_id, None)
            lost = self.scheduler.remove_replica(replica_id, now, reason=reason)
            self._forget(lost)
            if not self._replicas:
                self.turn_away(NoReplicaError(f"the last replica is lost: {reason or replica_id}"))
        return lost

    def drain(self, replica_id: str) -> None:
        """No turn starts there until :meth:`add` is called again; what runs goes on, what waits goes elsewhere."""
        with self.together() as now:
            self.scheduler.drain_replica(replica_id, now)

    @property
    def replicas(self) -> dict[str, ReplicaInfo]:
        """Replicas that are there, by id."""
        return dict(self._replicas)

    # ------------------------------------------------------------------ what people look at

    @property
    def inflight(self) -> int:
        """Turns that wait or run."""
        return len(self._turns)

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return len(self._waiting)

    def seconds_left(self, validate: bool, to_come: int) -> float | None:
        """See :meth:`GlobalScheduler.seconds_left`."""
        return self.scheduler.seconds_left(validate, to_come, self.clock())

    def running(self) -> dict[str, int]:
        """Running turns by replica."""
        counts = dict.fromkeys(self._replicas, 0)
        for home in self._homes.values():
            if home in counts:
                counts[home] += 1
        return counts

    # ------------------------------------------------------------------ inside

    def _forget(self, keys: Iterable[str]) -> None:
        """The scheduler knows these turns no more: their clients' late release must find nothing."""
        for key in keys:
            self._turns.discard(key)
            self._homes.pop(key, None)
            waiter = self._waiting.pop(key, None)
            if waiter is not None and not waiter.done():
                waiter.set_exception(LeaseExpired(f"turn {key}: its client was taken for dead"))

    def _expire(self, now: float) -> None:
        """Let go of what silent clients hold, looked at a few times per lease."""
        lease = self.scheduler.config.lease_s
        if lease > 0 and now >= self._next_expiry:
            self._next_expiry = now + 0.25 * lease
            self._forget(self.scheduler.expire(now))

    def _decide(self, now: float) -> None:
        self._expire(now)
        asked, self._asked = self._asked, []
        explain = decisions.isEnabledFor(logging.DEBUG)
        for placement in self.scheduler.decide(now):
            future = self._waiting.get(placement.key)
            if future is None or future.done():
                # Its caller is being cancelled and will release it.
                continue
            del self._waiting[placement.key]
            self.scheduler.reserve(placement, now)
            self._homes[placement.key] = placement.replica_id
            future.set_result((placement.replica_id, placement.reason))
            if explain:
                costs = ", ".join(f"{name} {cost:.3f}" for name, cost in placement.costs.items())
                decisions.debug(
                    "%s -> %s: %s [%s]", placement.key, placement.replica_id, placement.reason, costs or "not compared"
                )
        if explain:
            for key in asked:
                if key in self._waiting:
                    decisions.debug("%s held: %s", key, self.scheduler.why_waiting(key, now))
        self._wake_at(self.scheduler.next_wakeup(now), now)

    def _wake_at(self, at: float | None, now: float) -> None:
        if self._wakeup is not None:
            if at is not None and now < self._wakeup_at <= at:
                # An earlier look does no harm, and a timer for every event would.
                return
            self._wakeup.cancel()
            self._wakeup = None
        if at is not None:
            delay = max(MIN_WAKEUP_S, at - now)
            self._wakeup, self._wakeup_at = asyncio.get_running_loop().call_later(delay, self._wake), now + delay

    def _wake(self) -> None:
        self._wakeup = None
        self._decide(self.clock())
