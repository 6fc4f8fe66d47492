# SPDX-License-Identifier: Apache-2.0
"""Policies that choose a trajectory's first replica and then keep it there. Nothing waits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from war_rl.rollout.context import Context, PerTurnPolicy, ReplicaView, TurnView


class Sticky(PerTurnPolicy):
    """A turn returns to its trajectory's replica; only where that is lost or draining is a new one chosen."""

    def choose(self, turn: TurnView, context: Context) -> tuple[ReplicaView, str, Mapping[str, float]]:
        home = context.home(turn)
        if home is not None:
            return home, "sticky", {home.id: self.load(home)}
        replica = self.first(turn, context)
        reason = "home_gone" if context.has_run(turn) else "first"
        return replica, reason, {r.id: self.load(r) for r in context.replicas}

    @abstractmethod
    def first(self, turn: TurnView, context: Context) -> ReplicaView:
        """A replica for a trajectory that has none."""

    @abstractmethod
    def load(self, replica: ReplicaView) -> float:
        """What is compared; shown in the placement's costs."""


class RoundRobin(Sticky):
    """First placement: the replica that was chosen longest ago."""

    def first(self, turn: TurnView, context: Context) -> ReplicaView:
        return min(context.replicas, key=lambda r: r.last_first)

    def load(self, replica: ReplicaView) -> float:
        return float(replica.last_first)


class StickyLeastInflight(Sticky):
    """verl's own router (verl/workers/rollout/router.py): fewest running requests, ties by lot, sticky for ever."""

    def first(self, turn: TurnView, context: Context) -> ReplicaView:
        fewest = min(r.running for r in context.replicas)
        tied = [r for r in context.replicas if r.running == fewest]
        return tied[context.tie(turn, "inflight") % len(tied)]

    def load(self, replica: ReplicaView) -> float:
        return float(replica.running)
