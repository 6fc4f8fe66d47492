# SPDX-License-Identifier: Apache-2.0
"""What the scheduler says about itself: values of one step, reset when taken, training and validation apart."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

QUEUE_BOUNDS = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper ends of the buckets in which queue times are counted. Unit: seconds."""


class QueueTimes:
    """How long turns waited until they were placed, over the whole run: counts by bucket, the last without an end."""

    def __init__(self) -> None:
        self.counts = [0] * (len(QUEUE_BOUNDS) + 1)
        self.total = 0.0
        """Sum. Unit: seconds."""

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(QUEUE_BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class StepStats:
    """Sums of one step. Times in seconds, lengths in tokens."""

    placements: int = 0
    held: int = 0
    """Placements of turns that had to wait."""
    returns: int = 0
    """Placements of turns of a trajectory that has run before on some replica."""
    sticky: int = 0
    """Returns that went to the replica that ran the trajectory's previous turn."""
    migrations: int = 0
    migration_seconds: float = 0.0
    """Estimated re-prefill seconds paid by migrations."""
    lost: int = 0
    """Turns whose replica was lost while they ran."""
    cancelled: int = 0
    preemptions: int = 0
    submitted: int = 0
    finished_trajectories: int = 0
    queue_seconds: list[float] = field(default_factory=list)
    engine_queue_seconds: float = 0.0
    """What turns that ended well waited inside the engines before their first step."""
    reasons: Counter[str] = field(default_factory=Counter)
    predicted_cached: int = 0
    reported_cached: int = 0
    residency_abs_error: int = 0
    residency_prompt: int = 0
    waiting: int = 0
    """Turns waiting at this moment; carried over when the step's values are taken."""
    max_waiting: int = 0
    admitted: int = 0
    """Trajectories that live on a replica at this moment; carried over as well."""
    max_admitted: int = 0
    tokens_area: dict[str, float] = field(default_factory=dict)
    """Token-seconds per replica: tokens in flight integrated over time."""
    busy_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds during which the replica ran at least one turn."""

    def as_metrics(self) -> dict[str, float]:
        """Flat ``sched/...`` values."""
        waits = np.asarray(self.queue_seconds or [0.0])
        out = {
            "sched/placements": float(self.placements),
            "sched/submitted": float(self.submitted),
            "sched/sticky_rate": self.sticky / self.returns if self.returns else 1.0,
            "sched/migrations": float(self.migrations),
            "sched/migration_seconds": self.migration_seconds,
            "sched/lost_turns": float(self.lost),
            "sched/cancelled_turns": float(self.cancelled),
            "sched/preemptions": float(self.preemptions),
            "sched/finished_trajectories": float(self.finished_trajectories),
            "sched/queue_seconds_p50": float(np.percentile(waits, 50)),
            "sched/queue_seconds_p95": float(np.percentile(waits, 95)),
            "sched/queue_seconds_max": float(waits.max()),
            "sched/engine_queue_seconds": self.engine_queue_seconds,
            "sched/held_turns": float(self.held),
            "sched/waiting_max": float(self.max_waiting),
            "sched/admitted_max": float(self.max_admitted),
            "sched/replica_tokens_max_over_mean": _max_over_mean(self.tokens_area),
            "sched/replica_seconds_max_over_mean": _max_over_mean(self.busy_seconds),
        }
        if self.residency_prompt:
            out["sched/residency_error"] = self.residency_abs_error / self.residency_prompt
            out["sched/residency_abs_error_tokens"] = float(self.residency_abs_error)
            out["sched/residency_predicted_tokens"] = float(self.predicted_cached)
            out["sched/residency_reported_tokens"] = float(self.reported_cached)
        for reason, count in sorted(self.reasons.items()):
            out[f"sched/reason/{reason}"] = float(count)
        return out


def _max_over_mean(values: dict[str, float]) -> float:
    """1.0 is perfect balance; 1.0 also where there is nothing to balance."""
    total = sum(values.values())
    return max(values.values()) * len(values) / total if total > 0 else 1.0
