# SPDX-License-Identifier: Apache-2.0
"""Are the agent-loop workers alive, and how far are they? A dead one's trajectories would be waited for without end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

_PATIENCE_S = 0.05
"""How long a look waits for answers; the trainer must not be held up by workers that are busy."""


class WorkerLost(RuntimeError):
    """An agent-loop worker is gone, or answers no more. Its trajectories will never come in: the run must stop."""


class WorkerSilent(WorkerLost):
    """A worker has not answered for too long: an agent loop blocks its event loop."""

    def __init__(self, which: str, limit_s: float) -> None:
        super().__init__(
            f"{which} has not answered for {limit_s:g} s (war.fault.worker_timeout_s): an agent loop blocks its event "
            "loop; the worker's log shows where"
        )


def lost(which: str, error: Exception) -> WorkerLost:
    """The loss of a worker, in one line."""
    return WorkerLost(f"{which} is gone, and with it its trajectories: {' '.join(str(error).split())}")


class WorkerWatch:
    """Asks every worker for its progress, one question at a time, and hardly waits for the answers.

    An agent loop that blocks its process's event loop is slow, not dead; only after ``limit_s`` it counts as lost.

    Args:
        workers: actor handles of :class:`~war_rl.trainers.verl.agent_loop.WarAgentLoopWorker`.
        limit_s: ``war.fault.worker_timeout_s``.
        clock: seconds, monotonic.
    """

    def __init__(self, workers: Sequence[Any], limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = list(workers)
        self._limit = limit_s
        self._clock = clock
        self._asked: dict[int, tuple[Any, float]] = {}
        self._states: dict[int, dict[str, Any]] = {}

    def look(self) -> list[dict[str, Any]]:
        """The newest known ``war_progress()`` of each worker that has answered since :meth:`forget`.

        Raises:
            WorkerLost: a worker is dead, or has not answered for too long.
        """
        now = self._clock()
        for number, worker in enumerate(self._workers):
            if number not in self._asked:
                self._asked[number] = (worker.war_progress.remote(), now)
        refs = [ref for ref, _ in self._asked.values()]
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=_PATIENCE_S) if refs else ([], [])
        for number, (ref, since) in list(self._asked.items()):
            if ref in done:
                del self._asked[number]
                try:
                    self._states[number] = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    raise lost(f"agent-loop worker {number}", error) from error
            elif now - since > self._limit:
                raise WorkerSilent(f"agent-loop worker {number}", self._limit)
        return list(self._states.values())

    def forget(self) -> None:
        """A new rollout begins: earlier answers say nothing about it."""
        self._states.clear()
        self._asked.clear()


Work = tuple[int, Mapping[str, float]]
"""Requests that an engine has not finished, and its counters."""


class Stuck:
    """Finds engines that hang: they have requests to run, nothing comes in, and their counters stand still.

    An engine process that hangs (a device that does not answer, a collective that waits for a lost rank) is alive, and
    the server before it answers. Its counters are looked at only while nothing comes in at all.

    Args:
        limit_s: ``war.fault.stall_s``; counters that have not moved for this long mean that it hangs. 0: never.
        read: every replica's work; its counters are :data:`war_rl.engine_page.GAUGES`. An engine that hangs from its
            first request on shows no running request there: whoever handed the requests over must count them.
    """

    def __init__(self, limit_s: float, read: Callable[[], Mapping[str, Work]]) -> None:
        self._limit = limit_s
        self._read = read
        self._round = 0
        self._seen: Mapping[str, Work] = {}

    def look(self, silent_s: float) -> list[str]:
        """Replicas that hang, when nothing has come in for ``silent_s`` seconds; those are read once in ``limit_s``."""
        number = int(silent_s // self._limit) if self._limit else 0
        if number == self._round:
            return []
        self._round = number
        before, self._seen = self._seen, self._read() if number else {}
        return [
            n for n, (unfinished, page) in self._seen.items() if unfinished and n in before and page == before[n][1]
        ]


class Stall:
    """Notices that nothing comes in any more, and names the trajectories that are waited for, once for each stall.

    Args:
        limit_s: ``war.fault.stall_s``; 0 never speaks. Unit: seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit = limit_s
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A rollout begins."""
        self.silent_s = 0.0
        """For how long nothing had come in at the last look."""
        self._seen: tuple[float, ...] = ()
        self._moved = now
        self._said = False

    def look(self, now: float, states: Sequence[Mapping[str, Any]]) -> str:
        """What to tell the user; "" while there is nothing to tell. ``states``: as :meth:`WorkerWatch.look` returns."""
        seen = tuple(sum(float(s[key]) for s in states) for key in ("finished", "generated_tokens"))
        if seen != self._seen:
            self._seen, self._moved, self._said = seen, now, False
        self.silent_s = now - self._moved
        if not self._limit or self._said or now - self._moved < self._limit:
            return ""
        self._said = True
        longest = sorted((tuple(entry) for s in states for entry in s.get("oldest", ())), reverse=True)[:3]
        running = sum(int(s["running"]) for s in states)
        names = "; ".join(text for _, text in longest) or "nothing is known of them"
        return (
            f"nothing has come in for {now - self._moved:.0f} s; {running} trajectories are running, the longest: "
            f"{names}. war.fault.trajectory_timeout_s bounds them"
        )
