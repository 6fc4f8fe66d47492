# SPDX-License-Identifier: Apache-2.0
"""Watches one rollout at a time from inside the trainer: progress, health, and the step's ``war/...`` metrics.

Works for both rollouts: it reads the replicas' ``/metrics``, the agent-loop workers' records and, where they exist, the
router's and the drafters' own counters.
"""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import ray

from war_rl.analysis import prefill_seconds_per_token, slowest
from war_rl.board import BETWEEN, ROLLOUT, Board, Post
from war_rl.config import WarConfig
from war_rl.engine_page import ask_all, read_gauges
from war_rl.metrics import add_up, delta, parse_prometheus, step_metrics
from war_rl.progress import MARK, Progress, ProgressLine
from war_rl.trace import StepTrace, TraceWriter
from war_rl.trainers.verl.health import (
    ReplicaDead,
    ReplicaHealth,
    check_replicas,
    check_router,
    raise_if_dead,
    unfinished_requests,
)
from war_rl.trainers.verl.link import COUNTERS as LINK_COUNTERS
from war_rl.trainers.verl.looker import LOOK_S, Looker
from war_rl.trainers.verl.router import RouterLost
from war_rl.trainers.verl.workers import Stall, Stuck, Work, WorkerLost, WorkerSilent, WorkerWatch, lost
from war_rl.types import TrajectoryRecord

logger = logging.getLogger(__name__)

_HTTP_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 30.0


class RolloutObserver:
    """One for each trainer. ``begin`` before the first trajectory is submitted, ``end`` after the last is in."""

    def __init__(
        self,
        war: WarConfig,
        servers: Mapping[str, Any],
        router: Any,
        is_war: bool,
        trace: TraceWriter | None = None,
        board: Board | None = None,
    ) -> None:
        self._war = war
        self._trace = trace
        self._board = board
        self._servers = dict(servers)
        self._router = router
        self._is_war = is_war
        self._manager: Any = None
        self._workers: WorkerWatch | None = None
        self._stall = Stall(war.fault.stall_s)
        self._stuck = Stuck(war.fault.stall_s, self._read_work)
        self._engine: dict[str, dict[str, float]] = {}
        self._spec: dict[str, dict[str, float]] = {}
        self._clients: list[dict[str, float]] = []
        self._line: ProgressLine | None = None
        self._total = 0
        self._validate = False
        self._step = 0
        self._began = 0.0
        self._began_unix = 0.0
        self._spent = 0.0
        self._next_health = 0.0
        self._next_look = 0.0
        self._states: list[dict[str, Any]] = []
        self._looker = Looker(list(servers), router if is_war else None, lambda: self._states, war.spec.max_running)
        self._prefill_s_per_token = 0.0
        self.records: list[TrajectoryRecord] = []

    def attach(self, manager: Any) -> None:
        """The agent-loop manager exists only once the trainer starts to fit."""
        self._manager = manager
        workers = getattr(manager, "agent_loop_workers", None)
        # The benchmark's manager is its own only worker.
        self._workers = WorkerWatch(workers, self._war.fault.worker_timeout_s) if workers is not None else None

    def begin(self, label: str, total: int, validate: bool, step: int) -> None:
        """A rollout of ``total`` trajectories starts now."""
        asked = time.monotonic()
        self._step = step
        self._engine = self._read_engines()
        self._spec = self._read_drafters()
        self._clients = self._call_workers("war_client_counters")
        self._line = ProgressLine(
            label, clock=time.monotonic, mode=self._war.progress, speaker=True, elsewhere=self._elsewhere(label)
        )
        self._looker.begin(total, validate, self._engine)
        self._total, self._validate = total, validate
        self._began, self._began_unix = time.monotonic(), time.time()
        self._spent = self._began - asked
        self._stall.begin(self._began)
        self._states = []
        if self._workers is not None:
            self._workers.forget()
        self._next_look = self._next_health = self._began + self._war.fault.health_interval_s

    def poll(self) -> None:
        """Called often while trajectories come in.

        Raises:
            ReplicaDead: a replica died; names it and its engine's own error.
            RouterLost: the router died, or was started again.
            WorkerLost: an agent-loop worker died, or answers no more.
        """
        now = time.monotonic()
        if now >= self._next_health:
            self.check_health()
            self._next_health = time.monotonic() + self._war.fault.health_interval_s
        if now >= self._next_look:
            self._look(now)
            self._next_look = time.monotonic() + LOOK_S
        if self._line is not None and not self._line.quiet:
            seen = self._looker.poll()
            if seen is not None:
                self._line.update(seen)

    def _look(self, now: float) -> None:
        """Whether the workers live, and whether anything comes in; the display shows the same states."""
        if self._workers is None:
            self._states = self._call_workers("war_progress")
        else:
            self._states = self._workers.look()
        if text := self._stall.look(now, self._states):
            print(f"{MARK} {text}", flush=True)
        if hang := self._stuck.look(self._stall.silent_s):
            limit = f"{self._war.fault.stall_s:g} s (war.fault.stall_s)"
            why = f"it has requests to run and has made no step for {limit}: its engine hangs"
            raise_if_dead([ReplicaHealth(name, why) for name in hang])

    def check_health(self) -> None:
        """Raises:
        ReplicaDead: a replica is dead.
        RouterLost: the router is.
        """
        raise_if_dead(check_replicas(self._servers, self._war.fault.health_timeout_s))
        if self._is_war:
            check_router(self._router, self._war.fault.health_timeout_s)

    def check_dead(self) -> None:
        """Between rollouts, when replicas may be too busy to answer: raises only for what is dead for certain.

        Raises:
            ReplicaDead: a replica is.
        """
        raise_if_dead([h for h in check_replicas(self._servers, self._war.fault.health_timeout_s) if not h.silent])

    def what_died(self) -> RuntimeError | None:
        """The replica, router or agent-loop worker that is lost; None where all live."""
        try:
            self.check_health()
            self._ask_progress()
        except (ReplicaDead, RouterLost, WorkerLost) as dead:
            return dead
        return None

    def explain(self, error: BaseException) -> BaseException:
        """What to report for a rollout that failed with ``error``: who died, the trajectories' errors, or itself."""
        if isinstance(error, ReplicaDead | RouterLost | WorkerLost):
            return error
        if (dead := self.what_died()) is not None:
            return dead
        errors = [text for state in self._ask_progress() for text in state["errors"]]
        if not errors:
            return error
        return RuntimeError(f"{error} The trajectories failed with: {'; '.join(dict.fromkeys(errors))}")

    def end(self) -> dict[str, float]:
        """Metrics of the rollout that began last; also keeps its records in ``records``."""
        ended = time.monotonic()
        seconds = ended - self._began
        self._looker.finish()
        self.records = [r for part in self._call_workers("war_take_records", self._validate) for r in part]
        if self._line is not None:
            self._line.update(self._final_progress(seconds))
            self._line.close()
        engine = self._change(self._engine, self._read_engines())
        drafters = self._read_drafters()
        before, after = _counters(self._spec), _counters(drafters)
        drafted = {server_id: delta(before.get(server_id, {}), now) for server_id, now in after.items()}
        spec = {**add_up(drafted.values()), **_gauges(drafters)}
        clients = self._call_workers("war_client_counters")
        told = add_up(delta(a, b) for a, b in zip(self._clients, clients, strict=True))
        feed = {name: value for name, value in told.items() if name not in LINK_COUNTERS}
        sched = ray.get(self._router.take_step_stats.remote(self._validate)) if self._is_war else {}
        for record in self.records:
            if record.error:
                name = f"{record.trajectory.uid}/{record.trajectory.session}"
                logger.warning("trajectory %s failed: %s", name, record.error)
        prefix = "val/" if self._validate else ""
        merged = {**spec, **{f"{prefix}{_SENT.get(name, name)}": value for name, value in feed.items()}}
        faults = add_up(self._call_workers("war_take_faults"))
        metrics = step_metrics(
            self.records,
            seconds=seconds,
            engine=engine,
            sched={**sched, **_router_line(told)},
            spec=merged,
            validate=self._validate,
            began=self._began_unix,
            replicas=list(self._servers),
            low_running=self._war.spec.max_running,
            saved={server_id: _net_saved(counts, prefix) for server_id, counts in drafted.items()},
        )
        room = "war_val" if self._validate else "war"
        metrics.update({f"{room}/fault/{name}": value for name, value in faults.items()})
        turns = [turn for record in self.records for turn in record.turns]
        prefill = engine.get("request_prefill_time_seconds", 0.0)
        self._prefill_s_per_token = prefill_seconds_per_token(turns, prefill)
        room = "war_val" if self._validate else "war"
        if self._trace is not None:
            writing = time.monotonic()
            metrics[f"{room}/trace/trajectories"] = float(self._trace.add(self._step_trace(seconds)))
            metrics[f"{room}/trace/seconds"] = time.monotonic() - writing
        metrics[f"{room}/observe/seconds"] = self._spent + time.monotonic() - ended
        return metrics

    def abandon(self) -> None:
        """The rollout that began last will not end: whatever is printed next starts on a line of its own."""
        if self._line is not None:
            self._line.close()

    def slowest(self, rows: int) -> list[list[str | float | None]]:
        """The slowest trajectories of the rollout that ended last (:func:`war_rl.analysis.slowest`)."""
        return slowest(self.records, list(self._servers), self._prefill_s_per_token, rows)

    def _step_trace(self, seconds: float) -> StepTrace:
        return StepTrace(
            self._step,
            self._validate,
            self._began_unix,
            seconds,
            list(self._servers),
            len(self.records),
            self._prefill_s_per_token,
            self.records,
        )

    # ------------------------------------------------------------------ reading

    def _read_engines(self) -> dict[str, dict[str, float]]:
        return ask_all(list(self._servers), _read_metrics)

    def _read_work(self) -> dict[str, Work]:
        pages = ask_all(list(self._servers), _read_gauges)
        unfinished = unfinished_requests(self._servers, _CALL_TIMEOUT_S)
        return {server_id: (unfinished[server_id], page) for server_id, page in pages.items() if page}

    def _read_drafters(self) -> dict[str, dict[str, float]]:
        if not self._is_war:
            return {}
        refs = {server_id: server.war_counters.remote() for server_id, server in self._servers.items()}
        return {server_id: ray.get(ref, timeout=_CALL_TIMEOUT_S) for server_id, ref in refs.items()}

    @staticmethod
    def _change(before: Mapping[str, dict[str, float]], after: Mapping[str, dict[str, float]]) -> dict[str, float]:
        return add_up(delta(before.get(server_id, {}), values) for server_id, values in after.items())

    def _ask_progress(self) -> list[dict[str, Any]]:
        """Every worker's progress; nothing where one is too busy to say."""
        try:
            return self._call_workers("war_progress", limit=_CALL_TIMEOUT_S)
        except WorkerSilent:
            return []

    def _call_workers(self, method: str, *args: Any, limit: float = 0.0) -> list[Any]:
        if self._manager is None:
            return []
        limit = limit or self._war.fault.worker_timeout_s
        try:
            return list(self._manager.war_call(method, *args, timeout=limit))
        except ray.exceptions.RayActorError as error:
            raise lost("an agent-loop worker", error) from error
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerSilent("an agent-loop worker", limit) from error

    def _elsewhere(self, label: str) -> Callable[[Progress, bool], None] | None:
        """Puts progress on the board that a display looks at, where there is one."""
        board = self._board
        if board is None:
            return None
        return lambda state, complete: board.write(Post(label, BETWEEN if complete else ROLLOUT, state))

    def _final_progress(self, seconds: float) -> Progress:
        generated = sum(turn.generated_tokens for record in self.records for turn in record.turns)
        return Progress(max(len(self.records), self._total), self._total, generated, seconds)


# The drafters count what arrived under these names, at every replica; the senders' own counts need others.
_SENT = {"feed_items": "feed_sent_items", "feed_tokens": "feed_sent_tokens"}

# States of a drafter, not counts: summed over replicas as they are, or the worst of them.
_GAUGES = ("bytes", "live_trees", "feed_pending", "running")
_WORST = ("feed_lag_s", "ingest_max_s", "step_base_s", "step_per_token_s", "step_verify_s")


def _net_saved(counts: Mapping[str, float], prefix: str) -> float:
    """Engine seconds that one replica's drafts saved, less those spent on making them."""
    return counts.get(f"{prefix}decode_seconds_saved", 0.0) - counts.get(f"{prefix}propose_seconds", 0.0)


def _router_line(told: Mapping[str, float]) -> dict[str, float]:
    """What the workers' lines to the router say about how busy it is; nothing where no turn was asked for."""
    if not told.get("router_asks") or not told.get("router_messages"):
        return {}
    return {
        "router_calls_per_turn": told["router_calls"] / told["router_asks"],
        "router_message_ms": 1e3 * told["router_message_seconds"] / told["router_messages"],
    }


def _counters(drafters: Mapping[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {i: {k: v for k, v in d.items() if k not in (*_GAUGES, *_WORST)} for i, d in drafters.items()}


def _gauges(drafters: Mapping[str, dict[str, float]]) -> dict[str, float]:
    values = {name: sum(d.get(name, 0.0) for d in drafters.values()) for name in _GAUGES}
    values.update({name: max((d.get(name, 0.0) for d in drafters.values()), default=0.0) for name in _WORST})
    return values if drafters else {}


def _read_gauges(server_id: str) -> dict[str, float]:
    """What changes with every engine step; empty when the server does not answer, which the health check looks at."""
    try:
        return read_gauges(server_id, _HTTP_TIMEOUT_S)
    except (OSError, ValueError):
        return {}


def _read_metrics(server_id: str) -> dict[str, float]:
    """One replica's engine counters; empty, with a warning, when it does not answer."""
    try:
        # verl binds this port; the address is the one it registered itself under.
        with urllib.request.urlopen(f"http://{server_id}/metrics", timeout=_HTTP_TIMEOUT_S) as response:
            return parse_prometheus(response.read().decode())
    except (OSError, ValueError) as error:
        logger.warning("no engine counters from replica %s: %s", server_id, error)
        return {}
