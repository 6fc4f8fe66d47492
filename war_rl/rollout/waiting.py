# SPDX-License-Identifier: Apache-2.0
"""Turns that wait, by kind, each kind in the order in which it should be served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from war_rl.rollout.state import ReplicaState, TurnState

_Entry = tuple[tuple[float, ...], int, str]


class Waiting:
    """All waiting turns.

    ``resumed``: turns of trajectories whose replica takes turns; kept per replica, oldest first.
    ``homeless``: turns of trajectories that have run, but whose replica is lost or draining; oldest first.
    ``fresh``: turns of trajectories that have not run; by rank (lowest first), then oldest first.
    """

    def __init__(self) -> None:
        self.all: OrderedDict[str, TurnState] = OrderedDict()
        self.homeless: OrderedDict[str, TurnState] = OrderedDict()
        self.blocked: dict[str, ReplicaState] = {}
        """Replicas with resumed turns waiting."""
        self.touched: set[str] = set()
        """Replicas that have changed since it was last looked whether they are open."""
        self._fresh: OrderedDict[str, TurnState] = OrderedDict()
        self._ranked: list[_Entry] = []

    def __len__(self) -> int:
        return len(self.all)

    def add(self, turn: TurnState) -> None:
        """Queue the turn where it belongs now."""
        self.all[turn.request.key] = turn
        self.enqueue(turn)

    def remove(self, turn: TurnState) -> None:
        """The turn waits no more."""
        del self.all[turn.request.key]
        self.dequeue(turn)

    def requeue(self, turn: TurnState, rank: tuple[float, ...] | None = None) -> None:
        """The turn's rank, or whether its replica drains, has changed."""
        self.dequeue(turn)
        if rank is not None:
            turn.rank = rank
        self.enqueue(turn)

    def oldest_fresh(self) -> Iterator[TurnState]:
        """Turns of new trajectories, oldest first."""
        return iter(self._fresh.values())

    def ranked_fresh(self) -> Iterator[TurnState]:
        """Turns of new trajectories in their order."""
        return (self.all[key] for _, _, key in self._ranked)

    def fresh_count(self) -> int:
        return len(self._ranked)

    def enqueue(self, turn: TurnState) -> None:
        """Put a turn that stays in ``all`` where it belongs now."""
        key, trajectory = turn.request.key, turn.trajectory
        home = trajectory.home
        if home is not None and not home.draining:
            home.resumed[key] = turn
            self.touched.add(home.id)
            home.version += 1
            self.blocked[home.id] = home
        elif trajectory.ran:
            self.homeless[key] = turn
        else:
            self._fresh[key] = turn
            insort(self._ranked, (turn.rank, turn.sequence, key))

    def dequeue(self, turn: TurnState) -> None:
        """Take a turn that stays in ``all`` out of its line; to be called before its trajectory's home changes."""
        key = turn.request.key
        if self._fresh.pop(key, None) is not None:
            at = bisect_left(self._ranked, (turn.rank, turn.sequence, key))
            del self._ranked[at]
            return
        if self.homeless.pop(key, None) is not None:
            return
        home = turn.trajectory.home
        assert home is not None, "a resumed turn's trajectory has a home"
        del home.resumed[key]
        self.touched.add(home.id)
        home.version += 1
        if not home.resumed:
            self.blocked.pop(home.id, None)
