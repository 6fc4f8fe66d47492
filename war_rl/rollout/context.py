# SPDX-License-Identifier: Apache-2.0
"""What a policy sees and says. It reads replicas and turns, and places turns; it cannot change anything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from war_rl.config import SchedulerConfig
from war_rl.rollout.cost import Cost, Rates
from war_rl.rollout.progress import Remaining
from war_rl.types import TurnRequest

UPROOTED = "cache_lost"
"""Reason of a move that costs nothing, because nothing of the trajectory was left where it lived. Not counted against
``migrate_max``."""


class ReplicaView(Protocol):
    """One replica that takes turns. The placements already made in this decision are included in the numbers."""

    @property
    def id(self) -> str: ...
    @property
    def running(self) -> int:
        """Turns placed there and not yet over."""

    @property
    def admitted(self) -> int:
        """Trajectories that live there: running, waiting for a tool, or waiting to run again."""

    @property
    def tokens(self) -> int:
        """Prompt and expected tokens of running turns, and the context of the other admitted trajectories."""

    @property
    def kv_capacity(self) -> float:
        """KV tokens that may be promised; infinite where the engine did not say."""

    @property
    def last_first(self) -> int:
        """Grows each time a trajectory comes to live there; ties go to the smallest, so that no replica is flooded."""

    @property
    def hit_rate(self) -> float:
        """Recent share of prompt tokens served from the cache, as reported."""

    @property
    def can_draft(self) -> bool:
        """Whether it drafts while it runs little: then the tail is faster there."""

    @property
    def rates(self) -> Rates:
        """Measured speed."""


class TurnView(Protocol):
    """One waiting turn."""

    @property
    def request(self) -> TurnRequest: ...
    @property
    def submitted(self) -> float: ...


class Context(Protocol):
    """One decision."""

    @property
    def now(self) -> float: ...
    @property
    def config(self) -> SchedulerConfig: ...
    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Replicas that take turns, in the order in which they were added; never empty."""

    # ---- which turns wait

    def waiting(self) -> Iterator[TurnView]:
        """All waiting turns, oldest first."""

    def blocked_replicas(self) -> Sequence[ReplicaView]:
        """Replicas to which waiting turns want to return: those where something has changed, and those to look around
        for."""

    def look_around(self, replica: ReplicaView) -> bool:
        """Whether its waiting turns may be moved now. Where many replicas are blocked, they take turns, so that a
        decision stays short."""

    @property
    def any_open(self) -> bool:
        """Whether there is an open replica (see :meth:`open_replicas`)."""

    @property
    def any_drafter(self) -> bool:
        """Whether any of the replicas drafts."""

    def still_blocked(self, replica: ReplicaView) -> None:
        """None of the turns that want to return there fits: need not be looked at again until something changes."""

    def resumed(self, replica: ReplicaView) -> Iterator[TurnView]:
        """Turns that want to return to this replica, those first whose trajectory came to live there first."""

    def homeless(self) -> Iterator[TurnView]:
        """Turns of trajectories that have run, but whose replica is lost or draining, oldest first."""

    def fresh(self) -> Iterator[TurnView]:
        """First turns of new trajectories: one probe per group, then longest expected first."""

    def fresh_by_age(self) -> Iterator[TurnView]:
        """First turns of new trajectories, oldest first."""

    @property
    def in_system(self) -> int:
        """Turns that wait or run."""

    @property
    def queued(self) -> int:
        """Turns that wait and are not yet placed in this decision."""

    # ---- about one turn

    def home(self, turn: TurnView) -> ReplicaView | None:
        """The replica where the turn's trajectory lives, if it takes turns."""

    def has_run(self, turn: TurnView) -> bool:
        """Whether the turn's trajectory has had a turn placed before."""

    def in_tool_gap(self, turn: TurnView) -> bool:
        """Whether no other turn of its trajectory runs, so that it could move."""

    def may_migrate(self, turn: TurnView) -> bool:
        """In a tool gap, with moves left and rested from the last."""

    def sandbox_left(self, turn: TurnView) -> float:
        """Seconds until the trajectory's sandbox dies; infinite when no limit is configured."""

    def remaining(self, turn: TurnView) -> Remaining:
        """What the trajectory still has before it."""

    def group_turns(self, turn: TurnView) -> float:
        """Expected turns of a whole trajectory of its group."""

    def cached(self, turn: TurnView, replica: ReplicaView) -> int:
        """Prompt tokens the replica's cache would serve."""

    def siblings(self, turn: TurnView, replica: ReplicaView) -> int:
        """Members of its group that live there, itself included."""

    def tree_size(self, replica: ReplicaView) -> int:
        """KV blocks the replica holds."""

    def fits(self, turn: TurnView, replica: ReplicaView) -> bool:
        """Whether the KV of the running turns and this one fits, or nothing runs there."""

    def seated(self, turn: TurnView, replica: ReplicaView) -> bool:
        """Whether the KV of its trajectory fits beside that of all that came to live on this replica, its home, before
        it: where trajectories grew beyond what was expected of them, the last to come have no seat."""

    def admits(self, turn: TurnView, replica: ReplicaView) -> bool:
        """Whether the expected KV of everything admitted and this trajectory fits.

        Also where nothing is admitted, or nothing runs and it would not even fit alone.
        """

    def open_replicas(self, turn: TurnView | None = None) -> Sequence[ReplicaView]:
        """Replicas that could admit some trajectory: KV to promise and nobody waiting to return.

        With ``turn``, without those that are known not to admit it.
        """

    @property
    def any_spare(self) -> bool:
        """Whether there is a replica that :meth:`spare_replicas` could name."""

    def spare_replicas(self, turn: TurnView) -> Sequence[ReplicaView]:
        """Replicas where no turn waits to return and the KV of the running turns may leave room for this one, whatever
        is promised."""

    def queue_cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> float:
        """Seconds until the replica begins with the turn.

        ``ahead``: turns that wait for KV on this replica in front of this one, itself included when it does not fit.
        """

    def load_cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> float:
        """Seconds of queue and interference: a lower bound of :meth:`cost` that looks at no cache."""

    def load_costs(self, turn: TurnView, replicas: Sequence[ReplicaView]) -> list[float]:
        """:meth:`load_cost` of each of these replicas, in their order."""

    def prefill_cost(self, turn: TurnView, replica: ReplicaView) -> float:
        """Seconds to compute what the replica's cache does not hold of the prompt."""

    def cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> Cost:
        """Cost of running the turn, and the rest of its trajectory, there."""

    def tie(self, turn: TurnView, salt: str) -> int:
        """A number that looks random but follows from the seed, the turn and ``salt``."""

    # ---- the decision

    def place(
        self, turn: TurnView, replica: ReplicaView, reason: str, costs: Mapping[str, float] | None = None
    ) -> None:
        """The turn starts there now."""


class Policy(ABC):
    """Decides. Keeps no state that :meth:`plan` changes: the same context gives the same placements."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config

    @abstractmethod
    def plan(self, context: Context) -> None:
        """Place the waiting turns that should start now; the others keep waiting."""

    def observe(self, replica: ReplicaView, prompt_tokens: int, cached_tokens: int | None) -> None:  # noqa: B027
        """A turn has ended on the replica. Most policies need not know."""

    def forget(self, replica_id: str) -> None:  # noqa: B027
        """The replica is gone."""

    def gauges(self) -> Mapping[str, float]:
        """Values to show, by name below ``sched/policy/``."""
        return {}


class PerTurnPolicy(Policy):
    """A policy that holds nothing back: each turn is placed as it comes."""

    def plan(self, context: Context) -> None:
        for turn in context.waiting():
            home = context.home(turn)
            if home is not None and not context.in_tool_gap(turn):
                # Another turn of the trajectory runs there: only a tool gap would let it go elsewhere.
                context.place(turn, home, "sticky_parallel")
                continue
            replica, reason, costs = self.choose(turn, context)
            context.place(turn, replica, reason, costs)

    @abstractmethod
    def choose(self, turn: TurnView, context: Context) -> tuple[ReplicaView, str, Mapping[str, float]]:
        """The replica for this turn, why, and what was compared."""
