# SPDX-License-Identifier: Apache-2.0
"""The charts of the report as plain plotly figures (dicts of ``data`` and ``layout``). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from war_rl.analysis import TIME_KINDS
from war_rl.types import SOURCES

Summary = Mapping[str, Any]
Figure = dict[str, Any]
MOST_TICKS = 10
"""Along the axis of steps."""

COLOURS = {
    "dispatch": "#bdbdbd",
    "admission": "#e6550d",
    "queue": "#fd8d3c",
    "engine_queue": "#fdbe85",
    "prefill": "#6a51a3",
    "decode": "#2171b5",
    "drafting": "#41ab5d",
    "env": "#dfc27d",
    "other": "#969696",
    "idle_tail": "#e0e0e0",
}
RUN_COLOURS = ("#2171b5", "#d94801")


def metric(entry: Mapping[str, Any], name: str) -> float | None:
    """A step's ``war/<name>``; None where it was not logged."""
    value = entry["metrics"].get(f"war/{name}")
    return None if value is None else float(value)


def _series(run: Summary, name: str) -> tuple[list[int], list[float | None]]:
    return [entry["step"] for entry in run["steps"]], [metric(entry, name) for entry in run["steps"]]


def _known(run: Summary, name: str) -> bool:
    return any(metric(entry, name) is not None for entry in run["steps"])


def _layout(title: str, unit: str, **more: Any) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 15}, "x": 0.02},
        "margin": {"l": 60, "r": 20, "t": 45, "b": 40},
        "height": 320,
        "xaxis": {"title": {"text": "step"}, "tickformat": "d"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.25},
        "hovermode": "x unified",
        "template": None,
        **more,
    }


def time_chart(runs: Mapping[str, Summary]) -> Figure:
    """Per step, where the mean trajectory's time went: stacks that add up to the rollout; runs side by side."""
    layout = _layout("Where the rollout's time goes (mean trajectory)", "seconds", barmode="stack", height=380)
    data: list[dict[str, Any]] = []
    width = 1.0 / len(runs)
    for number, (name, run) in enumerate(runs.items()):
        axis = "" if number == 0 else str(number + 1)
        begin = number * width
        layout[f"xaxis{axis}"] = {
            "title": {"text": f"step ({name})" if len(runs) > 1 else "step"},
            "domain": [begin + 0.02 * (number > 0), begin + width - 0.02 * (number + 1 < len(runs))],
            "tickformat": "d",
        }
        for kind in TIME_KINDS:
            steps, values = _series(run, f"time/{kind}_seconds")
            if not any(values):
                continue
            data.append(
                {
                    "type": "bar",
                    "name": kind.replace("_", " "),
                    "legendgroup": kind,
                    "showlegend": number == 0 or not any(d["legendgroup"] == kind for d in data),
                    "x": steps,
                    "y": values,
                    "xaxis": f"x{axis}",
                    "marker": {"color": COLOURS[kind]},
                }
            )
    return _whole_steps({"data": data, "layout": layout})


def _whole_steps(figure: Figure) -> Figure:
    """Ticks at whole steps only: where there are few, plotly would put some in between, with a rounded number."""
    steps = [x for trace in figure["data"] for x in trace["x"]]
    if steps:
        apart = max(1, -(-(max(steps) - min(steps)) // MOST_TICKS))
        for axis in [name for name in figure["layout"] if name.startswith("xaxis")]:
            figure["layout"][axis] |= {"tick0": min(steps), "dtick": apart}
    return figure


def _lines(runs: Mapping[str, Summary], wanted: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """One line for each metric and run; a run has its colour or, alone, each metric its own."""
    data = []
    dashes = ("solid", "dash", "dot", "dashdot", "longdash")
    for number, (name, run) in enumerate(runs.items()):
        for k, (key, label) in enumerate(wanted):
            if not _known(run, key):
                continue
            steps, values = _series(run, key)
            line = {"color": RUN_COLOURS[number], "dash": dashes[k % len(dashes)]} if len(runs) > 1 else {}
            text = f"{label} ({name})" if len(runs) > 1 else label
            data.append(
                {"type": "scatter", "mode": "lines+markers", "name": text, "x": steps, "y": values, "line": line}
            )
    return data


def line_charts(runs: Mapping[str, Summary]) -> dict[str, Figure]:
    """The curves over steps, by the id of their place in the page. One without any values is left out."""
    sources = [(f"spec/acceptance_rate_{s}", s) for s in SOURCES]
    charts = {
        "throughput": ("Throughput", "generated tokens/s", [("rollout/tokens_per_s", "all replicas")]),
        "rollout": ("Rollout", "seconds", [("rollout/seconds", "rollout"), ("rollout/tail_seconds", "tail from 90 %")]),
        "acceptance": ("Acceptance by source of the draft", "ratio", [("spec/acceptance_rate", "all"), *sources]),
        "speedup": (
            "What drafting gives",
            "ratio, tokens",
            [
                ("spec/estimated_speedup", "estimated speed-up"),
                ("spec/mean_acceptance_length", "tokens per verify step"),
            ],
        ),
        "cache": ("Cache", "ratio", [("cache/hit_rate", "hit rate"), ("cache/engine_hit_rate", "the engines' own")]),
        "imbalance": (
            "Imbalance (1 is perfect)",
            "busiest over mean",
            [
                ("sched/replica_tokens_max_over_mean", "tokens in flight"),
                ("sched/replica_seconds_max_over_mean", "busy seconds"),
            ],
        ),
        "regime": (
            "Replica time by load",
            "share",
            [("regime/low_share", "low"), ("regime/high_share", "high"), ("regime/idle_share", "idle")],
        ),
    }
    out = {}
    for place, (title, unit, wanted) in charts.items():
        data = _lines(runs, wanted)
        if data:
            out[place] = _whole_steps({"data": data, "layout": _layout(title, unit)})
    return out
