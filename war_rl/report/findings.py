# SPDX-License-Identifier: Apache-2.0
"""Four questions that people ask of a run, answered from its summary. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from war_rl.alarms import Alarms, Situation
from war_rl.analysis import TIME_KINDS
from war_rl.report.charts import Summary, metric
from war_rl.summary import unequal_work

SLOW = 1.2
"""A step is slow when its rollout took this many times the median."""


def mean(run: Summary, name: str) -> float | None:
    """Mean of ``war/<name>`` over the steps that logged it."""
    values = [v for entry in run["steps"] if (v := metric(entry, name)) is not None]
    return statistics.fmean(values) if values else None


def is_it_helping(run: Summary, other: Summary | None = None, names: Sequence[str] = ("", "")) -> str:
    """Measured against ``other`` where there is one and the work was equal, else by the cost model's own account."""
    parts = []
    if other is not None:
        unequal = unequal_work(run, other)
        mine, theirs = mean(run, "rollout/seconds"), mean(other, "rollout/seconds")
        if unequal:
            parts.append("Not comparable: the two runs did different work (" + ", ".join(unequal) + ").")
        elif mine and theirs:
            faster = "faster" if theirs >= mine else "SLOWER"
            ratio = max(mine, theirs) / min(mine, theirs)
            parts.append(f"Measured: {names[0]}'s rollouts are {ratio:.2f}x {faster} than {names[1]}'s, at equal work.")
    estimate, length = mean(run, "spec/estimated_speedup"), mean(run, "spec/mean_acceptance_length")
    if estimate is not None and mean(run, "spec/drafts"):
        parts.append(
            f"By the step-time model's account drafting makes rollouts {estimate:.2f}x as fast "
            f"({length or 1.0:.2f} tokens per verify step). Only a comparison measures it."
        )
    elif not parts:
        parts.append("Nothing was drafted; a comparison with another run (--compare) would say more.")
    return " ".join(parts)


def where_does_time_go(run: Summary) -> str:
    """The three largest kinds of the time split."""
    split = {kind: mean(run, f"time/{kind}_seconds") or 0.0 for kind in TIME_KINDS}
    total = sum(split.values())
    if not total:
        return "No time split was logged."
    largest = sorted(split.items(), key=lambda item: -item[1])[:3]
    return "Of the mean trajectory's rollout: " + ", ".join(f"{v / total:.0%} {_words(k)}" for k, v in largest) + "."


def why_is_a_step_slow(run: Summary) -> str:
    """The slowest step against the median, and the kind of time that grew most."""
    seconds = {e["step"]: v for e in run["steps"] if (v := metric(e, "rollout/seconds")) is not None}
    if len(seconds) < 3:
        return "Fewer than three steps: nothing to compare a step with."
    middle = statistics.median(seconds.values())
    step = max(seconds, key=lambda s: seconds[s])
    if seconds[step] < SLOW * middle:
        return (
            f"No step is slow: the longest rollout (step {step}) took {seconds[step]:.1f} s, the median {middle:.1f} s."
        )
    entry = next(e for e in run["steps"] if e["step"] == step)
    growth = {}
    for kind in TIME_KINDS:
        usual = [v for e in run["steps"] if (v := metric(e, f"time/{kind}_seconds")) is not None]
        growth[kind] = (metric(entry, f"time/{kind}_seconds") or 0.0) - (statistics.median(usual) if usual else 0.0)
    worst = max(growth, key=lambda k: growth[k])
    tokens = metric(entry, "rollout/generated_tokens") or 0.0
    usual_tokens = statistics.median([metric(e, "rollout/generated_tokens") or 0.0 for e in run["steps"]])
    more = f", and it generated {tokens / usual_tokens:.2f}x the usual tokens" if usual_tokens else ""
    return (
        f"Step {step}: {seconds[step]:.1f} s against a median of {middle:.1f} s; {_words(worst)} grew most "
        f"(+{growth[worst]:.1f} s){more}."
    )


def alarms_of(run: Summary) -> list[tuple[int, str, str]]:
    """(step, cause, text) of each alarm that the run's steps give rise to."""
    spec = (run.get("war") or {}).get("spec", {})
    replicas = len({k for e in run["steps"] for k in e["metrics"] if k.endswith("/busy_share") and "/replica/" in k})
    alarms = Alarms(Situation(run["rollout"] == "war" and spec.get("policy") != "off", replicas))
    out = []
    for entry in run["steps"]:
        values = {k: float(v) for k, v in entry["metrics"].items() if v is not None}
        out += [(entry["step"], alarm.cause, alarm.text) for alarm in alarms.check(values)]
    return out


def is_anything_broken(run: Summary) -> list[str]:
    """One line for each alarm, failure and the run's own error; a single reassuring one where there is none."""
    lines = [f"Step {step}, {cause}: {text}." for step, cause, text in alarms_of(run)]
    if run.get("status") in ("failed", "interrupted"):
        lines.insert(0, f"The run {run['status']}: {run.get('error') or 'no cause given'}.")
    return lines or ["No alarm fired."]


HEADLINES: tuple[tuple[str, str, str], ...] = (
    ("rollout/seconds", "rollout seconds", ".1f"),
    ("rollout/tokens_per_s", "generated tokens/s", ",.0f"),
    ("rollout/trajectories", "trajectories", ".0f"),
    ("rollout/turns", "turns", ".0f"),
    ("rollout/generated_tokens", "generated tokens", ",.0f"),
    ("cache/prompt_tokens", "prompt tokens", ",.0f"),
    ("spec/estimated_speedup", "estimated speed-up", ".2f"),
    ("spec/mean_acceptance_length", "tokens per verify step", ".2f"),
    ("spec/acceptance_rate", "drafts accepted", ".0%"),
    ("cache/hit_rate", "cache hit rate", ".0%"),
    ("cache/recomputed_tokens", "recomputed tokens", ",.0f"),
    ("rollout/tail_share", "tail share", ".0%"),
    ("sched/replica_tokens_max_over_mean", "imbalance", ".2f"),
    ("rollout/failed", "failed", ".1f"),
)
"""Metric, what the page calls it, format."""


def headlines(runs: Mapping[str, Summary]) -> list[list[str]]:
    """Rows of the table of headline numbers: name, then the mean over each run's steps."""
    rows = []
    for key, label, form in HEADLINES:
        values = [mean(run, key) for run in runs.values()]
        if any(v is not None for v in values):
            rows.append([label, *("-" if v is None else format(v, form) for v in values)])
    return rows


def _words(kind: str) -> str:
    names: dict[str, Any] = {
        "dispatch": "waiting to be dispatched",
        "admission": "waiting for admission",
        "queue": "queueing at the router",
        "engine_queue": "queueing in the engine",
        "prefill": "prefill",
        "decode": "decoding",
        "drafting": "making drafts",
        "env": "environment and tools",
        "other": "agent loop and rewards",
        "idle_tail": "finished, waiting for the slowest",
    }
    return str(names[kind])
