# SPDX-License-Identifier: Apache-2.0
"""Puts the page together from a run's ``summary.json`` and trace, and the ``war-rl report`` command."""

from __future__ import annotations

import argparse
import html
import json
import os
import re
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from war_rl.report.charts import Summary, line_charts, time_chart
from war_rl.report.findings import (
    headlines,
    is_anything_broken,
    is_it_helping,
    where_does_time_go,
    why_is_a_step_slow,
)
from war_rl.report.timeline import choose_steps, timeline
from war_rl.summary import compare_table, load_summary, unequal_work
from war_rl.trace import StepTrace, read


def build(runs: Mapping[str, Summary], traces: Sequence[StepTrace], why_no_trace: str = "") -> str:
    """The page as text: complete in itself, it loads nothing.

    Args:
        runs: one run's summary by its name, or two to be compared; the first is the one that is reported.
        traces: rollouts of the first run; may be empty, then ``why_no_trace`` says why.
        why_no_trace: shown in place of the timeline.
    """
    from plotly.offline import get_plotlyjs

    names, (run, *others) = list(runs), list(runs.values())
    figures = {"time": time_chart(runs), **line_charts(runs)}
    shown = choose_steps(traces)
    slowest = max(range(len(shown)), key=lambda i: (not shown[i].validate, shown[i].seconds), default=0)
    data = {"figures": figures, "timelines": [timeline(t) for t in shown], "selected": slowest}
    parts = {
        "TITLE": html.escape("War-RL report: " + " and ".join(names)),
        "FACTS": html.escape(_facts(run)),
        "QUESTIONS": _questions(run, others[0] if others else None, names),
        "HEADLINES": _table([["", *names], *headlines(runs)]),
        "COMPARISON": _comparison(runs) if others else "",
        "PLACES": "".join(f'<div id="{place}"{_wide(place)}></div>' for place in figures),
        "TIMELINE_HIDDEN": "" if shown else " hidden",
        "NO_TIMELINE": "" if shown else f"<p>{html.escape(why_no_trace)}</p>",
        "DATA": _json(data),
        "PLOTLY": get_plotlyjs(),
    }
    page = resources.files("war_rl.report").joinpath("page.html").read_text(encoding="utf-8")
    # One pass over the template, so that nothing inserted is looked at again.
    return re.sub(r"@([A-Z_]+)@", lambda found: parts[found[1]], page)


def _wide(place: str) -> str:
    return ' class="wide"' if place == "time" else ""


def _json(data: Any) -> str:
    # "</" would end the script element; in JSON strings "<\/" means the same.
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def _facts(run: Summary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return (
        f"{run['status']} after {run['wall_seconds']:.0f} s, {len(run['steps'])} steps, rollout={run['rollout']}, "
        f"config {run['config_digest']}; {versions}"
    )


def _questions(run: Summary, other: Summary | None, names: Sequence[str]) -> str:
    answers: list[tuple[str, list[str]]] = [
        ("Is War-RL helping?", [is_it_helping(run, other, names)]),
        ("Where does the rollout's time go?", [where_does_time_go(run)]),
        ("Why is a step slow?", [why_is_a_step_slow(run)]),
        ("Is anything broken?", is_anything_broken(run)),
    ]
    out = []
    for question, lines in answers:
        broken = question.startswith("Is anything") and lines != ["No alarm fired."]
        kind = ' class="bad"' if broken else ""
        out.append(f"<dt>{question}</dt>" + "".join(f"<dd{kind}>{html.escape(line)}</dd>" for line in lines))
    return "".join(out)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _comparison(runs: Mapping[str, Summary]) -> str:
    (left, a), (right, b) = runs.items()
    unequal = unequal_work(a, b)
    verdict = "NOT EQUAL WORK: times cannot be compared" if unequal else "Equal work: times may be compared"
    kind = "bad" if unequal else "good"
    text = html.escape(compare_table(a, b, (left, right)))
    return f'<h2>Comparison</h2><p id="verdict" class="{kind}">{verdict}.</p><pre>{text}</pre>'


def report(run_dir: str | Path, compare: str | Path | None = None) -> str:
    """The page of the run in ``run_dir``, beside the one in ``compare`` where there is one.

    Raises:
        FileNotFoundError, ValueError: a folder holds no summary.
    """
    folders = [Path(run_dir), *([Path(compare)] if compare is not None else [])]
    names = [folder.resolve().name for folder in folders]
    if len(names) == 2 and names[0] == names[1]:
        names = [str(folder) for folder in folders]
    runs = {name: load_summary(folder) for name, folder in zip(names, folders, strict=True)}
    try:
        traces, why = read(folders[0]), ""
    except FileNotFoundError as error:
        traces, why = [], f"No timeline: {error}."
    return build(runs, traces, why)


def main(argv: Sequence[str] | None = None) -> int:
    """``war-rl report``."""
    parser = argparse.ArgumentParser(
        prog="war-rl report",
        description="Write one self-contained HTML page about a run: is War-RL helping, where the time goes, why a "
        "step is slow, whether anything is broken; charts over steps and a timeline of each replica.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="the run's folder (it holds summary.json)")
    parser.add_argument(
        "--compare", metavar="OTHER", help="folder of a run to compare with, such as the stock rollout's"
    )
    parser.add_argument("--out", metavar="FILE", help="file to write (default: RUN_DIR/report.html)")
    parser.add_argument("--open", action="store_true", help="show the page in the browser")
    args = parser.parse_args(argv)
    try:
        page = report(args.run, args.compare)
    except (OSError, ValueError) as error:
        print(f"war-rl report: {error}", file=sys.stderr)
        return 1
    out = Path(args.out) if args.out else Path(args.run) / "report.html"
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    part.write_text(page, encoding="utf-8")
    os.replace(part, out)
    print(f"{out} ({len(page) / 1e6:.1f} MB)")
    if args.open:
        webbrowser.open(out.resolve().as_uri())
    return 0
