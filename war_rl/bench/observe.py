# SPDX-License-Identifier: Apache-2.0
"""The trainer's own observer around each run of the benchmark: what a training reads, adds up, shows and writes of a
rollout, a benchmarked one does as well, so that the price of it is in the figures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from war_rl.bench.driver import Replay
from war_rl.trainers.verl.episodes import count_progress
from war_rl.types import TrajectoryRecord

T = TypeVar("T")


class Players:
    """Stands where the observer expects the agent-loop workers: one of them, this process.

    Args:
        client: what the trajectories generate with; one with a feed counts what it sent.
        state: the run.
    """

    def __init__(self, client: Any, state: Replay) -> None:
        self._client = client
        self._state = state
        self._taken = 0

    def war_call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """One answer for each worker."""
        return [getattr(self, method)(*args)]

    def war_progress(self) -> dict[str, Any]:
        """As ``WarAgentLoopWorker.war_progress``."""
        return count_progress(list(self._state.records), list(self._state.running))

    def war_take_records(self, validate: bool) -> list[TrajectoryRecord]:
        """As ``WarAgentLoopWorker.war_take_records``; the run itself keeps its records."""
        records = [r for r in self._state.records[self._taken :] if r.trajectory.validate == validate]
        self._taken = len(self._state.records)
        return records

    def war_take_faults(self) -> dict[str, float]:
        """As ``WarAgentLoopWorker.war_take_faults``: nothing is recorded here."""
        return {}

    def war_client_counters(self) -> dict[str, float]:
        """As ``WarAgentLoopWorker.war_client_counters``."""
        publisher = getattr(self._client, "publisher", None)
        return {} if publisher is None else {**publisher.counters, **self._client.link.counters}


class SideObserver:
    """Watches the runs of one side, as its configuration says (``war.trace``, ``war.progress``).

    The observer waits for answers, so each of its calls runs in a thread, one at a time.

    Args:
        side: a :class:`war_rl.bench.engines.Side`.
        folder: where its trace goes, if it writes one.
        progress: the command's ``--progress``; progress that either of the two switches off is off.
    """

    def __init__(self, side: Any, folder: Path, progress: str) -> None:
        from war_rl.trace import TraceWriter
        from war_rl.trainers.verl.observer import RolloutObserver
        from war_rl.trainers.verl.settings import war_config

        war = war_config(side.config)
        mode = "off" if "off" in (progress, war.progress) else progress
        trace = TraceWriter(folder, war.trace, war.trace_mb << 20)
        self._side = side
        self._lock = threading.Lock()
        self._drafts = side.is_war and war.spec.drafts_on(0)
        self._observer = RolloutObserver(replace(war, progress=mode), side.servers, side.router, side.is_war, trace)

    async def begin(self, label: str, step: int, state: Replay) -> None:
        """A run begins."""
        self._observer.attach(Players(self._side.client, state))
        await self._call(lambda: self._observer.begin(label, state.total, False, step))

    async def poll(self) -> None:
        """To be called often while it goes on.

        Raises:
            ReplicaDead, RouterLost: as in training.
        """
        await self._call(self._observer.poll)

    async def end(self) -> tuple[dict[str, float], float | None]:
        """The run is over. Returns those of :data:`~war_rl.bench.stats.COUNTERS` that the observer knows, and what the
        side's drafts brought by its own account (None for a side that does not draft)."""
        metrics = await self._call(self._observer.end)
        return observer_counters(metrics), metrics["war/spec/estimated_speedup"] if self._drafts else None

    def abandon(self) -> None:
        """The run failed: end its progress line."""
        self._observer.abandon()

    async def _call(self, method: Callable[[], T]) -> T:
        def locked() -> T:
            # A cancelled look goes on in its thread.
            with self._lock:
                return method()

        return await asyncio.to_thread(locked)


def observer_counters(metrics: Mapping[str, float]) -> dict[str, float]:
    """What observing a run cost, from its metrics."""
    return {
        "observer_seconds": metrics["war/observe/seconds"],
        "trace_seconds": metrics["war/trace/seconds"],
        "traced_trajectories": metrics["war/trace/trajectories"],
    }
