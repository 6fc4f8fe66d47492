# SPDX-License-Identifier: Apache-2.0
"""The benchmark's result: a JSON document with a schema, and a table for the terminal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from war_rl.bench.stats import (
    CONFIDENCE,
    COUNTERS,
    WORK_TOLERANCE,
    SideRun,
    Spread,
    Work,
    ratio_interval,
    throughput_ratio,
    work_equal,
    work_spread,
)

VERSION = 1
"""Version of the JSON document."""

_NUMBER = {"type": "number"}
_SPREAD = {
    "type": "object",
    "required": ["median", "min", "max", "values"],
    "properties": {
        "median": _NUMBER,
        "min": _NUMBER,
        "max": _NUMBER,
        "values": {"type": "array", "items": _NUMBER, "description": "in order of measurement, one per pair"},
    },
}
_RATIO = {
    **_SPREAD,
    "properties": {
        **_SPREAD["properties"],
        "interval": {
            "type": "array",
            "items": _NUMBER,
            "description": f"where the ratio lies, at {CONFIDENCE:.0%}, by the spread of both sides' runs",
        },
    },
}
_ESTIMATE = {
    **_SPREAD,
    "required": ["mean", *_SPREAD["required"]],
    "properties": {"mean": _NUMBER, **_SPREAD["properties"]},
    "description": "how many times as long the runs would have taken without the side's drafts, by its own step-time "
    "model; only of sides that draft and can tell",
}
_COUNTERS = {
    "type": "object",
    "properties": {name: {"type": "number", "description": about} for name, about in COUNTERS.items()},
    "additionalProperties": False,
}
_WORK = {
    "type": "object",
    "required": list(Work.__dataclass_fields__),
    "properties": {
        "turns": {"type": "integer", "description": "turns sent"},
        "generated_tokens": {"type": "integer", "description": "tokens committed"},
        "requested_prompt_tokens": {"type": "integer", "description": "prompt tokens of all turns, cached or not"},
    },
}
_RUN = {
    "type": "object",
    "required": ["pair", "seconds", "work", "counters"],
    "properties": {
        "pair": {"type": "integer"},
        "seconds": _NUMBER,
        "work": _WORK,
        "counters": _COUNTERS,
        "estimated_speedup": _NUMBER,
    },
}
_SIDE = {
    "type": "object",
    "required": ["seconds", "throughput", "work", "counters", "runs"],
    "properties": {
        "seconds": {**_SPREAD, "description": "rollout seconds, first request to last trajectory's end"},
        "throughput": {**_SPREAD, "description": "generated tokens per second"},
        "estimated_speedup": _ESTIMATE,
        "work": {**_WORK, "description": "of the side's first measured run"},
        "counters": {**_COUNTERS, "description": "median over the side's runs"},
        "runs": {"type": "array", "minItems": 1, "items": _RUN},
    },
}
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "war-rl bench rollout",
    "type": "object",
    "required": [
        *("version", "sides", "ratio", "ratios", "work_equal", "work_spread"),
        *("machine", "versions", "workload", "settings"),
    ],
    "properties": {
        "version": {"const": VERSION},
        "sides": {"type": "object", "minProperties": 2, "additionalProperties": _SIDE},
        "ratio": {**_RATIO, "description": "first side's throughput over the second's, per pair; above 1 = faster"},
        "ratios": {
            "type": "object",
            "additionalProperties": _RATIO,
            "description": "first side's throughput over each other side's, by the other side's name",
        },
        "work_equal": {"type": "boolean", "description": f"no kind of work differs by more than {WORK_TOLERANCE:.0%}"},
        "work_spread": {
            "type": "object",
            "additionalProperties": _NUMBER,
            "description": "per kind of work, (most - least) / most over all runs",
        },
        "machine": {"type": "object"},
        "versions": {"type": "object", "additionalProperties": {"type": "string"}},
        "workload": {
            "type": "object",
            "description": "what was replayed, and what was cut or left out to get there",
            "properties": {
                "least_prefill_tokens": {
                    "type": "integer",
                    "description": "prompt tokens that any schedule must compute, given all the cache it wants",
                }
            },
        },
        "settings": {"type": "object", "description": "every setting of the benchmark, preset and flags resolved"},
    },
}
"""JSON Schema of the document :func:`build_report` returns. Times in seconds, lengths in tokens."""


def build_report(
    runs: Sequence[SideRun],
    sides: Sequence[str],
    *,
    machine: Mapping[str, Any],
    versions: Mapping[str, str],
    workload: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The result document of measured runs; ``sides`` in the order given by the user.

    Raises:
        ValueError: fewer than two sides, or sides that were not measured in pairs.
    """
    if len(sides) < 2:
        raise ValueError("a comparison needs two sides")
    ratios = {other: _ratio(runs, sides[0], other) for other in sides[1:]}
    return {
        "version": VERSION,
        "sides": {side: _side([run for run in runs if run.side == side]) for side in sides},
        "ratio": ratios[sides[1]],
        "ratios": ratios,
        "work_equal": work_equal(runs),
        "work_spread": work_spread(runs),
        "machine": dict(machine),
        "versions": dict(versions),
        "workload": dict(workload),
        "settings": dict(settings),
    }


def _side(runs: Sequence[SideRun]) -> dict[str, Any]:
    ordered = sorted(runs, key=lambda run: run.pair)
    counters = {
        name: Spread.of(run.counters[name] for run in ordered).median
        for name in COUNTERS
        if all(name in run.counters for run in ordered)
    }
    return {
        "seconds": Spread.of(run.seconds for run in ordered).to_json(),
        "throughput": Spread.of(run.throughput for run in ordered).to_json(),
        **_estimate(ordered),
        "work": asdict(ordered[0].work),
        "counters": counters,
        "runs": [_run(run) for run in ordered],
    }


def _run(run: SideRun) -> dict[str, Any]:
    estimate = {} if run.estimated_speedup is None else {"estimated_speedup": run.estimated_speedup}
    counters = dict(run.counters)
    return {"pair": run.pair, "seconds": run.seconds, "work": asdict(run.work), "counters": counters, **estimate}


def _estimate(runs: Sequence[SideRun]) -> dict[str, Any]:
    values = [run.estimated_speedup for run in runs if run.estimated_speedup is not None]
    if len(values) < len(runs):
        return {}
    return {"estimated_speedup": {"mean": statistics.fmean(values), **Spread.of(values).to_json()}}


def write_report(report: Mapping[str, Any], path: str | Path) -> None:
    """The document as indented JSON.

    Raises:
        ValueError: a number that JSON does not have (infinite or not a number).
    """
    Path(path).write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def render_table(report: Mapping[str, Any]) -> str:
    """The document as a table at most 120 columns wide (with up to five sides), newline at its end."""
    sides = list(report["sides"])
    rows = [["", *sides], *_time_rows(report), *_work_rows(report), *_counter_rows(report)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(sides) + 1)]
    lines = [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join([*lines, "", *_verdict(report, sides)]) + "\n"


def _time_rows(report: Mapping[str, Any]) -> list[list[str]]:
    sides = report["sides"].values()
    rows = [
        ["rollout seconds, median", *(f"{side['seconds']['median']:.2f}" for side in sides)],
        ["  min to max", *(f"{side['seconds']['min']:.2f}-{side['seconds']['max']:.2f}" for side in sides)],
        ["generated tokens/s", *(f"{side['throughput']['median']:.1f}" for side in sides)],
    ]
    if any("estimated_speedup" in side for side in sides):
        rows.append(["speed-up by drafts, estimated, mean", *(_estimate_cell(side) for side in sides)])
    return rows


def _estimate_cell(side: Mapping[str, Any]) -> str:
    return f"{side['estimated_speedup']['mean']:.3f}" if "estimated_speedup" in side else "-"


def _work_rows(report: Mapping[str, Any]) -> list[list[str]]:
    sides = report["sides"].values()
    return [
        [kind.replace("_", " "), *(_count(side["work"][kind]) for side in sides)] for kind in Work.__dataclass_fields__
    ]


def _counter_rows(report: Mapping[str, Any]) -> list[list[str]]:
    sides = report["sides"].values()
    reported = [name for name in COUNTERS if any(name in side["counters"] for side in sides)]
    return [[name.replace("_", " "), *(_count(side["counters"].get(name)) for side in sides)] for name in reported]


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.2f}" if value >= 0.1 else f"{value:.4f}"


def _ratio(runs: Sequence[SideRun], first: str, second: str) -> dict[str, Any]:
    interval = ratio_interval(runs, first, second)
    return {**throughput_ratio(runs, first, second).to_json(), **({"interval": list(interval)} if interval else {})}


def _verdict(report: Mapping[str, Any], sides: Sequence[str]) -> list[str]:
    lines = []
    for other, ratio in report["ratios"].items():
        pairs = len(ratio["values"])
        lines.append(
            f"{sides[0]} / {other} throughput: {ratio['median']:.3f} (min {ratio['min']:.3f}, max {ratio['max']:.3f}, "
            f"{pairs} {'pair' if pairs == 1 else 'pairs'}{_interval(ratio)})"
        )
    lines.extend(_estimate_lines(report))
    worst = max(report["work_spread"], key=lambda kind: report["work_spread"][kind])
    if report["work_equal"]:
        lines.append(f"work: equal ({worst.replace('_', ' ')} differs most, by {report['work_spread'][worst]:.2%})")
    else:
        lines.append(
            f"WORK DIFFERS: {worst.replace('_', ' ')} by {report['work_spread'][worst]:.2%} (at most "
            f"{WORK_TOLERANCE:.0%} is equal). The ratio compares different work and must not be quoted."
        )
    lines.extend(_prefill_lines(report))
    lines.extend(_observer_lines(report))
    lines.extend(_workload_lines(report["workload"]))
    return lines


def _interval(ratio: Mapping[str, Any]) -> str:
    if "interval" not in ratio:
        return ""
    low, high = ratio["interval"]
    return f", {CONFIDENCE:.0%} interval {low:.3f} to {high:.3f}"


def _estimate_lines(report: Mapping[str, Any]) -> list[str]:
    """What each side says of its own drafts: to be held against a measured ratio to the same side without them."""
    return [
        f"{name}, estimated: its drafts made it {side['estimated_speedup']['mean']:.3f} times as fast (mean of "
        f"{len(side['estimated_speedup']['values'])})"
        for name, side in report["sides"].items()
        if "estimated_speedup" in side
    ]


def _observer_lines(report: Mapping[str, Any]) -> list[str]:
    """What metrics and trace cost outside of the measured seconds, which they do not lengthen."""
    shares = [
        f"{name} {side['counters']['observer_seconds'] / side['seconds']['median']:.2%}"
        for name, side in report["sides"].items()
        if "observer_seconds" in side["counters"]
    ]
    if not shares:
        return []
    return [f"metrics and trace, as a share of the rollout seconds and not in them: {', '.join(shares)}"]


def _prefill_lines(report: Mapping[str, Any]) -> list[str]:
    """Computed prompt tokens of each side over what any schedule must compute."""
    least = report["workload"].get("least_prefill_tokens")
    if not least:
        return []
    computed = {name: side["counters"].get("prefill_computed_tokens") for name, side in report["sides"].items()}
    shares = ", ".join(
        f"{name} {value / least:.2f} times that" for name, value in computed.items() if value is not None
    )
    return [f"prefill tokens that any schedule must compute: {least:,}" + (f" ({shares})" if shares else "")]


def _workload_lines(workload: Mapping[str, Any]) -> list[str]:
    lines = []
    cut = workload.get("cut") or {}
    if cut.get("trajectories"):
        lines.append(
            f"cut to fit the context: {cut['trajectories']} trajectories lost {cut.get('turns', 0)} turns, "
            f"{cut.get('model_tokens', 0):,} generated and {cut.get('prompt_tokens', 0):,} prompt tokens"
        )
    lines.extend(f"note: {reason} ({count} times)" for reason, count in (workload.get("notes") or {}).items())
    return lines
