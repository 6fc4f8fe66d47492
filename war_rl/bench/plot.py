# SPDX-License-Identifier: Apache-2.0
"""One picture of a comparison: what every replica was doing, and how fast tokens came, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from war_rl.bench.stats import Sample, SideRun

RUNNING, QUEUED, CACHED = "#1b6ca8", "#e08e2b", "#3a9d5d"
SIDES = ("#1b6ca8", "#c0392b", "#3a9d5d", "#8e44ad", "#7f8c8d")


def cached_fraction(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """(t, share of the prompt tokens requested since the last point that came from cache) of one replica.

    No point where nothing was requested, so that an idle replica draws no line at zero.
    """
    out = []
    prompt = cached = 0
    for sample in samples:
        asked = sample.prompt_tokens - prompt
        if asked > 0:
            out.append((sample.t, (sample.cached_tokens - cached) / asked))
            prompt, cached = sample.prompt_tokens, sample.cached_tokens
    return out


def tokens_over_time(samples: Sequence[Sample]) -> list[tuple[float, int]]:
    """(t, tokens generated so far by all replicas), one point per sample, starting at (0, 0)."""
    latest: dict[str, int] = {}
    out = [(0.0, 0)]
    for sample in sorted(samples, key=lambda s: s.t):
        latest[sample.replica] = sample.generated_tokens
        out.append((sample.t, sum(latest.values())))
    return out


def shown_runs(runs: Sequence[SideRun], sides: Sequence[str]) -> list[SideRun]:
    """Per side the run of median duration (the slower of two) among those with a timeline.

    Raises:
        ValueError: a side has no timeline.
    """
    out = []
    for side in sides:
        known = sorted((run for run in runs if run.side == side and run.timeline), key=lambda run: run.seconds)
        if not known:
            raise ValueError(f"no timeline was recorded for side {side}")
        out.append(known[len(known) // 2])
    return out


def plot_runs(runs: Sequence[SideRun], sides: Sequence[str], path: str | Path, title: str = "") -> None:
    """Write the picture: a row per replica and a column per side, and below them the tokens of all sides.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to get it.
        ValueError: a side has no timeline.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("--plot needs matplotlib: pip install matplotlib") from error
    chosen = shown_runs(runs, sides)
    replicas = sorted({sample.replica for run in chosen for sample in run.timeline})
    figure = Figure(figsize=(5.5 * len(chosen), 2.0 * len(replicas) + 3.2), layout="constrained")
    grid = figure.add_gridspec(len(replicas) + 1, len(chosen), height_ratios=[*[2.0] * len(replicas), 3.0])
    end = max(run.seconds for run in chosen)
    for column, run in enumerate(chosen):
        for row, replica in enumerate(replicas):
            axes = figure.add_subplot(grid[row, column])
            _replica(axes, [s for s in run.timeline if s.replica == replica], end)
            axes.set_title(
                f"{run.side}, {replica}" if row else f"{run.side}: {run.seconds:.1f} s\n{replica}", fontsize=9
            )
            if row == 0 and column == 0:
                axes.legend(loc="upper right", fontsize=7)
    _tokens(figure.add_subplot(grid[len(replicas), :]), chosen)
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _replica(axes: Any, samples: Sequence[Sample], end: float) -> None:
    times = [sample.t for sample in samples]
    axes.step(times, [sample.running for sample in samples], where="post", color=RUNNING, label="running")
    axes.step(times, [sample.queued for sample in samples], where="post", color=QUEUED, label="queued")
    axes.plot([], [], color=CACHED, marker=".", linestyle="none", label="cached fraction")
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("requests", fontsize=8)
    share = axes.twinx()
    points = cached_fraction(samples)
    share.plot([t for t, _ in points], [f for _, f in points], color=CACHED, marker=".", linewidth=0.6)
    share.set_ylim(0, 1.05)
    share.set_ylabel("cached", fontsize=8, color=CACHED)


def _tokens(axes: Any, runs: Sequence[SideRun]) -> None:
    for number, run in enumerate(runs):
        points = tokens_over_time(run.timeline)
        color = SIDES[number % len(SIDES)]
        axes.plot([t for t, _ in points], [count for _, count in points], color=color, label=run.side)
        axes.axvline(run.seconds, color=color, linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("generated tokens")
    axes.legend(loc="lower right", fontsize=8)
