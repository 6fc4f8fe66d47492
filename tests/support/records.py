# SPDX-License-Identifier: Apache-2.0
"""Hand-made rollouts: records as a run leaves them, without a run."""

from __future__ import annotations

from war_rl.trace import StepTrace
from war_rl.types import TrajectoryId, TrajectoryRecord, TurnRecord

REPLICAS = ["10.0.0.1:1", "10.0.0.1:2"]
BEGAN = 1_700_000_000.0


def step_trace(step: int = 1, trajectories: int = 4, turns: int = 3, migrate: bool = False) -> StepTrace:
    """A rollout in which trajectory ``i`` starts ``i * 0.1`` s late and plays ``turns`` turns of a second or so."""
    records = []
    for i in range(trajectories):
        at, played = 0.1 * (i % 97), []
        start = at
        for k in range(turns):
            replica = REPLICAS[(i + (k if migrate else 0)) % 2]
            seconds, cached = 1.0 + 0.01 * (i % 13), 90 * k
            turn = TurnRecord(k, replica, 100 * (k + 1), cached, 20 + i % 5, 50.0 + at, 0.05 * (i % 3), seconds)
            played.append(turn)
            at += turn.queue_seconds + seconds + 0.3
        identity = TrajectoryId(f"group{i // 4}", i % 4, step, index=str(i // 4))
        record = TrajectoryRecord(identity, BEGAN + start, BEGAN + at, played, env_seconds=0.3 * turns)
        record.clock_offset = BEGAN - 50.0
        records.append(record)
    seconds = max((r.finished for r in records), default=BEGAN) - BEGAN
    return StepTrace(step, False, BEGAN, seconds, list(REPLICAS), trajectories, 0.002, records)
