# SPDX-License-Identifier: Apache-2.0
"""Pictures of simulations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#1b6ca8", "#c0392b", "#3a9d5d", "#8e44ad", "#e08e2b", "#16a085", "#7f8c8d", "#34495e")
BASE = {"drafting": "no drafts"}
LINEAR = ("tail", "parts", "progress")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_experiment(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Throughput over that of stock (drafting: over no drafts) for one experiment of the sweep; returns the file."""
    from war_rl.sim.sweep import EXPERIMENTS, speedups

    plt = _pyplot()
    base = BASE.get(name, "stock")
    found = speedups(rows, base)
    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    lines = {side: xs for side, xs in found.items() if side[1] != base}
    if name in ("parts", "progress"):
        _bars(axis, name, lines)
    else:
        several = len({preset for preset, _ in lines}) > 1
        for i, ((preset, side), xs) in enumerate(lines.items()):
            label = f"{side}, {preset}" if several else side
            axis.plot(
                list(xs), list(xs.values()), marker="o", ms=3, lw=1.4, color=COLOURS[i % len(COLOURS)], label=label
            )
        if name not in LINEAR:
            # Zero tool time has its place left of the smallest other one.
            axis.set_xscale("symlog", linthresh=0.3) if name == "tools" else axis.set_xscale("log", base=2)
            ticks = sorted({x for xs in lines.values() for x in xs})
            axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axis.minorticks_off()
        axis.set_xlabel(EXPERIMENTS[name][0])
    if name == "paper":
        for value in (1.4, 1.6):
            axis.axhline(value, color="#999999", lw=0.8, ls=":")
            axis.text(axis.get_xlim()[0], value, f" published, {value}", fontsize=7, va="bottom", color="#777777")
    axis.axhline(1.0, color="#555555", lw=0.8)
    axis.set_ylabel(f"throughput / {base}")
    if axis.get_legend_handles_labels()[0]:
        # Above the lines, wherever they run.
        axis.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=3)
    axis.grid(alpha=0.25)
    figure.tight_layout()
    out = folder / f"{name}.png"
    figure.savefig(out, dpi=90, bbox_inches="tight")
    plt.close(figure)
    return out


def _bars(axis: Any, name: str, lines: dict[tuple[str, str], dict[float, float]]) -> None:
    """Sides next to each other; a group of bars for each x."""
    sides = [side for _, side in lines]
    xs = sorted({x for values in lines.values() for x in values}) if name == "parts" else [None]
    for i, x in enumerate(xs):
        heights = [v.get(x, 0.0) if x is not None else next(iter(v.values())) for v in lines.values()]
        places = [j + (i - (len(xs) - 1) / 2) * 0.8 / len(xs) for j in range(len(sides))]
        axis.bar(places, heights, 0.75 / len(xs), color=COLOURS[i], label=None if x is None else f"load {x:g}")
    axis.set_xticks(
        range(len(sides)), [s.replace("without ", "no ") for s in sides], rotation=25, ha="right", fontsize=7
    )


def plot_policies(document: dict[str, Any], file: str) -> None:
    """Seconds of each policy of one ``war-rl simulate``, and when half of the trajectories had ended."""
    plt = _pyplot()
    rows = document["policies"]
    figure, axis = plt.subplots(figsize=(6.4, 0.6 + 0.45 * len(rows)))
    names = list(rows)
    axis.barh(names, [rows[n]["seconds"] for n in names], color=COLOURS[0], label="all ended")
    axis.barh(names, [rows[n]["half_done_seconds"] for n in names], color=COLOURS[2], label="half ended")
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=90)
    plt.close(figure)
