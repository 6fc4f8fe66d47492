# SPDX-License-Identifier: Apache-2.0
"""GlobalScheduler: events in, decisions out. A state machine without tasks, clocks, handles or random numbers.

Events: a replica is added, drained, removed; a turn is submitted, reserved, released; a trajectory finishes; weights
are updated; a client is heard of or lost. ``decide`` is a pure look. Every method takes ``now``, seconds on any clock
that never goes back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from war_rl.config import SchedulerConfig
from war_rl.rollout.context import UPROOTED
from war_rl.rollout.cost import RatePriors, ReplicaRates
from war_rl.rollout.outlook import seconds_left
from war_rl.rollout.planner import Planner
from war_rl.rollout.policies import make_policy
from war_rl.rollout.progress import Progress, Remaining
from war_rl.rollout.state import (
    Placement,
    ReplicaInfo,
    ReplicaState,
    TrajectoryState,
    TurnState,
    expected_output,
    is_open,
    need,
)
from war_rl.rollout.stats import QueueTimes, StepStats
from war_rl.rollout.waiting import Waiting
from war_rl.types import GroupId, TrajectoryId, TurnRequest, TurnResult

__all__ = ["GlobalScheduler", "Placement", "ReplicaInfo"]

MIN_TOOL_SECONDS = 0.02
"""Shortest usual tool time believed, so that an instantaneous environment does not make idle KV decay at once."""


@dataclass(slots=True)
class _Group:
    """Live members of a group, and which of them is its probe."""

    members: set[TrajectoryId] = field(default_factory=set)
    probe: TrajectoryId | None = None


@dataclass(slots=True)
class _Client:
    heard: float
    trajectories: set[TrajectoryId] = field(default_factory=set)


class GlobalScheduler:
    """Places turns on replicas by the configured policy.

    Of validation it learns what holds for all work alike (speeds, tool times, cache hits); lengths are learned and
    statistics kept apart.

    Raises:
        ConfigError: the policy does not exist.
    """

    def __init__(self, config: SchedulerConfig, *, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self.policy = make_policy(config)
        self.queue = Waiting()
        self.progress = Progress(
            config.progress_alpha,
            config.prior_turns,
            config.prior_turns * config.prior_turn_tokens,
            config.prior_context_tokens,
        )
        self.sequence = 0
        """Grows with each trajectory that comes to live on a replica."""
        self.tool_seconds = config.idle_prior_s
        """Usual time between two turns of a trajectory, exponentially weighted."""
        self._priors = RatePriors(
            config.prior_prefill_tokens_per_s,
            config.prior_decode_ms / 1e3,
            config.prior_interference_ms / 1e3,
            config.rate_forgetting,
        )
        self._fleet = ReplicaRates(self._priors)
        self._replicas: dict[str, ReplicaState] = {}
        self._alive: list[ReplicaState] = []
        self.any_drafter = False
        """Whether a replica that takes turns can draft."""
        self._cache_tokens = 0.0
        """Mean KV tokens that a replica may promise; 0 where none has a bound."""
        self._added = 0
        self._open: dict[str, ReplicaState] = {}
        self._open_at = -1.0
        self._trajectories: dict[TrajectoryId, TrajectoryState] = {}
        self._turns: dict[str, TurnState] = {}
        self._groups: dict[GroupId, _Group] = {}
        self._clients: dict[str, _Client] = {}
        self._stats = {False: StepStats(), True: StepStats()}
        self._totals: dict[str, float] = {}
        self.queue_times = QueueTimes()
        self._explained: deque[tuple[float, Placement]] = deque(maxlen=config.explain)
        self._submitted = 0
        self._theta = 0.0
        self._now: float | None = None

    # ---- replicas

    def add_replica(self, replica: ReplicaInfo, now: float) -> None:
        """A replica is there and takes turns. For a known id: its new description, and draining ends."""
        self._advance(now)
        known = self._replicas.get(replica.id)
        if known is None:
            known = ReplicaState(replica, self._fleet, self.config.idle_patience, self.config.admission_fill, now)
            known.index = self._added = self._added + 1
            known.last_first = -1 - (len(self._replicas) * 7919 + self.seed) % 104_729
            self._replicas[replica.id] = known
        else:
            if (replica.kv_tokens, replica.block_size) != (known.info.kv_tokens, known.info.block_size):
                self._count("sched/replica_resized")
                for turn in self._turns.values():
                    turn.cached = 0 if turn.replica is known else turn.cached
                known.rebuild_residency(replica)
            self._touch(known, now)
            known.resize(replica, self.config.admission_fill)
            known.draining = False
            for turn in [t for t in self.queue.homeless.values() if t.trajectory.home is known]:
                self.queue.requeue(turn)
        self._refresh_alive()

    def drain_replica(self, replica_id: str, now: float) -> None:
        """No turn starts there any more; what runs goes on. Waiting turns go elsewhere, or wait for its return."""
        self._advance(now)
        replica = self._replicas.get(replica_id)
        if replica is None or replica.draining:
            return
        stranded = list(replica.resumed.values())
        for turn in stranded:
            self.queue.dequeue(turn)
        replica.draining = True
        for turn in stranded:
            self.queue.enqueue(turn)
        self._refresh_alive()

    def remove_replica(self, replica_id: str, now: float, reason: str = "") -> list[str]:
        """The replica is gone. Returns the keys of the turns that ran there: forgotten here, to be submitted again.

        Turns that waited for it stay queued and go elsewhere; their trajectories lose nothing but cache.
        """
        self._advance(now)
        replica = self._replicas.get(replica_id)
        if replica is None:
            return []
        lost = [key for key, turn in self._turns.items() if turn.replica is replica]
        for key in lost:
            turn = self._turns.pop(key)
            turn.trajectory.running.discard(key)
            self._end(turn, None, now)
            self._stats[turn.request.trajectory.validate].lost += 1
            self._count("sched/lost_turns")
        stranded = list(replica.resumed.values())
        for turn in stranded:
            self.queue.dequeue(turn)
        for trajectory in self._trajectories.values():
            if trajectory.home is replica:
                self._detach(trajectory)
        for turn in stranded:
            self.queue.enqueue(turn)
        self._close_areas(replica, now)
        del self._replicas[replica_id]
        self.policy.forget(replica_id)
        self._count("sched/lost_replicas")
        self._refresh_alive()
        return lost

    # ---- turns

    def submit(self, turn: TurnRequest, now: float, client: str = "") -> None:
        """The turn wants to run. ``client`` names who holds it, for :meth:`release_client`.

        Raises:
            ValueError: a turn with this key already waits or runs.
        """
        self._advance(now)
        if turn.key in self._turns:
            raise ValueError(f"turn {turn.key!r} was submitted before and has not been released")
        trajectory = self._trajectory(turn, client, now)
        self._submitted += 1
        state = TurnState(turn, trajectory, now, self._submitted)
        if not trajectory.waiting and not trajectory.running and trajectory.idle_since >= 0.0:
            gap = max(MIN_TOOL_SECONDS, now - trajectory.idle_since)
            self.tool_seconds += 0.05 * (gap - self.tool_seconds)
            self.progress.observe_return(turn.trajectory.validate, turn.prompt_tokens - trajectory.prompt)
        if trajectory.home is None and not trajectory.ran:
            state.rank = self._rank(trajectory)
        self._turns[turn.key] = state
        trajectory.waiting.add(turn.key)
        self._seat(trajectory)
        self.queue.add(state)
        stats = self._stats[turn.trajectory.validate]
        stats.submitted += 1
        stats.waiting += 1
        stats.max_waiting = max(stats.max_waiting, stats.waiting)

    def decide(self, now: float) -> list[Placement]:
        """Placements of the waiting turns that may start now, to be reserved in this order. Changes nothing."""
        if not self._alive or not len(self.queue):
            return []
        planner = Planner(self, self._alive, now, self._theta_at(now))
        try:
            self.policy.plan(planner)
            # A move makes room on the replica it leaves, which a turn looked at before may need: look again.
            while planner.moved and planner.queued:
                planner.moved = False
                self.policy.plan(planner)
        finally:
            planner.undo()
        return planner.placements

    def reserve(self, placement: Placement, now: float) -> None:
        """Carry a decision out.

        Raises:
            ValueError: the turn does not wait, the replica is not there, or the trajectory runs elsewhere.
        """
        self._advance(now)
        turn = self._turns.get(placement.key)
        replica = self._replicas.get(placement.replica_id)
        if turn is None or turn.replica is not None or replica is None:
            raise ValueError(f"cannot reserve {placement}: the turn does not wait or the replica is gone")
        trajectory = turn.trajectory
        if trajectory.home is not None and trajectory.home is not replica and trajectory.running:
            raise ValueError(f"cannot reserve {placement}: the trajectory runs on {trajectory.home.id!r}")
        self._record(turn, placement, replica, now)
        self.queue.remove(turn)
        others = [self._turns[k] for k in trajectory.waiting if k != placement.key]
        if trajectory.home is not replica:
            for other in others:
                self.queue.dequeue(other)
            self._attach(turn, replica, now)
            for other in others:
                self.queue.enqueue(other)
        self._start(turn, replica, now)

    def release(self, key: str, result: TurnResult | None, now: float) -> None:
        """The turn is over. None: cancelled, whether it waited or ran. An unknown key is counted, otherwise ignored."""
        self._advance(now)
        turn = self._turns.pop(key, None)
        if turn is None:
            self._count("sched/unknown_releases")
            return
        trajectory = turn.trajectory
        stats = self._stats[trajectory.id.validate]
        if turn.replica is None:
            self.queue.remove(turn)
            stats.waiting -= 1
            trajectory.waiting.discard(key)
            self._seat(trajectory)
        else:
            trajectory.running.discard(key)
            if result is not None and not result.error:
                self._learn(turn, result, now)
            self._end(turn, result, now)
        if result is None:
            stats.cancelled += 1
            self._count("sched/cancelled_turns")

    def finish(self, trajectory: TrajectoryId, now: float) -> None:
        """The trajectory is over: it teaches the estimates, and all it held is free. Unknown ones are ignored."""
        known = self._trajectories.get(trajectory)
        if known is None:
            return
        if known.turns:
            self.progress.observe_finish(known.group, known.turns, known.output, known.context)
        self._stats[trajectory.validate].finished_trajectories += 1
        self._count("sched/finished_trajectories")
        self._forget(known, now)

    def weights_updated(self, step: int, now: float) -> None:
        """All KV is void from here on; what was learned about lengths and speeds stays.

        Trajectories of earlier steps whose end nobody has told, and that neither wait nor run, are over.
        """
        self._advance(now)
        for replica in self._replicas.values():
            replica.residency.clear()
        self.progress.forget_before(step)
        for trajectory in list(self._trajectories.values()):
            if trajectory.id.step < step and not trajectory.waiting and not trajectory.running:
                self._count("sched/abandoned_trajectories")
                self._forget(trajectory, now)

    def next_wakeup(self, now: float) -> float | None:
        """When to call :meth:`decide` although nothing happened; None: only events matter."""
        times = []
        if self.config.lease_s > 0:
            times += [c.heard + self.config.lease_s for c in self._clients.values()]
        if len(self.queue) and any(len(r.idle) for r in self._alive):
            # Idle KV promises decay with time, which may let a waiting turn in.
            times.append(now + max(0.05, 0.25 * self.tool_seconds))
        return max(min(times), now) if times else None

    # ---- clients

    def renew(self, client: str, now: float) -> None:
        """The client is alive: what it holds stays its own for another ``lease_s``."""
        self._advance(now)
        if client in self._clients:
            self._clients[client].heard = now

    def release_client(self, client: str, now: float) -> list[str]:
        """The client is dead: all its trajectories end without teaching anything. Returns the keys it held."""
        self._advance(now)
        known = self._clients.pop(client, None)
        if known is None:
            return []
        keys: list[str] = []
        for trajectory_id in sorted(known.trajectories, key=lambda t: (t.uid, t.session, t.step)):
            trajectory = self._trajectories.get(trajectory_id)
            if trajectory is not None:
                keys += [*sorted(trajectory.waiting), *sorted(trajectory.running)]
                self._forget(trajectory, now)
        self._count("sched/dead_clients")
        return keys

    def expire(self, now: float) -> list[str]:
        """Release what clients hold that have not been heard of for ``lease_s``. Returns the keys they held."""
        if self.config.lease_s <= 0:
            return []
        silent = [name for name, c in self._clients.items() if c.heard + self.config.lease_s <= now]
        return [key for name in silent for key in self.release_client(name, now)]

    # ---- what people look at

    def counters(self) -> dict[str, float]:
        """Cumulative counts and present gauges, flat ``sched/...`` names."""
        replicas = self._replicas.values()
        out = {
            **self._totals,
            "sched/waiting": float(len(self.queue)),
            "sched/running": float(len(self._turns) - len(self.queue)),
            "sched/admitted": float(sum(r.admitted for r in replicas)),
            "sched/trajectories": float(len(self._trajectories)),
            "sched/replicas": float(len(replicas)),
            "sched/tool_seconds": self.tool_seconds,
            "sched/residency_evicted_blocks": float(sum(r.residency.evicted_blocks for r in replicas)),
            "sched/residency_divergences": float(sum(r.residency.divergences for r in replicas)),
            "sched/residency_corrections": float(sum(r.residency.frontier_corrections for r in replicas)),
        }
        for replica in replicas:
            bounded = replica.kv_capacity if replica.info.kv_tokens > 0 else 0.0
            out[f"sched/replica/{replica.id}/kv_admitted"] = replica.kv_admitted(self._theta, self.tool_seconds)
            out[f"sched/replica/{replica.id}/kv_capacity"] = bounded
            out[f"sched/replica/{replica.id}/running"] = float(replica.running)
            out[f"sched/replica/{replica.id}/admitted"] = float(replica.admitted)
            resident = replica.residency.resident_blocks * replica.residency.block_size
            out[f"sched/replica/{replica.id}/resident_tokens"] = float(resident)
            out[f"sched/replica/{replica.id}/draining"] = float(replica.draining)
            out[f"sched/replica/{replica.id}/prefill_tokens_per_s"] = replica.rates.prefill_tokens_per_s
            out[f"sched/replica/{replica.id}/decode_ms"] = replica.rates.decode * 1e3
            out[f"sched/replica/{replica.id}/interference_ms"] = replica.rates.interference * 1e3
        return out | {f"sched/policy/{k}": v for k, v in self.policy.gauges().items()}

    def take_step_stats(self, validate: bool) -> dict[str, float]:
        """Values since the last call, then reset; ``waiting`` and ``admitted`` are those of the moment."""
        stats = self._stats[validate]
        if self._now is not None:
            for replica in self._replicas.values():
                self._close_areas(replica, self._now)
        out = stats.as_metrics()
        out["sched/waiting"] = float(stats.waiting)
        out["sched/admitted"] = float(stats.admitted)
        self._stats[validate] = StepStats(
            waiting=stats.waiting, max_waiting=stats.waiting, admitted=stats.admitted, max_admitted=stats.admitted
        )
        return out

    def seconds_left(self, validate: bool, to_come: int, now: float) -> float | None:
        """How long the rollout still takes; None before that can be told. See :mod:`war_rl.rollout.outlook`.

        ``to_come``: trajectories of it that have not ended, those that have not begun included. Changes nothing.
        """
        return seconds_left(
            self._trajectories.values(),
            self._turns,
            self._alive,
            self.progress,
            tool_seconds=self.tool_seconds,
            validate=validate,
            to_come=to_come,
            now=now,
        )

    def explanations(self) -> list[dict[str, Any]]:
        """The last ``explain`` decisions, oldest first: when, which turn, where, why, and the costs compared."""
        return [
            {"time": t, "key": p.key, "replica": p.replica_id, "reason": p.reason, "costs": dict(p.costs)}
            for t, p in self._explained
        ]

    # ---- expectations, used by the planner

    @property
    def turn_count(self) -> int:
        """Turns that wait or run."""
        return len(self._turns)

    def why_waiting(self, key: str, now: float) -> str:
        """Why a waiting turn does not run now, for people; "" for one that does not wait. Changes nothing."""
        turn = self.queue.all.get(key)
        if turn is None:
            return ""
        if not self._alive:
            return "no replica takes turns"
        theta, home = self._theta_at(now), turn.trajectory.home
        if home is not None and not home.draining:
            wanted = need(turn.request.prompt_tokens, turn.trajectory.covered, self.expected_output(turn.request))
            in_use = home.kv_running + home.shared.in_use(turn.trajectory.group, *self.first_prompt(turn))
            return (
                f"returns to {home.id}, where {home.running} turns run in {in_use} of "
                f"{home.kv_capacity:.0f} KV tokens, it needs {wanted} and {len(home.resumed)} wait"
            )
        held = ", ".join(
            f"{r.id} {r.kv_admitted(theta, self.tool_seconds):.0f}/{r.kv_capacity:.0f}"
            f"{' and turns wait to return' * bool(r.resumed)}"
            for r in self._alive
        )
        kind = "moves" if turn.trajectory.ran else "begins"
        return (
            f"{kind} where its {turn.request.prompt_tokens} prompt tokens and what they grow to fit; promised: {held}"
        )

    @property
    def mean_outputs(self) -> tuple[int, int]:
        """Mean tokens generated in a turn of training and of validation, each at least 1."""
        lengths = self.progress.turn_output
        return max(1, int(lengths[False].mean)), max(1, int(lengths[True].mean))

    def expected_output(self, turn: TurnRequest) -> int:
        """Tokens the turn is expected to generate, at least 1."""
        return expected_output(turn, self.mean_outputs)

    def remaining(self, turn: TurnState) -> Remaining:
        """What the turn's trajectory still has before it, this turn included."""
        trajectory = turn.trajectory
        return self.progress.remaining(
            trajectory.group,
            trajectory.turns,
            trajectory.output,
            turn.request.prompt_tokens,
            turn.request.max_tokens,
        )

    def growth(self, turn: TurnState, remaining: Remaining, expected: int) -> int:
        """Further KV tokens that admission reserves for a trajectory's later turns, ``expected`` being this turn's.

        None where one more running turn brings more than it costs when trajectories then outgrow the cache: each turn
        computes its prompt anew, which delays all that run beside it. Both are in seconds of trajectories.
        """
        rates, prompt = self._fleet, turn.request.prompt_tokens
        beside = self._cache_tokens / max(1, prompt)
        lost = prompt * rates.prefill * (beside + 1.0)
        if lost < rates.turn_seconds * rates.decode / (rates.decode + rates.interference * beside):
            return 0
        return max(0, int(self.config.admission_growth * (remaining.context_tokens - expected)))

    def first_prompt(self, turn: TurnState) -> tuple[Sequence[int], int]:
        """Block hashes and tokens of the trajectory's first prompt, which its group has in common."""
        trajectory = turn.trajectory
        hashes = turn.request.block_hashes
        if not trajectory.ran:
            return hashes, turn.request.prompt_tokens
        return hashes[: trajectory.first_blocks], trajectory.first_tokens

    def hashes_of(self, request: TurnRequest, replica: ReplicaState) -> Sequence[int]:
        """The prompt's block hashes; without any, numbers for the trajectory's own blocks (it shares nothing then)."""
        if request.block_hashes:
            return request.block_hashes
        t = request.trajectory
        digest = blake2b(f"{t.uid}/{t.session}/{t.step}/{t.validate}".encode(), digest_size=5).digest()
        base = int.from_bytes(digest, "little") << 22
        return range(base, base + request.prompt_tokens // max(1, replica.info.block_size))

    # ---- inside: life of a trajectory

    def _trajectory(self, turn: TurnRequest, client: str, now: float) -> TrajectoryState:
        known = self._trajectories.get(turn.trajectory)
        if known is None:
            known = TrajectoryState(turn.trajectory, turn.trajectory.group, client)
            self._trajectories[turn.trajectory] = known
            group = self._groups.setdefault(known.group, _Group())
            group.members.add(known.id)
            if group.probe is None and not self.progress.probed(known.group):
                group.probe = known.id
        if client:
            known.client = client
            holder = self._clients.setdefault(client, _Client(now))
            holder.heard = now
            holder.trajectories.add(known.id)
        return known

    def _rank(self, trajectory: TrajectoryState) -> tuple[float, ...]:
        """Order of new trajectories: probes first, then longest expected first."""
        if self._groups[trajectory.group].probe == trajectory.id:
            return (0.0, 0.0)
        return (1.0, -round(self.progress.remaining(trajectory.group, 0, 0, 0).output_tokens, 3))

    def _forget(self, trajectory: TrajectoryState, now: float) -> None:
        self._advance(now)
        for key in sorted(trajectory.waiting | trajectory.running):
            self.release(key, None, now)
        for name in trajectory.visited:
            if name in self._replicas:
                self._replicas[name].residency.forget(trajectory.id)
        self._detach(trajectory)
        del self._trajectories[trajectory.id]
        client = self._clients.get(trajectory.client)
        if client is not None:
            client.trajectories.discard(trajectory.id)
            if not client.trajectories:
                del self._clients[trajectory.client]
        self._leave_group(trajectory)

    def _leave_group(self, trajectory: TrajectoryState) -> None:
        group = self._groups[trajectory.group]
        group.members.discard(trajectory.id)
        if group.probe == trajectory.id:
            group.probe = None
        if not group.members:
            del self._groups[trajectory.group]
            return
        # What was learned changes the order of the siblings that still wait for their first turn.
        for member in sorted(group.members, key=lambda t: t.session):
            sibling = self._trajectories[member]
            if sibling.ran or sibling.home is not None:
                continue
            for key in sorted(sibling.waiting):
                self.queue.requeue(self._turns[key], self._rank(sibling))

    def _attach(self, turn: TurnState, replica: ReplicaState, now: float) -> None:
        """The trajectory comes to live on the replica."""
        trajectory = turn.trajectory
        if trajectory.home is not None:
            self._detach(trajectory)
        hashes, tokens = self.first_prompt(turn)
        if not trajectory.ran:
            trajectory.first_blocks, trajectory.first_tokens = len(hashes), tokens
        trajectory.covered = replica.shared.claim(trajectory.group, hashes, tokens)
        trajectory.home = replica
        trajectory.work = int(self.remaining(turn).output_tokens)
        trajectory.visited.add(replica.id)
        self._touch(replica, now)
        replica.admitted += 1
        stats = self._stats[trajectory.id.validate]
        stats.admitted += 1
        stats.max_admitted = max(stats.max_admitted, stats.admitted)
        replica.work += trajectory.work
        self.sequence += 1
        replica.last_first = trajectory.seat = self.sequence
        replica.seats.add(trajectory.seat)

    def _detach(self, trajectory: TrajectoryState) -> None:
        """The trajectory leaves its replica; none of its turns runs there."""
        home = trajectory.home
        if home is None:
            return
        if self._now is not None:
            self._touch(home, self._now)
        home.idle.remove(trajectory.id, self._theta)
        home.seats.remove(trajectory.seat)
        home.shared.unclaim(trajectory.group)
        home.admitted -= 1
        self._stats[trajectory.id.validate].admitted -= 1
        home.work -= trajectory.work
        self._footprint(trajectory, 0)
        trajectory.home, trajectory.covered, trajectory.work = None, 0, 0

    # ---- inside: life of a turn

    def _start(self, turn: TurnState, replica: ReplicaState, now: float) -> None:
        trajectory, request = turn.trajectory, turn.request
        expected = self.expected_output(request)
        self._touch(replica, now)
        if not trajectory.running:
            replica.idle.remove(trajectory.id, self._theta)
            trajectory.growth = self.growth(turn, self.remaining(turn), expected)
            replica.kv_growth += trajectory.growth
            self._footprint(trajectory, 0)
        if not trajectory.ran:
            trajectory.ran, trajectory.started = True, now
        trajectory.prompt = request.prompt_tokens
        trajectory.waiting.discard(request.key)
        trajectory.running.add(request.key)
        self._seat(trajectory)
        self._stats[trajectory.id.validate].waiting -= 1
        turn.replica, turn.started, turn.area = replica, now, replica.running_area
        turn.need = need(request.prompt_tokens, trajectory.covered, expected)
        replica.kv_running += turn.need
        replica.shared.begin(trajectory.group)
        replica.running += 1
        turn.crowded = replica.running > replica.slots
        replica.running_train += not trajectory.id.validate
        self._footprint(trajectory, trajectory.footprint + request.prompt_tokens + expected)
        replica.residency.grow(self._grown(replica, now))
        hashes = self.hashes_of(request, replica)
        turn.cached = replica.residency.begin(request.key, trajectory.id, hashes, request.prompt_tokens)
        replica.start_sum += now
        turn.mark = replica.computed_until(now)
        replica.prefilled += request.prompt_tokens - turn.cached
        busy_until = max(now, replica.prefill_free_at)
        replica.prefill_free_at = busy_until + (request.prompt_tokens - turn.cached) * replica.rates.prefill

    def _end(self, turn: TurnState, result: TurnResult | None, now: float) -> None:
        """The turn stops running: everything :meth:`_start` took is given back."""
        replica, trajectory, request = turn.replica, turn.trajectory, turn.request
        assert replica is not None
        self._touch(replica, now)
        replica.residency.grow(self._grown(replica, now))
        generated = result.generated_tokens if result is not None else 0
        replica.residency.end(request.key, generated, result.cached_tokens if result is not None else None)
        replica.kv_running -= turn.need
        replica.shared.end(trajectory.group)
        replica.running -= 1
        replica.running_train -= not trajectory.id.validate
        replica.start_sum -= turn.started
        if replica.running == 0:
            replica.start_sum = 0.0
            replica.prefill_free_at = min(replica.prefill_free_at, now)
        trajectory.context = max(trajectory.context, request.prompt_tokens + generated)
        if trajectory.running:
            return
        trajectory.idle_since = now
        replica.kv_growth -= trajectory.growth
        kept = trajectory.context - min(trajectory.covered, trajectory.context) + trajectory.growth
        replica.idle.add(trajectory.id, kept, self._theta)
        self._seat(trajectory)
        self._footprint(trajectory, trajectory.context)

    def _learn(self, turn: TurnState, result: TurnResult, now: float) -> None:
        """A turn ended well: speeds, lengths, hit rates and the residency error follow from its report."""
        replica, trajectory, request = turn.replica, turn.trajectory, turn.request
        assert replica is not None
        trajectory.turns += 1
        trajectory.output += result.generated_tokens
        context = request.prompt_tokens + result.generated_tokens
        self.progress.observe_turn(
            trajectory.group, trajectory.turns, trajectory.output, context, result.generated_tokens
        )
        stats = self._stats[trajectory.id.validate]
        stats.preemptions += result.preemptions
        stats.engine_queue_seconds += result.engine_queue_seconds
        self._count("sched/preemptions", result.preemptions)
        replica.integrate(now)
        lived = now - turn.started
        # What a full engine let it wait is no speed: taken for one, prompts looked ten times as dear as they were.
        seconds = max(0.0, (result.seconds if result.seconds > 0 else lived) - result.engine_queue_seconds)
        beside = (replica.running_area - turn.area) / lived - 1.0 if lived > 0 else replica.running - 1.0
        beside = min(max(0.0, beside), replica.slots - 1.0)
        cached = turn.cached if result.cached_tokens is None else result.cached_tokens
        if not turn.crowded:
            # While it lived, the replica computed other prompts too, and it waited for them.
            others = replica.computed_until(now) - turn.mark - (request.prompt_tokens - turn.cached)
            computed = max(0, request.prompt_tokens - cached) + max(0, int(others))
            facts = (computed, result.generated_tokens, beside, seconds)
            replica.rates = replica.own_rates.observe(self._fleet, *facts)
            self._fleet.observe(*facts)
        if result.cached_tokens is not None:
            stats.predicted_cached += turn.cached
            stats.reported_cached += result.cached_tokens
            stats.residency_abs_error += abs(turn.cached - result.cached_tokens)
            stats.residency_prompt += request.prompt_tokens
            self._count("sched/reported_prompt_tokens", request.prompt_tokens)
            self._count("sched/reported_cached_tokens", result.cached_tokens)
            self._count("sched/predicted_cached_tokens", turn.cached)
            self._count("sched/residency_error_tokens", abs(turn.cached - result.cached_tokens))
            rate = result.cached_tokens / max(1, request.prompt_tokens)
            replica.hit_rate += 0.1 * (rate - replica.hit_rate)
        self.policy.observe(replica, request.prompt_tokens, result.cached_tokens)
        left = int(self.progress.remaining(trajectory.group, trajectory.turns, trajectory.output, 0).output_tokens)
        replica.work += left - trajectory.work
        trajectory.work = left

    def _record(self, turn: TurnState, placement: Placement, replica: ReplicaState, now: float) -> None:
        trajectory = turn.trajectory
        stats = self._stats[trajectory.id.validate]
        stats.placements += 1
        stats.queue_seconds.append(now - turn.submitted)
        self.queue_times.add(now - turn.submitted)
        stats.held += now > turn.submitted
        self._count("sched/held_turns", float(now > turn.submitted))
        stats.reasons[placement.reason] += 1
        self._count("sched/placements")
        self._count(f"sched/reason/{placement.reason}")
        self._explained.append((now, placement))
        if not trajectory.ran:
            return
        stats.returns += 1
        if trajectory.home is replica:
            stats.sticky += 1
        elif trajectory.home is not None:
            stats.migrations += 1
            self._count("sched/migrations")
            if not trajectory.home.draining and placement.reason != UPROOTED:
                trajectory.migrations += 1
                trajectory.moved_at_turn = trajectory.turns
            here = replica.residency.match(
                self.hashes_of(turn.request, replica), turn.request.prompt_tokens, trajectory.id
            )
            there = trajectory.home.residency.match(
                self.hashes_of(turn.request, trajectory.home), turn.request.prompt_tokens, trajectory.id
            )
            seconds = max(0, there - here) * replica.rates.prefill
            stats.migration_seconds += seconds
            self._count("sched/migration_seconds", seconds)

    # ---- inside: small things

    def _seat(self, trajectory: TrajectoryState) -> None:
        """What the trajectory takes of its replica's KV has changed."""
        home = trajectory.home
        if home is None:
            return
        if trajectory.running or trajectory.waiting:
            held = max(trajectory.context, trajectory.prompt) - trajectory.covered
            home.seats.hold(trajectory.seat, held + self.mean_outputs[trajectory.id.validate])
        else:
            home.seats.rest(trajectory.seat, *home.idle.promise(trajectory.id))

    def open_at(self, theta: float) -> dict[str, ReplicaState]:
        """Replicas that could admit some trajectory. Kept between decisions; only what has changed is looked at."""
        if theta != self._open_at:
            self._open = {r.id: r for r in self._alive if self._opens(r, theta)}
            self._open_at = theta
        else:
            for name in self.queue.touched:
                replica = self._replicas.get(name)
                if replica is not None and not replica.draining and self._opens(replica, theta):
                    self._open[name] = replica
                else:
                    self._open.pop(name, None)
        self.queue.touched.clear()
        return self._open

    def _opens(self, replica: ReplicaState, theta: float) -> bool:
        return is_open(replica, len(replica.resumed), theta, self.tool_seconds)

    @property
    def changes(self) -> int:
        """Grows with the events; a policy that looks at a few replicas at a time may rotate by it."""
        return self._submitted + self.sequence

    def _footprint(self, trajectory: TrajectoryState, tokens: int) -> None:
        home = trajectory.home
        if home is not None:
            home.tokens += tokens - trajectory.footprint
            home.tokens_train += 0 if trajectory.id.validate else tokens - trajectory.footprint
        trajectory.footprint = tokens

    def _grown(self, replica: ReplicaState, now: float) -> float:
        """Tokens that the replica's running turns have generated by now, as far as its speed tells."""
        if replica.running == 0:
            return 0.0
        speed = replica.rates.decode + replica.rates.interference * (replica.running - 1)
        most = replica.running * self.progress.turn_output[replica.running_train == 0].mean
        return min(max(0.0, replica.running * now - replica.start_sum) / max(speed, 1e-9), most)

    def _refresh_alive(self) -> None:
        self._alive = [r for r in self._replicas.values() if not r.draining]
        self.any_drafter = any(r.can_draft for r in self._alive)
        bounded = [r.kv_capacity for r in self._alive if r.kv_capacity < math.inf]
        self._cache_tokens = sum(bounded) / max(1, len(bounded))
        self._open_at = -1.0

    def _close_areas(self, replica: ReplicaState, now: float) -> None:
        replica.integrate(now)
        for index, validate in enumerate((False, True)):
            stats = self._stats[validate]
            stats.tokens_area[replica.id] = stats.tokens_area.get(replica.id, 0.0) + replica.area[index]
            stats.busy_seconds[replica.id] = stats.busy_seconds.get(replica.id, 0.0) + replica.busy[index]
        replica.area, replica.busy = [0.0, 0.0], [0.0, 0.0]

    def _theta_at(self, now: float) -> float:
        if self._now is None:
            return self._theta
        return self._theta + max(0.0, now - self._now) / max(MIN_TOOL_SECONDS, self.tool_seconds)

    def _advance(self, now: float) -> None:
        self._theta = self._theta_at(now)
        self._now = now if self._now is None else max(self._now, now)

    def _touch(self, replica: ReplicaState, now: float) -> None:
        """The replica is about to change."""
        replica.integrate(now)
        replica.version += 1
        self.queue.touched.add(replica.id)

    def _count(self, name: str, by: float = 1.0) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + by
