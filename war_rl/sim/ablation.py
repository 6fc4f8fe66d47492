# SPDX-License-Identifier: Apache-2.0
"""War-RL with one part left out, and with wrong estimates; only for measuring what a part is worth."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Any, cast

from war_rl.rollout.context import Context, ReplicaView, TurnView
from war_rl.rollout.cost import Cost
from war_rl.rollout.policies.cost import CostPolicy
from war_rl.rollout.progress import Progress, Remaining
from war_rl.types import GroupId


class _Masked:
    """A context of which some answers are taken away."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _AnyPlace(_Masked):
    """For a new trajectory all replicas with room cost the same, so that they take turns."""

    def cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> Cost:
        return self._context.cost(turn, replica, ahead) if self._context.has_run(turn) else Cost(0.0, 0.0, 0.0)

    def load_cost(self, turn: TurnView, replica: ReplicaView, ahead: int = 0) -> float:
        return self._context.load_cost(turn, replica, ahead) if self._context.has_run(turn) else 0.0


class _ByAge(_Masked):
    """New trajectories in the order in which they came."""

    def fresh(self) -> Iterator[TurnView]:
        return self._context.fresh_by_age()


class WithoutPlacement(CostPolicy):
    def plan(self, context: Context) -> None:
        super().plan(cast(Context, _AnyPlace(context)))


class WithoutOrder(CostPolicy):
    def plan(self, context: Context) -> None:
        super().plan(cast(Context, _ByAge(context)))


class WrongProgress(Progress):
    """Estimates of what is still to come, wrong by a factor that is each group's own.

    Args:
        known: the estimates to distort.
        bias: factor on all of them.
        sigma: of the logarithm of each group's factor.
    """

    def __init__(self, known: Progress, bias: float, sigma: float) -> None:
        self.__dict__.update(known.__dict__)
        self._bias, self._sigma = bias, sigma

    def remaining(
        self, group: GroupId, turns_done: int, output_done: int, context: int, max_tokens: int = 0
    ) -> Remaining:
        found = super().remaining(group, turns_done, output_done, context, max_tokens)
        factor = self._bias * math.exp(self._sigma * _normal(group.uid))
        return replace(
            found,
            turns=max(1.0, found.turns * factor),
            output_tokens=max(1.0, found.output_tokens * factor),
            context_tokens=found.context_tokens * factor,
        )


def _normal(name: str) -> float:
    """A normal number that the name decides: twelve uniform ones, less their mean."""
    digest = blake2b(name.encode(), digest_size=12).digest()
    return sum(digest) / 255.0 - 6.0
