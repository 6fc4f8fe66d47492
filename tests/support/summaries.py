# SPDX-License-Identifier: Apache-2.0
"""Hand-made run folders with a summary and a trace, as a training leaves them."""

from __future__ import annotations

from pathlib import Path

from tests.support.records import step_trace
from war_rl.metrics import step_metrics
from war_rl.summary import RunSummary
from war_rl.trace import TraceWriter


def write_run(
    folder: Path,
    *,
    rollout: str = "war",
    steps: int = 3,
    slow_step: int = 0,
    trajectories: int = 8,
    trace: str = "full",
) -> Path:
    """A finished run; ``slow_step`` waits 30 s longer for its environment than the others."""
    now = [0.0]
    summary = RunSummary(
        folder,
        rollout=rollout,
        config={"a": 1},
        clock=lambda: now[0],
        versions={"verl": "0.9.1"},
        extra={"war": {"spec": {"policy": "war"}}},
    )
    writer = TraceWriter(folder, trace, 64 << 20)
    drafting = {"spec_decode_num_drafts": 50.0, "spec_decode_num_draft_tokens": 200.0}
    for step in range(1, steps + 1):
        rollout_trace = step_trace(step, trajectories)
        if step == slow_step:
            rollout_trace.seconds += 30.0
            for record in rollout_trace.records:
                record.finished += 30.0
                record.env_seconds += 30.0
        engine = {"spec_decode_num_accepted_tokens": 120.0, **drafting} if rollout == "war" else {}
        metrics = step_metrics(
            rollout_trace.records,
            seconds=rollout_trace.seconds,
            engine={"request_prefill_time_seconds": 1.0, **engine},
            sched={},
            spec={"draft_tokens_own": 200.0, "accepted_tokens_own": 120.0} if rollout == "war" else {},
            began=rollout_trace.began,
            replicas=rollout_trace.replicas,
            saved={rollout_trace.replicas[0]: 1.0} if rollout == "war" else {},
        )
        now[0] += 60.0
        summary.add_step(step, metrics, reward=0.1 * step)
        writer.add(rollout_trace)
    summary.finish()
    return folder
