# SPDX-License-Identifier: Apache-2.0
"""Which trajectory the running task belongs to.

Each trajectory is one asyncio task of the agent-loop worker, so a context variable set around the whole episode reaches
every ``generate`` call below it, also those of helper tasks that the agent loop starts. Agent loops stay unchanged.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from war_rl.rollout.blocks import PromptHasher
from war_rl.types import TrajectoryId, TrajectoryRecord


@dataclass
class Episode:
    """A running trajectory: its record, the hashes of its KV blocks, and what has been fed to the drafters so far."""

    record: TrajectoryRecord
    turns_started: int = 0
    fed_tokens: int = 0
    fed_tail: list[int] = field(default_factory=list)
    hasher: PromptHasher | None = None

    @property
    def trajectory(self) -> TrajectoryId:
        return self.record.trajectory

    def next_turn(self) -> int:
        turn = self.turns_started
        self.turns_started += 1
        return turn


CURRENT_EPISODE: ContextVar[Episode | None] = ContextVar("war_current_episode", default=None)
