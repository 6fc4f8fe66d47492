# SPDX-License-Identifier: Apache-2.0
"""Draws the sides of `war-rl bench rollout --json` reports, mean and range: plot_results.py OUT.png TITLE=FILE ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main(out: str, *reports: str) -> None:
    figure, axes = pyplot.subplots(1, len(reports), figsize=(5.5 * len(reports), 2.4), squeeze=False)
    for axis, item in zip(axes[0], reports, strict=True):
        title, _, file = item.partition("=")
        report = json.loads(Path(file).read_text())
        names = list(report["sides"])[::-1]
        rates = [
            sorted(side["work"]["generated_tokens"] / run["seconds"] for run in side["runs"])
            for side in (report["sides"][name] for name in names)
        ]
        middle = [sum(values) / len(values) for values in rates]
        spread = [
            [m - v[0] for m, v in zip(middle, rates, strict=True)],
            [v[-1] - m for m, v in zip(middle, rates, strict=True)],
        ]
        colours = ["#c2562f" if name.startswith("war") else "#8a97a6" for name in names]
        axis.barh(names, middle, xerr=spread, color=colours, capsize=3)
        axis.set_xlabel("generated tokens per second")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
