# SPDX-License-Identifier: Apache-2.0
"""The event loop: simulated clients and replicas around the real scheduler. No clock, no I/O, no global state."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from war_rl.config import SchedulerConfig, SpecConfig
from war_rl.rollout.scheduler import Placement, ReplicaInfo
from war_rl.sim.drafts import Acceptance, RateDrafts, TextDrafts
from war_rl.sim.engine import EngineSettings, Replica, Request, Tally
from war_rl.sim.router import SimRouter
from war_rl.sim.times import StepTimes
from war_rl.sim.work import SimTrajectory
from war_rl.types import FeedItem, TrajectoryId, TurnRequest, TurnResult, encode_request_id


@dataclass(frozen=True)
class Setup:
    """Everything but the work.

    Attributes:
        replicas: number of engines.
        engine: limits of each.
        times: seconds of their steps.
        scheduler, spec: War-RL's own configuration; ``spec.policy="off"`` drafts nothing.
        acceptance: what drafting was measured to do, for work without text; None drafts from the text itself.
        at_once: most trajectories under way; None starts all at once, as training does.
        update_s: seconds between two steps (training, weights); the caches are empty afterwards.
        feed_lag_s: until a finished turn's text can be drafted from on the other replicas.
        seed: of the scheduler's ties and of the draws.
    """

    replicas: int
    engine: EngineSettings
    times: StepTimes
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    spec: SpecConfig = field(default_factory=lambda: SpecConfig(policy="off"))
    acceptance: Acceptance | None = None
    at_once: int | None = None
    update_s: float = 0.0
    feed_lag_s: float = 0.1
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.replicas < 1 or (self.at_once is not None and self.at_once < 1):
            raise ValueError(f"replicas={self.replicas}, at_once={self.at_once}: must be at least 1")


@dataclass(slots=True)
class StepResult:
    """One simulated step. Seconds are simulated, lengths in tokens; the names are the benchmark's."""

    seconds: float
    turns: int
    generated_tokens: int
    requested_prompt_tokens: int
    prefill_computed_tokens: int
    prefill_cached_tokens: int
    recomputed_tokens: int
    scheduled_tokens: float
    preemptions: int
    drafts: float
    draft_tokens: float
    accepted_tokens: float
    engine_steps: int
    replica_imbalance: float
    longest_trajectory_seconds: float
    busy_share: float
    half_done_seconds: float
    """When half of the trajectories had ended."""
    migrations: int
    placements: int

    @property
    def throughput(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"throughput": self.throughput}


@dataclass(slots=True, eq=False)
class _Live:
    """One trajectory under way."""

    work: SimTrajectory
    began: float
    turn: int = 0
    context: int = 0
    fed: int = 0
    hashes: Sequence[int] = ()
    """Of all its blocks, to its end."""


@dataclass(slots=True)
class _Turn:
    live: _Live
    prompt: int
    replica: Replica | None = None
    started: float = 0.0
    asked: float = 0.0


class Simulation:
    """Runs steps of work through a :class:`Setup`; state (estimates, learned speeds, fed text) lasts over the steps.

    Args:
        setup: everything but the work.
        clock: real seconds, to measure the scheduler; None measures nothing.
        observe: called with (seconds, event, key or trajectory, replica) for every event the scheduler sees and every
            placement; for tests.
    """

    def __init__(
        self,
        setup: Setup,
        clock: Callable[[], float] | None = None,
        observe: Callable[[float, str, Any, str], None] | None = None,
    ) -> None:
        self.setup = setup
        self.router = SimRouter(setup.scheduler, setup.seed, self._place, clock)
        self.replicas: dict[str, Replica] = {}
        self.infos: dict[str, ReplicaInfo] = {}
        """What each replica says of itself to the scheduler."""
        self.now = 0.0
        self.steps = 0
        self._observe = observe
        self._events: list[tuple[float, int, str, Any]] = []
        self._serial = 0
        self._working = 0
        """Replicas with a step under way."""
        self._wake = 0
        self._wake_at = 0.0
        self._turns: dict[str, _Turn] = {}
        self._waiting: deque[SimTrajectory] = deque()
        self._done: dict[TrajectoryId, float] = {}
        self._durations: list[float] = []
        self._ahead: dict[tuple[str, str], dict[int, int]] = {}
        for i in range(setup.replicas):
            replica = Replica(f"replica-{i}", setup.engine, setup.times, self._drafts())
            self.replicas[replica.name] = replica
            size = setup.engine.block_size
            info = ReplicaInfo(
                replica.name,
                (setup.engine.blocks + 1) * size,
                size,
                can_draft=setup.spec.policy != "off",
                max_running=setup.engine.max_num_seqs,
            )
            self.infos[replica.name] = info
            self.router.add(info, 0.0)

    def _drafts(self) -> RateDrafts | TextDrafts | None:
        setup = self.setup
        if setup.spec.policy == "off":
            return None
        return TextDrafts(setup.spec, setup.stop_token_ids) if setup.acceptance is None else RateDrafts(setup.spec)

    # ---- a step

    def run(self, work: Sequence[SimTrajectory]) -> StepResult:
        """One step: all of ``work`` from its first request to its last token.

        Raises:
            ValueError: no work, a trajectory that no replica can hold, or text to draft from where there is none.
            RuntimeError: the scheduler left turns waiting with nothing to come.
        """
        self._check(work)
        self._begin()
        began = self.now
        before = {name: replace(r.tally) for name, r in self.replicas.items()}
        self.router.scheduler.take_step_stats(False)
        self._done, self._durations, self._ahead = {}, [], {}
        self._waiting = deque(replace(t, id=replace(t.id, step=self.steps)) for t in work)
        for _ in range(min(len(work), self.setup.at_once or len(work))):
            self._start_next()
        while len(self._done) < len(work):
            self._next(len(work))
        result = self._result(work, began, before)
        # What is still on its way (fed text) belongs to this step.
        while self._events:
            self._next(len(work))
        self.now = began + result.seconds
        return result

    def _begin(self) -> None:
        self.steps += 1
        if self.steps > 1:
            self.now += self.setup.update_s
        for replica in self.replicas.values():
            replica.cache.clear()
            if isinstance(replica.drafts, TextDrafts):
                replica.drafts.idle()
                replica.drafts.begin_step(self.steps)
        self.router.weights_updated(self.steps, self.now)

    def _check(self, work: Sequence[SimTrajectory]) -> None:
        engine = self.setup.engine
        if not work:
            raise ValueError("there is no work")
        longest = max(t.context for t in work)
        if -(-longest // engine.block_size) > engine.blocks:
            raise ValueError(
                f"kv_tokens={engine.kv_tokens}: the longest trajectory has {longest} tokens and fits no replica; give "
                "more, or a smaller max_context"
            )
        if self.setup.spec.policy != "off" and self.setup.acceptance is None and any(t.text is None for t in work):
            raise ValueError("drafting needs the trajectories' text, or a measured acceptance")

    def _next(self, total: int) -> None:
        if not self._events:
            raise RuntimeError(
                f"{self.router.waiting} turns wait for ever after {self.now:.3f} s: {len(self._done)} of {total} "
                "trajectories have ended"
            )
        at, _, kind, what = heapq.heappop(self._events)
        if kind == "engine":
            replica, version = what
            if replica.ends != at or version != replica.tally.steps:
                return
            self.now = at
            self._steps_over(replica)
            return
        if kind == "wake":
            if what == self._wake:
                self.now, self._wake_at = at, 0.0
                self._tell("wake", None)
                self.router.wake(at)
                self._plan_wake()
            return
        self.now = at
        getattr(self, f"_on_{kind}")(what)

    def _push(self, at: float, kind: str, what: Any) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, kind, what))

    def _plan_wake(self) -> None:
        at = self.router.next_wakeup(self.now)
        if at is not None and self.now < self._wake_at <= at:
            # As the router does: an earlier look does no harm, and a timer for every event would.
            return
        self._wake += 1
        self._wake_at = 0.0
        if at is not None:
            self._wake_at = max(at, self.now + 1e-3)
            self._push(self._wake_at, "wake", self._wake)

    # ---- clients

    def _start_next(self) -> None:
        if self._waiting:
            work = self._waiting.popleft()
            self._on_submit(_Live(work, self.now, context=work.prompt))

    def _on_submit(self, live: _Live) -> None:
        work = live.work
        key = encode_request_id(work.id, live.turn)
        self._turns[key] = _Turn(live, live.context, asked=self.now)
        size = self.setup.engine.block_size
        if not live.turn:
            live.hashes = work.hashes(work.context // size)
        hashes = live.hashes[: live.context // size]
        request = TurnRequest(key, work.id, live.turn, live.context, work.turns[live.turn].model, hashes)
        self._tell("submit", request)
        self.router.submit(request, self.now)
        self._plan_wake()

    def _place(self, placement: Placement, now: float) -> None:
        turn = self._turns[placement.key]
        live = turn.live
        turn.replica, turn.started = self.replicas[placement.replica_id], now
        self._tell("place", placement.key, placement.replica_id)
        work = live.work
        request = Request(placement.key, work, live.turn, turn.prompt, work.turns[live.turn].model)
        acceptance = self.setup.acceptance
        if self.setup.spec.policy != "off":
            request.kind = self._kind(live, placement.replica_id)
            if acceptance is not None:
                request.rate = acceptance.draw(request.kind, f"{self.setup.seed}/{placement.key}")
        self._push(now + self.setup.times.send_s, "reach", (turn.replica, request))

    def _kind(self, live: _Live, replica: str) -> str:
        scope = "" if self.setup.spec.feed else replica
        others = self._ahead.get((scope, live.work.id.uid), {})
        ahead = any(done > live.turn and session != live.work.id.session for session, done in others.items())
        return "sibling" if ahead else "own"

    def _on_reach(self, what: tuple[Replica, Request]) -> None:
        replica, request = what
        ends, idle = replica.ends, not replica.busy
        if idle:
            self._working += 1
            self._pace()
        replica.arrive(request, self.now)
        if replica.ends != ends:
            self._push(replica.ends, "engine", (replica, replica.tally.steps))

    def _steps_over(self, replica: Replica) -> None:
        for request in replica.finish_steps(self.now):
            self._push(self.now + self.setup.times.return_s, "returned", request)
        if replica.busy:
            self._push(replica.ends, "engine", (replica, replica.tally.steps))
        else:
            self._working -= 1
            self._pace()

    def _pace(self) -> None:
        """A replica has begun or ceased to work, which the others on its machine feel."""
        if self.setup.times.alone == 1.0:
            return
        pace = self.setup.times.pace(len(self.replicas) - 1, max(0, self._working - 1))
        for replica in self.replicas.values():
            ends = replica.ends
            replica.set_pace(pace, self.now)
            if replica.ends != ends:
                self._push(replica.ends, "engine", (replica, replica.tally.steps))

    def _on_returned(self, request: Request) -> None:
        turn = self._turns.pop(request.key)
        live, work = turn.live, turn.live.work
        seconds, queued = self.now - turn.started, request.began - request.arrived
        result = TurnResult(request.target, request.cached, request.preemptions, seconds, engine_queue_seconds=queued)
        self._tell("release", (request.key, result))
        self._tell("turn", request)
        self.router.release(request.key, result, self.now)
        self._plan_wake()
        played = work.turns[live.turn]
        assert turn.replica is not None
        self._feed(live, turn.prompt + played.model, turn.replica)
        live.context += played.model + played.env
        live.turn += 1
        over = live.turn >= len(work.turns)
        self._push(self.now + played.tool, "over" if over else "submit", live)

    def _on_over(self, live: _Live) -> None:
        self._tell("finish", live.work.id)
        self.router.finish(live.work.id, self.now)
        self._done[live.work.id] = self.now
        self._durations.append(self.now - live.began)
        self._start_next()
        self._plan_wake()

    def _feed(self, live: _Live, end: int, replica: Replica) -> None:
        """The turn's text, with the environment's before it, is on its way to all replicas."""
        if self.setup.spec.policy == "off":
            return
        work = live.work
        scope = "" if self.setup.spec.feed else replica.name
        self._ahead.setdefault((scope, work.id.uid), {})[work.id.session] = live.turn + 1
        if self.setup.acceptance is None and self.setup.spec.feed:
            assert work.text is not None
            item = FeedItem(work.id, live.fed, work.text[live.fed : end])
            live.fed = end
            self._push(self.now + self.setup.feed_lag_s, "fed", (item, replica))

    def _on_fed(self, what: tuple[FeedItem, Replica]) -> None:
        item, origin = what
        for replica in self.replicas.values():
            if replica is not origin and isinstance(replica.drafts, TextDrafts):
                replica.drafts.feed([item])

    # ---- results

    def _tell(self, event: str, what: Any, replica: str = "") -> None:
        if self._observe is not None:
            self._observe(self.now, event, what, replica)

    def _result(self, work: Sequence[SimTrajectory], began: float, before: dict[str, Tally]) -> StepResult:
        ends = sorted(self._done.values())
        seconds = ends[-1] - began

        def total(name: str) -> Any:
            return sum(getattr(r.tally, name) - getattr(before[n], name) for n, r in self.replicas.items())

        generated = [r.tally.generated - before[n].generated for n, r in self.replicas.items()]
        stats = self.router.scheduler.take_step_stats(False)
        return StepResult(
            seconds=seconds,
            turns=sum(len(t.turns) for t in work),
            generated_tokens=total("generated"),
            requested_prompt_tokens=total("computed_prompt") + total("cached_prompt"),
            prefill_computed_tokens=total("computed_prompt"),
            prefill_cached_tokens=total("cached_prompt"),
            recomputed_tokens=total("recomputed"),
            scheduled_tokens=total("scheduled"),
            preemptions=total("preemptions"),
            drafts=total("drafts"),
            draft_tokens=total("draft_tokens"),
            accepted_tokens=total("accepted"),
            engine_steps=total("steps"),
            replica_imbalance=max(generated) * len(generated) / max(1, sum(generated)),
            longest_trajectory_seconds=max(self._durations),
            busy_share=total("busy") / (seconds * len(self.replicas)),
            half_done_seconds=ends[(len(ends) - 1) // 2] - began,
            migrations=int(stats["sched/migrations"]),
            placements=int(stats["sched/placements"]),
        )


def simulate(setup: Setup, work: Sequence[SimTrajectory]) -> StepResult:
    """One step from a fresh start."""
    return Simulation(setup).run(work)
