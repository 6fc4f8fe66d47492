# SPDX-License-Identifier: Apache-2.0
"""One decision in the making: a policy's context over the live state, with its placements applied and taken back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from zlib import crc32

from war_rl.rollout.context import ReplicaView, TurnView
from war_rl.rollout.cost import Cost
from war_rl.rollout.progress import Remaining
from war_rl.rollout.state import (
    Numbers,
    Placement,
    ReplicaState,
    TrajectoryState,
    TurnState,
    expected_output,
    is_open,
    need,
)
from war_rl.types import GroupId

if TYPE_CHECKING:
    from war_rl.rollout.scheduler import GlobalScheduler


LOOK_AROUND = 4
"""So many replicas with waiting turns are looked at for moves in one decision, or up to twice as many."""
OUTPUT_STEPS = 20
"""Blocked turns are looked at anew where the expected output of a turn has changed by one part in so many."""
THETA_STEPS = 20
"""Idle promises decay in this many steps per usual tool time."""
ALIKE = 0.5
"""What a sibling counts for beyond itself while lengths are unknown, as a share of the expected tokens: of two
trajectories of independent, exponentially distributed length the shorter one has half of the mean (exactly), of two
siblings that are alike the whole."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What does not change about a turn while a decision is made. Lengths in tokens."""

    remaining: Remaining
    expected: int
    growth: int


class Planner:
    """Implements :class:`war_rl.rollout.context.Context`.

    Placements change the replicas' running numbers at once, so that the next choice sees them; :meth:`undo` puts the
    old numbers back. What they would change elsewhere (homes, cached prompts) is kept aside here.
    """

    def __init__(self, owner: GlobalScheduler, alive: list[ReplicaState], now: float, theta: float) -> None:
        self.now = now
        self.config = owner.config
        self.replicas: Sequence[ReplicaState] = alive
        self.placements: list[Placement] = []
        self.moved = False
        """Whether a placement since this was last cleared has made room on the replica it left."""
        self._owner = owner
        # Coarse, so that sums over idle trajectories need not be taken anew for every event.
        self._theta = math.floor(theta * THETA_STEPS) / THETA_STEPS
        self._placed: dict[str, TurnState] = {}
        self._saved: dict[str, tuple[ReplicaState, Numbers]] = {}
        self._homes: dict[TrajectoryState, ReplicaState] = {}
        self._claimed: list[tuple[ReplicaState, GroupId]] = []
        self._begun: list[tuple[ReplicaState, GroupId]] = []
        self._first_prompts: dict[tuple[str, GroupId], int] = {}
        self._coming: dict[str, set[int]] = {}
        """By replica, the blocks of the first prompts placed there: other groups may share their beginning."""
        self._covers: dict[TrajectoryState, int] = {}
        self._resumed_left: dict[str, int] = {}
        self._known: dict[str, _Facts] = {}
        self._looking: set[str] = set()
        self._spare: list[tuple[float, ReplicaState]] | None = None
        """Replicas where no turn waits to return, and their KV tokens beside the running turns; until one is placed."""
        # Before anything is placed: what is kept between decisions must not see tentative numbers.
        self._open = self._owners_open = owner.open_at(self._theta)
        """Open replicas by id: the owner's own, or a copy once it must differ."""
        self._sequence = owner.sequence
        self._outputs = owner.mean_outputs

    # ---- which turns wait

    def waiting(self) -> Iterator[TurnState]:
        return (t for k, t in self._owner.queue.all.items() if k not in self._placed and not _pinned(t))

    def blocked_replicas(self) -> Sequence[ReplicaState]:
        blocked = list(self._owner.queue.blocked.values())
        if not blocked:
            return blocked
        # Rotate by what has happened, not by what was decided: the same state gives the same decision.
        rounds = max(1, len(blocked) // LOOK_AROUND)
        at = self._owner.changes % rounds
        self._looking = {r.id for i, r in enumerate(blocked) if i % rounds == at}
        output = self._roughly
        return [
            r
            for r in blocked
            if r.blocked_version != (r.version, output) or r.id in self._saved or r.id in self._looking
        ]

    @property
    def _roughly(self) -> tuple[int, int]:
        """Expected output of a turn, coarse: every turn that ends moves it a little, and must not unblock them all."""
        training, validation = self._outputs
        return int(OUTPUT_STEPS * math.log(training)), int(OUTPUT_STEPS * math.log(validation))

    def look_around(self, replica: ReplicaView) -> bool:
        return replica.id in self._looking

    @property
    def any_open(self) -> bool:
        return bool(self._open)

    @property
    def any_drafter(self) -> bool:
        return self._owner.any_drafter

    def still_blocked(self, replica: ReplicaView) -> None:
        target = cast(ReplicaState, replica)
        if target.id not in self._saved:
            target.blocked_version = (target.version, self._roughly)

    def resumed(self, replica: ReplicaView) -> Iterator[TurnState]:
        line = cast(ReplicaState, replica).resumed.items()
        return iter(sorted((t for k, t in line if k not in self._placed), key=_seat))

    def homeless(self) -> Iterator[TurnState]:
        return (t for k, t in self._owner.queue.homeless.items() if k not in self._placed and not _pinned(t))

    def fresh(self) -> Iterator[TurnState]:
        return (t for t in self._owner.queue.ranked_fresh() if t.request.key not in self._placed)

    def fresh_by_age(self) -> Iterator[TurnState]:
        return (t for t in self._owner.queue.oldest_fresh() if t.request.key not in self._placed)

    @property
    def in_system(self) -> int:
        return self._owner.turn_count

    @property
    def queued(self) -> int:
        return len(self._owner.queue) - len(self._placed)

    # ---- about one turn

    def home(self, turn: TurnView) -> ReplicaState | None:
        trajectory = _state(turn).trajectory
        home = self._homes.get(trajectory, trajectory.home)
        return None if home is None or home.draining else home

    def has_run(self, turn: TurnView) -> bool:
        return _state(turn).trajectory.ran

    def in_tool_gap(self, turn: TurnView) -> bool:
        trajectory = _state(turn).trajectory
        return not trajectory.running and trajectory not in self._homes

    def may_migrate(self, turn: TurnView) -> bool:
        trajectory = _state(turn).trajectory
        rested = trajectory.migrations == 0 or (
            trajectory.turns - trajectory.moved_at_turn >= self.config.migrate_rest_turns
        )
        return trajectory.migrations < self.config.migrate_max and rested and self.in_tool_gap(turn)

    def sandbox_left(self, turn: TurnView) -> float:
        trajectory = _state(turn).trajectory
        if self.config.sandbox_limit_s <= 0 or not trajectory.ran:
            return math.inf
        return trajectory.started + self.config.sandbox_limit_s - self.now

    def remaining(self, turn: TurnView) -> Remaining:
        return self._facts(_state(turn)).remaining

    def _facts(self, turn: TurnState) -> _Facts:
        key = turn.request.key
        known = self._known.get(key)
        if known is None:
            owner = self._owner
            remaining = owner.remaining(turn)
            expected = self._expected(turn)
            known = _Facts(remaining, expected, owner.growth(turn, remaining, expected))
            self._known[key] = known
        return known

    def _expected(self, turn: TurnState) -> int:
        return expected_output(turn.request, self._outputs)

    def group_turns(self, turn: TurnView) -> float:
        return self._owner.progress.group_turns(_state(turn).trajectory.group)

    def cached(self, turn: TurnView, replica: ReplicaView) -> int:
        state, target = _state(turn), cast(ReplicaState, replica)
        request = turn.request
        hashes = self._owner.hashes_of(request, target)
        held = target.residency.match(hashes, request.prompt_tokens, request.trajectory)
        coming = self._first_prompts.get((target.id, state.trajectory.group), 0) if self._first_prompts else 0
        size = target.info.block_size
        if target.id in self._coming:
            coming = max(coming, _known(hashes, self._coming[target.id]) * size)
        return max(held, min(coming, (request.prompt_tokens - 1) // size * size)) if coming else held

    def siblings(self, turn: TurnView, replica: ReplicaView) -> int:
        return cast(ReplicaState, replica).shared.members(_state(turn).trajectory.group)

    def tree_size(self, replica: ReplicaView) -> int:
        return cast(ReplicaState, replica).residency.resident_blocks

    def fits(self, turn: TurnView, replica: ReplicaView) -> bool:
        target, state = cast(ReplicaState, replica), _state(turn)
        if target.running == 0 or target.kv_capacity == math.inf:
            return True
        trajectory = state.trajectory
        if self._homes.get(trajectory, trajectory.home) is target:
            covered = self._covers.get(trajectory, trajectory.covered)
        else:
            _, covered = self._would_claim(state, target)
        shared = target.shared.in_use(trajectory.group, *self._owner.first_prompt(state))
        return target.kv_running + shared + _need(state, covered, self._expected(state)) <= target.kv_capacity

    def seated(self, turn: TurnView, replica: ReplicaView) -> bool:
        target, state = cast(ReplicaState, replica), _state(turn)
        if target.kv_capacity == math.inf:
            return True
        trajectory = state.trajectory
        own = _need(state, self._covers.get(trajectory, trajectory.covered), self._expected(state))
        counted = not target.spare_idle(self._owner.tool_seconds)
        before = target.seats.before(trajectory.seat, self._theta, idle=counted)
        return before + target.shared.tokens + own <= target.kv_capacity

    def admits(self, turn: TurnView, replica: ReplicaView) -> bool:
        target, state = cast(ReplicaState, replica), _state(turn)
        if not self._is_open(target):
            return False
        if target.admitted == 0 or target.kv_capacity == math.inf:
            return True
        charge = self._charge(state, target)
        if target.running == 0 and charge + target.shared.tokens > target.kv_capacity:
            # It would not fit beside nothing. Waiting for room would be waiting for ever.
            return True
        # One token of slack: what decays never quite reaches nothing.
        if charge <= self._room(target) + 1.0:
            return True
        if target.id not in self._saved:
            target.rejected = (target.version, *self._stamp(state))
        return False

    def _room(self, target: ReplicaState) -> float:
        """KV tokens that may still be promised there; kept until something happens there, or idle promises decay."""
        tentative = target.id in self._saved
        version, theta, room = target.room
        if not tentative and theta == self._theta and version == target.version:
            return room
        room = target.kv_capacity - target.kv_admitted(self._theta, self._owner.tool_seconds)
        if not tentative:
            target.room = target.version, self._theta, room
        return room

    def _stamp(self, turn: TurnState) -> tuple[float, str, int, int]:
        """All that an admission depends on, the replica left out."""
        facts = self._facts(turn)
        return self._theta, turn.request.key, facts.growth, facts.expected

    def open_replicas(self, turn: TurnView | None = None) -> Sequence[ReplicaState]:
        if turn is None:
            return sorted(self._open.values(), key=_index)
        state = _state(turn)
        saved, stamp, theta = self._saved, self._stamp(state), self._theta
        least = self._least(state) + self._facts(state).growth - 1.0
        found = []
        # The room of most has not changed since it was last looked at, and is read here: many are asked, often.
        for name, replica in self._open.items():
            if name not in saved:
                version, at, room = replica.room
                if version != replica.version or at != theta:
                    room = self._room(replica)
                if replica.rejected[0] == replica.version and replica.rejected[1:] == stamp:
                    continue
            else:
                room = self._room(replica)
            if least <= room or replica.running == 0:
                found.append(replica)
        return sorted(found, key=_index)

    def _least(self, turn: TurnState) -> int:
        """KV that the running turn would hold at least, wherever it goes: all but its first prompt. In tokens."""
        _, first = self._owner.first_prompt(turn)
        return _need(turn, first, self._expected(turn))

    @property
    def any_spare(self) -> bool:
        return bool(self._spared())

    def spare_replicas(self, turn: TurnView) -> Sequence[ReplicaState]:
        least = self._least(_state(turn))
        return [replica for room, replica in self._spared() if least <= room]

    def _spared(self) -> list[tuple[float, ReplicaState]]:
        if self._spare is None:
            free = ((math.inf if r.running == 0 else r.kv_free, r) for r in self.replicas if not self._line(r))
            self._spare = [(room, replica) for room, replica in free if room > 0]
        return self._spare

    def _is_open(self, replica: ReplicaState) -> bool:
        return is_open(replica, self._line(replica), self._theta, self._owner.tool_seconds)

    def _line(self, replica: ReplicaState) -> int:
        """How many turns wait to return there."""
        left = self._resumed_left.get(replica.id)
        return len(replica.resumed) if left is None else left

    def queue_cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> float:
        return self._queue(cast(ReplicaState, replica), ahead)

    def load_cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> float:
        target = cast(ReplicaState, replica)
        return self._queue(target, ahead) + self._interference(_state(turn), target)

    def load_costs(self, turn: TurnView, replicas: Sequence[ReplicaView]) -> list[float]:
        state, now = _state(turn), self.now
        output, home = self._facts(state).remaining.output_tokens, state.trajectory.home
        alike, group = self._alike(state), state.trajectory.group
        costs = []
        for target in cast(Sequence[ReplicaState], replicas):
            if target is home or target.running >= target.slots:
                costs.append(self.load_cost(turn, target))
                continue
            siblings = alike * target.shared.members(group) if alike else 0.0
            interference = self._slowdown(target, output, target.admitted, target.work, siblings)
            queue = target.prefill_free_at - now
            costs.append(queue + interference if queue > 0.0 else interference)
        return costs

    def prefill_cost(self, turn: TurnView, replica: ReplicaView) -> float:
        return (turn.request.prompt_tokens - self.cached(turn, replica)) * replica.rates.prefill

    def cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> Cost:
        target = cast(ReplicaState, replica)
        interference = self._interference(_state(turn), target)
        return Cost(self._queue(target, ahead), self.prefill_cost(turn, target), interference)

    def tie(self, turn: TurnView, salt: str) -> int:
        return crc32(f"{self._owner.seed}/{salt}/{turn.request.key}".encode())

    # ---- the decision

    def place(
        self, turn: TurnView, replica: ReplicaView, reason: str, costs: Mapping[str, float] | None = None
    ) -> None:
        state, target = _state(turn), cast(ReplicaState, replica)
        key = turn.request.key
        if key in self._placed or state.replica is not None:
            raise ValueError(f"turn {key!r} is placed twice in one decision")
        trajectory = state.trajectory
        home = self._homes.get(trajectory, trajectory.home)
        if home is not target and not self.in_tool_gap(turn):
            raise ValueError(
                f"turn {key!r}: its trajectory runs on {home and home.id!r} and cannot move to {target.id!r}"
            )
        self._apply(state, target, home)
        self._placed[key] = state
        self.placements.append(Placement(key, target.id, reason, costs or {}))
        # Turns that wait beside this one cannot be anywhere else; without this they would wait for the next event.
        for other in sorted(trajectory.waiting):
            if other not in self._placed and home is not target:
                waiting = self._owner.queue.all[other]
                self._apply(waiting, target, target)
                self._placed[other] = waiting
                self.placements.append(Placement(other, target.id, "sticky_parallel", {}))

    def undo(self) -> None:
        """Put every number back that the placements changed."""
        for replica, numbers in self._saved.values():
            replica.restore(numbers)
        for replica, group in self._begun:
            replica.shared.end(group)
        for replica, group in reversed(self._claimed):
            replica.shared.unclaim(group)

    # ---- inside

    def _apply(self, turn: TurnState, target: ReplicaState, home: ReplicaState | None) -> None:
        self._save(target)
        self._spare = None
        trajectory, request = turn.trajectory, turn.request
        facts = self._facts(turn)
        cached = self.cached(turn, target)
        was_idle = not trajectory.running and trajectory not in self._homes
        if home is not target:
            if home is not None:
                self.moved = True
                self._save(home)
                home.idle_taken += home.idle.value(trajectory.id, self._theta)
                home.admitted -= 1
                home.tokens -= trajectory.footprint
                home.work -= trajectory.work
            covered = self._covers[trajectory] = self._claim(turn, target)
            target.admitted += 1
            self._sequence += 1
            target.last_first = self._sequence
            target.work += int(facts.remaining.output_tokens)
        else:
            covered = self._covers.get(trajectory, trajectory.covered)
            if was_idle:
                target.idle_taken += target.idle.value(trajectory.id, self._theta)
                target.tokens -= trajectory.footprint
            if request.key in target.resumed:
                left = self._resumed_left.get(target.id, len(target.resumed))
                self._resumed_left[target.id] = left - 1
        if home is not None and home is not target and request.key in home.resumed:
            self._resumed_left[home.id] = self._resumed_left.get(home.id, len(home.resumed)) - 1
        if was_idle or home is not target:
            target.kv_growth += facts.growth
        target.running += 1
        target.shared.begin(trajectory.group)
        self._begun.append((target, trajectory.group))
        target.kv_running += _need(turn, covered, facts.expected)
        target.tokens += request.prompt_tokens + facts.expected
        busy_until = max(self.now, target.prefill_free_at)
        target.prefill_free_at = busy_until + (request.prompt_tokens - cached) * target.rates.prefill
        self._homes[trajectory] = target
        self._look_whether_open(target)
        if home is not None and home is not target:
            self._look_whether_open(home)

    def _look_whether_open(self, replica: ReplicaState) -> None:
        is_open = self._is_open(replica) and not replica.draining
        if is_open != (replica.id in self._open):
            if self._open is self._owners_open:
                self._open = dict(self._open)
            if is_open:
                self._open[replica.id] = replica
            else:
                del self._open[replica.id]

    def _claim(self, turn: TurnState, target: ReplicaState) -> int:
        """Really claim the first prompt: what other groups share with it must be seen. :meth:`undo` gives it back."""
        group = turn.trajectory.group
        hashes, tokens = self._owner.first_prompt(turn)
        covered = target.shared.claim(group, hashes, tokens)
        self._claimed.append((target, group))
        self._first_prompts[(target.id, group)] = covered
        self._coming.setdefault(target.id, set()).update(hashes)
        return covered

    def _charge(self, turn: TurnState, target: ReplicaState) -> int:
        """KV that admitting the turn's trajectory would promise, in tokens."""
        facts = self._facts(turn)
        extra, covered = self._would_claim(turn, target)
        return extra + _need(turn, covered, facts.expected) + facts.growth

    def _would_claim(self, turn: TurnState, target: ReplicaState) -> tuple[int, int]:
        """Tokens that claiming its first prompt would add there, and those of its prompt that the claim would cover."""
        group = turn.trajectory.group
        hashes, tokens = self._owner.first_prompt(turn)
        covered = target.shared.covered(group, hashes, tokens)
        if covered is not None:
            return 0, covered
        covered = len(hashes) * target.info.block_size if hashes else tokens
        return target.shared.price(group, hashes, tokens), covered

    def _queue(self, target: ReplicaState, ahead: int) -> float:
        rates = target.rates
        queue = target.prefill_free_at - self.now
        if queue < 0.0:
            queue = 0.0
        over = target.running - target.slots + 1
        if over > 0:
            queue += rates.turn_seconds * over / target.slots
        if ahead:
            queue += rates.turn_seconds * ahead / max(1, target.running)
        return queue

    def _interference(self, turn: TurnState, target: ReplicaState) -> float:
        """Seconds, for the rest of the trajectory.

        Counts the tokens it will generate beside each other trajectory that lives there: at most its own for each, and
        at most all that they still have to generate.
        """
        trajectory = turn.trajectory
        others, work = target.admitted, target.work
        if trajectory.home is target:
            others -= 1
            work -= trajectory.work
        siblings = self._alike(turn) * target.shared.members(trajectory.group)
        return self._slowdown(target, self._facts(turn).remaining.output_tokens, others, work, siblings)

    def _slowdown(self, target: ReplicaState, output: float, others: int, work: float, siblings: float) -> float:
        """See :meth:`_interference`; ``siblings``: what those of its group count for beyond themselves."""
        beside = output * others
        return target.rates.interference * ((beside if beside < work else work) + output * siblings)

    def _alike(self, turn: TurnState) -> float:
        """What a sibling counts for beyond itself where this trajectory begins, as a share of its tokens.

        Members of a group are alike in length: where one is long, all are, and the replica that has most of them is
        what the step waits for. Where lengths are known that is seen without this, and where drafts are made, siblings
        that see each other's text as it is written are worth more than that.
        """
        unknown = not turn.trajectory.ran and self._facts(turn).remaining.source == "workload"
        return ALIKE if unknown and not self._owner.any_drafter else 0.0

    def _save(self, replica: ReplicaState) -> None:
        if replica.id not in self._saved:
            self._saved[replica.id] = (replica, replica.numbers())


def _state(turn: TurnView) -> TurnState:
    assert isinstance(turn, TurnState)
    return turn


def _known(hashes: Sequence[int], blocks: set[int]) -> int:
    """How many of a prompt's blocks are among ``blocks``: as hashes are chained, a first part of it."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in blocks:
            low = middle + 1
        else:
            high = middle
    return low


def _pinned(turn: TurnState) -> bool:
    """Whether it must wait for another turn of its trajectory that still runs on a draining replica."""
    trajectory = turn.trajectory
    return bool(trajectory.running) and trajectory.home is not None and trajectory.home.draining


def _need(turn: TurnState, covered: int, expected: int) -> int:
    return need(turn.request.prompt_tokens, covered, expected)


def _seat(turn: TurnState) -> tuple[int, int]:
    return turn.trajectory.seat, turn.sequence


def _index(replica: ReplicaState) -> int:
    return replica.index
