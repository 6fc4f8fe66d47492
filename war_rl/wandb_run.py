# SPDX-License-Identifier: Apache-2.0
"""What War-RL adds to a W&B run beyond the values that verl's Tracking logs: axes, summaries, a table, alerts.

Works on the run that verl has opened in this process, online or offline; without one every call does nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from war_rl.alarms import Alarm
from war_rl.analysis import SLOWEST_COLUMNS
from war_rl.metrics_registry import METRICS, PREFIXES, STEP_METRIC, summary_of

logger = logging.getLogger(__name__)

SLOWEST_KEY = "war/slowest_trajectories"


def active_run() -> Any:
    """This process's W&B run; None where there is none. Never imports wandb."""
    return getattr(sys.modules.get("wandb"), "run", None)


def define_metrics(run: Any) -> None:
    """Draw every ``war/...`` value over the trainer's step, and say what the run's summary keeps of it."""
    if run is None:
        return
    run.define_metric(STEP_METRIC)
    for prefix in PREFIXES:
        for metric in METRICS:
            run.define_metric(f"{prefix}{metric.name}", step_metric=STEP_METRIC, summary=summary_of(metric))


def log_slowest(run: Any, rows: Sequence[Sequence[Any]], step: int) -> None:
    """The table of :func:`war_rl.analysis.slowest`, as part of ``step``'s values."""
    if run is None or not rows:
        return
    import wandb

    run.log({SLOWEST_KEY: wandb.Table(columns=list(SLOWEST_COLUMNS), data=[list(row) for row in rows])}, step=step)


def send_alert(run: Any, alarm: Alarm, step: int) -> None:
    """An alarm as a W&B alert; a server that refuses it costs the alert only."""
    if run is None:
        return
    try:
        run.alert(title=f"War-RL: {alarm.cause}", text=f"step {step}: {alarm.text}", level="WARN")
    except Exception as error:  # whatever wandb raises must not end a training
        logger.warning("W&B did not take the alert %s: %s", alarm.cause, error)
