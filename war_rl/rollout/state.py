# SPDX-License-Identifier: Apache-2.0
"""Records of the scheduler: replicas, trajectories, turns, and the KV each replica has promised."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from war_rl.rollout.cost import OwnRates, Rates, ReplicaRates
from war_rl.rollout.residency import Residency
from war_rl.rollout.seats import Seats
from war_rl.rollout.shared import SharedPrompts
from war_rl.types import GroupId, TrajectoryId, TurnRequest


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a replica says about itself at start.

    Attributes:
        id: unique name.
        kv_tokens: KV cache capacity in tokens, as the engine reports it; 0 where unknown (no bound is kept then).
        block_size: tokens per KV block.
        can_draft: whether drafting is possible there at all.
        max_running: most requests the engine runs at once; 0 where unknown (no bound is kept then).
    """

    id: str
    kv_tokens: int
    block_size: int
    can_draft: bool = True
    max_running: int = 0


UNBOUNDED = 1 << 30
"""Requests that no engine has."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One decision: the turn ``key`` starts now on ``replica_id``.

    ``costs`` maps the ids of the replicas that were compared to what the policy compared (it documents the unit).
    """

    key: str
    replica_id: str
    reason: str
    costs: Mapping[str, float] = field(default_factory=dict)


class IdleLedger:
    """KV promised to trajectories that wait for a tool, each counted less the longer it stays away.

    An amount counts in full for ``patience`` usual tool times, then decays by e per usual tool time. ``theta`` is time
    measured in usual tool times, so that one number ages all entries although the usual time is still being learned.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._entries: dict[TrajectoryId, _Idle] = {}
        self._fresh: deque[_Idle] = deque()
        self._full = 0
        self.amount = 0
        """Sum over all entries, whatever their age."""
        self._decayed = 0.0
        self._at = 0.0
        self._version = 0
        self._memo = (-1.0, -1, 0.0)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, trajectory: TrajectoryId, amount: int, theta: float) -> None:
        """The trajectory has gone to its tool."""
        self.remove(trajectory, theta)
        entry = self._entries[trajectory] = _Idle(trajectory, max(theta, self._at), amount)
        self._fresh.append(entry)
        self._full += amount
        self.amount += amount

    def promise(self, trajectory: TrajectoryId) -> tuple[int, float]:
        """What the trajectory counts for, and until when in full; nothing for an unknown one."""
        entry = self._entries.get(trajectory)
        return (entry.amount, entry.since + self._patience) if entry is not None else (0, 0.0)

    def value(self, trajectory: TrajectoryId, theta: float) -> float:
        """What the trajectory counts for now; 0 for an unknown one."""
        entry = self._entries.get(trajectory)
        return self._weighed(entry, theta) if entry is not None else 0.0

    def remove(self, trajectory: TrajectoryId, theta: float) -> None:
        """The trajectory has come back, or is over."""
        self._advance(theta)
        self._version += 1
        entry = self._entries.pop(trajectory, None)
        if entry is None:
            return
        self.amount -= entry.amount
        if entry.decaying:
            self._decayed -= self._weighed(entry, self._at)
        else:
            self._full -= entry.amount
        entry.amount = 0
        if not self._entries:
            # Nothing is owed: rounding must not accumulate.
            self._fresh.clear()
            self._full, self._decayed = 0, 0.0

    def total(self, theta: float) -> float:
        """Sum over all entries at ``theta``, or at the last change where that is later. Changes nothing."""
        theta = max(theta, self._at)
        at, version, known = self._memo
        if at == theta and version == self._version:
            return known
        total = self._full + self._decayed * math.exp(self._at - theta)
        for entry in self._fresh:
            if entry.since + self._patience > theta:
                break
            total += self._weighed(entry, theta) - entry.amount
        total = max(0.0, total)
        self._memo = (theta, self._version, total)
        return total

    def _weighed(self, entry: _Idle, theta: float) -> float:
        return entry.amount * math.exp(-max(0.0, theta - entry.since - self._patience))

    def _advance(self, theta: float) -> None:
        """Move entries past their patience to the decaying sum."""
        if theta <= self._at:
            return
        self._decayed *= math.exp(self._at - theta)
        self._at = theta
        while self._fresh and self._fresh[0].since + self._patience <= theta:
            entry = self._fresh.popleft()
            entry.decaying = True
            self._full -= entry.amount
            self._decayed += self._weighed(entry, theta)


@dataclass(slots=True, eq=False)
class _Idle:
    trajectory: TrajectoryId
    since: float
    amount: int
    decaying: bool = False


Numbers = tuple[int, int, int, int, int, float, float, int, int]


class ReplicaState:
    """Everything known about one replica. Policies read it through :class:`war_rl.rollout.context.ReplicaView`."""

    __slots__ = (
        "admitted",
        "area",
        "blocked_version",
        "busy",
        "draining",
        "hit_rate",
        "id",
        "idle",
        "idle_taken",
        "index",
        "info",
        "kv_capacity",
        "kv_growth",
        "kv_running",
        "last_first",
        "own_rates",
        "prefill_free_at",
        "prefilled",
        "rates",
        "rejected",
        "residency",
        "resumed",
        "room",
        "running",
        "running_area",
        "running_train",
        "seats",
        "shared",
        "since",
        "slots",
        "start_sum",
        "tokens",
        "tokens_train",
        "version",
        "work",
    )

    def __init__(self, info: ReplicaInfo, fleet: ReplicaRates, patience: float, fill: float, now: float) -> None:
        self.info = info
        self.id = info.id
        self.index = 0
        self.draining = False
        self.version = 0
        """Grows with every change that could let a waiting turn start here."""
        self.blocked_version: tuple[int, tuple[int, int]] = (-1, (0, 0))
        """The version, and the expected output of a turn, at which none of those waiting to return could start."""
        self.rejected: tuple[int, float, str, int, int] = (-1, 0.0, "", 0, 0)
        """Version, time, turn and its expected KV with which the turn's trajectory was not admitted."""
        self.residency = Residency(info.kv_tokens, info.block_size)
        self.rates: Rates = fleet
        self.own_rates = OwnRates()
        self.prefilled = 0
        """Prompt tokens it was given to compute so far."""
        self.idle = IdleLedger(patience)
        self.shared = SharedPrompts(info.block_size)
        self.seats = Seats()
        """Trajectories that live here, in the order in which they came."""
        self.room: tuple[int, float, float] = (-1, 0.0, 0.0)
        """What the planner knows of it: version and time, and the KV tokens that could still be promised then."""
        self.resumed: OrderedDict[str, TurnState] = OrderedDict()
        self.hit_rate = 1.0
        self.kv_capacity = 0.0
        self.slots = UNBOUNDED
        """Most requests the engine runs at once, as far as anybody knows."""
        self.resize(info, fill)
        self.running = self.admitted = self.tokens = self.kv_running = self.kv_growth = self.work = 0
        self.running_train = self.tokens_train = 0
        self.idle_taken = 0.0
        self.prefill_free_at = now
        self.last_first = 0
        self.since = now
        self.running_area = 0.0
        self.start_sum = 0.0
        """Sum of the start times of the running turns, in seconds."""
        self.area = [0.0, 0.0]
        self.busy = [0.0, 0.0]

    @property
    def can_draft(self) -> bool:
        return self.info.can_draft

    def resize(self, info: ReplicaInfo, fill: float) -> None:
        self.info = info
        self.kv_capacity = fill * info.kv_tokens if info.kv_tokens > 0 else math.inf
        self.slots = info.max_running if info.max_running > 0 else UNBOUNDED

    def rebuild_residency(self, info: ReplicaInfo) -> None:
        """The engine came back with another cache: nothing is resident."""
        self.residency = Residency(info.kv_tokens, info.block_size)

    @property
    def kv_free(self) -> float:
        """KV tokens beside those of the running turns; more than a turn may take whose group runs nothing there."""
        return self.kv_capacity - self.kv_running - self.shared.busy

    def kv_admitted(self, theta: float, tool_seconds: float) -> float:
        """Expected KV of the admitted trajectories, in tokens; in tools only where it is worth keeping."""
        idle = 0.0 if self.spare_idle(tool_seconds) else max(0.0, self.idle.total(theta) - self.idle_taken)
        return self.kv_running + self.kv_growth + self.shared.tokens + idle

    def spare_idle(self, tool_seconds: float) -> bool:
        """Whether the text of trajectories in their tools is worth less than what could run in its place.

        To compute it again delays the turn that comes back and all that run then. Its KV, for as long as a tool takes,
        lets one more turn run, which slows the others down. Both are in seconds of trajectories.
        """
        count = len(self.idle)
        if not count:
            return False
        rates = self.rates
        usual = self.admitted * rates.turn_seconds / (rates.turn_seconds + tool_seconds)
        running = max(self.running, usual)
        lost = self.idle.amount / count * rates.prefill * (running + 1)
        return lost < tool_seconds * rates.decode / (rates.decode + rates.interference * running)

    def numbers(self) -> Numbers:
        """What a tentative placement changes, for :meth:`restore`."""
        return (
            self.running,
            self.admitted,
            self.tokens,
            self.kv_running,
            self.kv_growth,
            self.idle_taken,
            self.prefill_free_at,
            self.last_first,
            self.work,
        )

    def restore(self, numbers: Numbers) -> None:
        (
            self.running,
            self.admitted,
            self.tokens,
            self.kv_running,
            self.kv_growth,
            self.idle_taken,
            self.prefill_free_at,
            self.last_first,
            self.work,
        ) = numbers

    def computed_until(self, now: float) -> float:
        """Prompt tokens it has computed so far, as far as its speed tells."""
        return self.prefilled - max(0.0, self.prefill_free_at - now) / self.rates.prefill

    def integrate(self, now: float) -> None:
        """Account the time since the last change. To be called before ``running`` or ``tokens`` change."""
        span = now - self.since
        if span <= 0.0:
            return
        self.since = now
        self.running_area += span * self.running
        self.area[0] += span * self.tokens_train
        self.area[1] += span * (self.tokens - self.tokens_train)
        self.busy[0] += span if self.running_train else 0.0
        self.busy[1] += span if self.running > self.running_train else 0.0


@dataclass(slots=True, eq=False)
class TrajectoryState:
    """One live trajectory. Token counts are those of its last finished turn."""

    id: TrajectoryId
    group: GroupId
    client: str = ""
    home: ReplicaState | None = None
    ran: bool = False
    turns: int = 0
    output: int = 0
    context: int = 0
    prompt: int = 0
    """Tokens of the prompt of the turn that started last."""
    footprint: int = 0
    work: int = 0
    growth: int = 0
    covered: int = 0
    first_blocks: int = 0
    first_tokens: int = 0
    started: float = 0.0
    idle_since: float = -1.0
    migrations: int = 0
    moved_at_turn: int = -1
    seat: int = 0
    """Grows with every trajectory that comes to live somewhere."""
    visited: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class TurnState:
    """One submitted turn, waiting (``replica`` is None) or running."""

    request: TurnRequest
    trajectory: TrajectoryState
    submitted: float
    sequence: int
    rank: tuple[float, ...] = ()
    replica: ReplicaState | None = None
    started: float = 0.0
    need: int = 0
    cached: int = 0
    area: float = 0.0
    mark: float = 0.0
    """What the replica had computed when it came, in prompt tokens."""
    crowded: bool = False
    """Whether the engine's batch was full when it came: its seconds then measure a queue, not the engine's speed."""


def expected_output(turn: TurnRequest, means: tuple[int, int]) -> int:
    """Tokens the turn is expected to generate; ``means``: those of a turn of training and of validation, at least 1."""
    expected = means[turn.trajectory.validate]
    return min(expected, turn.max_tokens) if turn.max_tokens > 0 else expected


def need(prompt_tokens: int, covered: int, expected: int) -> int:
    """KV tokens a running turn is expected to hold, beyond ``covered`` ones that its group's claim pays for."""
    return max(1, prompt_tokens - min(covered, prompt_tokens) + expected)


def is_open(replica: ReplicaState, resumed: int, theta: float, tool_seconds: float) -> bool:
    """Whether the replica could admit some trajectory: nobody waits to return, KV is left.

    A full batch is no reason to hold a turn: the engine's own queue serves first come first served, which lets all
    trajectories advance together, and a turn that waits there holds no KV.
    """
    if resumed:
        return False
    return replica.running == 0 or replica.kv_admitted(theta, tool_seconds) < replica.kv_capacity
