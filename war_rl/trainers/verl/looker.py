# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a rollout while it goes on. Looks in a thread of its own: a slow answer holds up nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray

from war_rl.engine_page import ask_all, read_gauges
from war_rl.metrics import add_up
from war_rl.progress import Progress

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 0.5
LOOK_S = 1.0
"""Seconds between two looks at the agent-loop workers and the router, which keep counts."""
COSTLY_LOOK_S = 5.0
"""... and at the engines' pages, which they make anew, and at the estimate of the time left."""
_HTTP_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 30.0


class Looker:
    """Looks at one rollout after another.

    Args:
        servers: ids (addresses) of the replicas.
        router: War-RL's router actor; None for the stock rollout.
        workers: asks every agent-loop worker for ``war_progress``.
        max_running: most running turns of a replica in the low load regime.
    """

    def __init__(
        self, servers: Sequence[str], router: Any, workers: Callable[[], Sequence[Mapping[str, Any]]], max_running: int
    ) -> None:
        self._servers = list(servers)
        self._router = router
        self._workers = workers
        self._max_running = max_running
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="war-progress")
        self._pending: Future[Progress] | None = None
        self._failed = False

    def begin(self, total: int, validate: bool, engine: Mapping[str, Mapping[str, float]]) -> None:
        """A rollout of ``total`` trajectories begins; ``engine`` holds each replica's counters now."""
        self.finish()
        self._total, self._validate = total, validate
        self._engine = {server: dict(values) for server, values in engine.items()}
        self._began = time.monotonic()
        self._next = self._began + FIRST_LOOK_S
        self._next_costly = self._began + FIRST_LOOK_S
        self._drafted: tuple[float, float] | None = None
        self._ends: float | None = None

    def poll(self) -> Progress | None:
        """What was seen since the last call, if anything; asks for a new look when it is time."""
        seen = None
        if self._pending is not None and self._pending.done():
            seen, self._pending = self._taken(self._pending), None
        now = time.monotonic()
        if self._pending is None and now >= self._next:
            self._next = now + LOOK_S
            self._pending = self._pool.submit(self._look)
        return seen

    def finish(self) -> None:
        """The rollout is over: wait for a look that is under way."""
        if self._pending is not None:
            self._taken(self._pending)
            self._pending = None

    def _taken(self, look: Future[Progress]) -> Progress | None:
        error = look.exception()
        if error is None:
            return look.result()
        # What is dead is found by the next look at everybody's health, which stops the run.
        if not self._failed:
            self._failed = True
            logger.warning("no look at the rollout's progress (said once): %s: %s", type(error).__name__, error)
        return None

    # ------------------------------------------------------------------ in the thread

    def _look(self) -> Progress:
        states = self._workers()
        finished = sum(state["finished"] for state in states)
        router = self._ask("snapshot") if self._router is not None else None
        now = time.monotonic()
        if now >= self._next_costly:
            self._next_costly = now + COSTLY_LOOK_S
            self._drafted = self._acceptance()
            left = self._ask("seconds_left", self._validate, self._total - finished) if router is not None else None
            self._ends = None if left is None else now + left
        prompt = sum(state["prompt_tokens"] for state in states)
        rate, length = self._drafted or (None, None)
        return Progress(
            finished=finished,
            total=self._total,
            generated_tokens=sum(state["generated_tokens"] for state in states),
            elapsed=now - self._began,
            regimes={} if router is None else self._regimes(router["running"]),
            extra={"failed": f"{failed}"} if (failed := sum(state["failed"] for state in states)) else {},
            running=sum(state["running"] for state in states),
            waiting=None if router is None else router["waiting"],
            turns=sum(state["turns"] for state in states),
            hit_rate=sum(state["cached_tokens"] for state in states) / prompt if prompt else None,
            acceptance_rate=rate,
            acceptance_length=length,
            seconds_left=None if self._ends is None else max(0.0, self._ends - now),
        )

    def _ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._router, method).remote(*args), timeout=_CALL_TIMEOUT_S)

    def _acceptance(self) -> tuple[float, float] | None:
        """Accepted over draft tokens, and tokens per verify step, since the rollout began; None without drafts."""
        try:
            pages = ask_all(self._servers, lambda server: read_gauges(server, _HTTP_TIMEOUT_S))
        except (OSError, ValueError):
            return self._drafted
        total = add_up(pages.values())
        before = add_up(self._engine.values())
        drafts, drafted, accepted = (
            total.get(name, 0.0) - before.get(f"spec_decode_num_{name}", 0.0)
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return (accepted / drafted, 1.0 + accepted / drafts) if drafts > 0 and drafted > 0 else None

    def _regimes(self, running: Mapping[str, int]) -> dict[str, str]:
        """Load regime of each replica, by the drafting threshold."""
        limit = self._max_running
        return {f"replica{i}": "high" if n > limit else f"low({n})" for i, n in enumerate(running.values())}
