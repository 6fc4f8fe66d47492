# SPDX-License-Identifier: Apache-2.0
"""The panels that War-RL wants to see in W&B, grouped by question, and ``war-rl wandb-workspace``, which makes them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from war_rl.analysis import TIME_KINDS
from war_rl.metrics_registry import STEP_METRIC
from war_rl.wandb_run import SLOWEST_KEY

NAME = "War-RL"

LAYOUT: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = (
    (
        "Is War-RL helping?",
        (
            ("Throughput", ("war/rollout/tokens_per_s",)),
            ("Rollout seconds", ("war/rollout/seconds", "war/rollout/tail_seconds")),
            ("Estimated speed-up", ("war/spec/estimated_speedup",)),
            ("Tokens per verify step", ("war/spec/mean_acceptance_length",)),
            ("Reward", ("critic/rewards/mean",)),
        ),
    ),
    (
        "Where does the step's time go?",
        (
            ("Step", ("timing_s/gen", "timing_s/old_log_prob", "timing_s/update_actor", "timing_s/update_weights")),
            ("Rollout, mean trajectory", tuple(f"war/time/{kind}_seconds" for kind in TIME_KINDS)),
            ("Replica time by load", ("war/regime/low_share", "war/regime/high_share", "war/regime/idle_share")),
        ),
    ),
    (
        "Why is a step slow?",
        (
            ("Cache hit rate", ("war/cache/hit_rate", "war/cache/engine_hit_rate")),
            ("Recomputed tokens", ("war/cache/recomputed_tokens", "war/cache/computed_tokens")),
            ("Imbalance", ("war/sched/replica_tokens_max_over_mean", "war/sched/replica_seconds_max_over_mean")),
            ("Replicas", ("war/replica/tokens_per_s_min", "war/replica/tokens_per_s_max")),
            ("Queueing", ("war/sched/queue_seconds_p95", "war/sched/waiting_max")),
            ("Acceptance", tuple(f"war/spec/acceptance_rate{s}" for s in ("", "_own", "_group", "_prompt", "_window"))),
            ("Work", ("war/rollout/generated_tokens", "war/rollout/turns")),
        ),
    ),
    (
        "Is anything broken?",
        (
            ("Alarms", ("war/alarm/fired",)),
            ("Failed and truncated", ("war/rollout/failed", "war/rollout/truncated", "war/rollout/turn_errors")),
            ("Rollout against actor", ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max")),
            ("Residency error", ("war/sched/residency_error",)),
            ("Feed lag", ("war/spec/feed_lag_s",)),
            ("Weights", ("war/sync/replicas", "war/sync/weights_changed")),
        ),
    ),
)
"""Sections of (title, keys) line plots."""


def layout() -> dict[str, Any]:
    """The workspace as plain data, which is what is written where there is no server to make it on."""
    return {
        "name": NAME,
        "x": STEP_METRIC,
        "sections": [
            {"name": section, "panels": [{"title": title, "y": list(keys)} for title, keys in panels]}
            for section, panels in LAYOUT
        ],
        "tables": [SLOWEST_KEY],
    }


def workspace(entity: str, project: str) -> Any:
    """The layout as an unsaved workspace of the library ``wandb-workspaces``."""
    import wandb_workspaces.workspaces as workspaces
    from wandb_workspaces.reports.v2 import interface as reports

    sections = [
        workspaces.Section(
            name=section, panels=[reports.LinePlot(title=title, x=STEP_METRIC, y=list(keys)) for title, keys in panels]
        )
        for section, panels in LAYOUT
    ]
    return workspaces.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def main(argv: Sequence[str] | None = None) -> int:
    """``war-rl wandb-workspace``."""
    parser = argparse.ArgumentParser(
        prog="war-rl wandb-workspace",
        description="Make the W&B workspace of War-RL's panels. Without credentials its layout is written to a file.",
    )
    parser.add_argument("project", metavar="ENTITY/PROJECT", help="where the runs are")
    parser.add_argument("--out", default="wandb-workspace.json", metavar="FILE", help="the layout (%(default)s)")
    parser.add_argument("--offline", action="store_true", help="only write the layout")
    args = parser.parse_args(argv)
    entity, slash, project = args.project.partition("/")
    if not (entity and slash and project):
        parser.error(f"{args.project!r} is not ENTITY/PROJECT")

    from war_rl.wandb_mode import find_credentials

    if not args.offline and find_credentials(os.environ, home=Path.home(), cwd=Path.cwd()):
        try:
            print(workspace(entity, project).save().url)
            return 0
        except Exception as error:  # the server's and the library's errors share no base
            print(f"war-rl wandb-workspace: {type(error).__name__}: {error}", file=sys.stderr)
            return 1
    Path(args.out).write_text(json.dumps(layout(), indent=1) + "\n")
    print(f"no W&B credentials used: the layout that would be made for {args.project} is in {args.out}")
    return 0
