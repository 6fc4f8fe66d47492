# SPDX-License-Identifier: Apache-2.0
"""The real scheduler behind the simulated clients: the calls of :class:`war_rl.trainers.shell.SchedulerShell`, in the
same order, without asyncio. A test feeds both the same events and compares every decision."""

from __future__ import annotations

from collections.abc import Callable

from war_rl.config import SchedulerConfig
from war_rl.rollout.scheduler import GlobalScheduler, Placement, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult


class SimRouter:
    """Calls the scheduler on every event and hands out what may start.

    Args:
        config: ``war.scheduler``.
        seed: of the scheduler's ties.
        start: called for every placement, with the time.
        clock: real seconds, to measure what the scheduler itself takes; None measures nothing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        seed: int,
        start: Callable[[Placement, float], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.scheduler = GlobalScheduler(config, seed=seed)
        self.spent = 0.0
        """Real seconds inside the scheduler."""
        self.longest = 0.0
        """The longest event of all, in real seconds."""
        self.events = 0
        self._start = start
        self._clock = clock
        self._waiting: set[str] = set()

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return len(self._waiting)

    def add(self, info: ReplicaInfo, now: float) -> None:
        self._event(now, lambda: self.scheduler.add_replica(info, now))

    def submit(self, request: TurnRequest, now: float) -> None:
        self._waiting.add(request.key)
        self._event(now, lambda: self.scheduler.submit(request, now))

    def release(self, key: str, result: TurnResult | None, now: float) -> None:
        self._waiting.discard(key)
        self._event(now, lambda: self.scheduler.release(key, result, now))

    def finish(self, trajectory: TrajectoryId, now: float) -> None:
        self._event(now, lambda: self.scheduler.finish(trajectory, now))

    def weights_updated(self, step: int, now: float) -> None:
        self.scheduler.weights_updated(step, now)

    def wake(self, now: float) -> None:
        """The time that :meth:`next_wakeup` named has come."""
        self._event(now, lambda: None)

    def next_wakeup(self, now: float) -> float | None:
        return self.scheduler.next_wakeup(now) if self._waiting else None

    def _event(self, now: float, tell: Callable[[], None]) -> None:
        began = self._clock() if self._clock else 0.0
        tell()
        placements = self.scheduler.decide(now) if self._waiting else []
        for placement in placements:
            self._waiting.discard(placement.key)
            self.scheduler.reserve(placement, now)
        if self._clock:
            took = self._clock() - began
            self.spent += took
            self.longest = max(self.longest, took)
            self.events += 1
        for placement in placements:
            self._start(placement, now)
