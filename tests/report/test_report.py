# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.records import step_trace
from tests.support.summaries import write_run
from war_rl.report.build import build, main, report
from war_rl.report.charts import line_charts
from war_rl.report.findings import is_anything_broken, is_it_helping, where_does_time_go, why_is_a_step_slow
from war_rl.report.timeline import choose_steps, timeline
from war_rl.summary import load_summary


class Page(HTMLParser):
    """Ids, what each element with an id says, and every address the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.data: Any = None
        self.stack: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        self.loads += [str(found[key]) for key in ("src", "href") if found.get(key)]
        if tag not in ("meta", "link", "br"):
            self.stack.append((tag, str(found.get("id") or "")))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop()[0] == tag, f"unbalanced {tag}"

    def handle_data(self, text: str) -> None:
        for _, name in self.stack:
            if name:
                self.texts[name] = self.texts.get(name, "") + text


def unpack(packed: dict[str, str]) -> Any:
    return np.frombuffer(base64.b64decode(packed["bdata"]), dtype=packed["dtype"])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "war", slow_step=2)


def test_the_page_is_whole_and_loads_nothing(run: Path) -> None:
    page = Page(report(run))
    assert page.stack == [] and page.loads == ["data:,"]
    data = json.loads(page.texts["data"])
    places = {"time", "throughput", "rollout", "acceptance", "speedup", "cache", "imbalance", "regime"}
    assert set(data["figures"]) == places and places <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert {"timeline", "questions", "errors", "step"} <= set(page.ids)


def test_the_stacks_of_the_time_chart_add_up_to_the_rollout(run: Path) -> None:
    figure = json.loads(Page(report(run)).texts["data"])["figures"]["time"]
    seconds = [e["metrics"]["war/rollout/seconds"] for e in load_summary(run)["steps"]]
    assert np.sum([d["y"] for d in figure["data"]], axis=0) == pytest.approx(seconds)
    assert figure["layout"]["barmode"] == "stack"


@pytest.mark.parametrize(("last", "apart"), [(2, 1), (11, 1), (12, 2), (1000, 100)])
def test_ticks_are_at_whole_steps_and_few(last: int, apart: int) -> None:
    steps = [{"step": n, "metrics": {"war/rollout/tokens_per_s": 1.0}} for n in range(1, last + 1)]
    axis = line_charts({"run": {"steps": steps}})["throughput"]["layout"]["xaxis"]
    assert (axis["tick0"], axis["dtick"]) == (1, apart)


def test_the_timeline_holds_every_turn_once_on_its_replica_and_no_bars_overlap() -> None:
    trace = step_trace(trajectories=40, migrate=True)
    found = timeline(trace)
    assert (found["shown"], found["total"]) == (40, 40)
    decode = found["kinds"]["decode"]
    pairs = list(zip(unpack(decode["record"]), unpack(decode["turn"]), strict=True))
    assert sorted(pairs) == [(i, k) for i in range(40) for k in range(3)]
    rows = unpack(decode["row"])
    for (record, turn), row in zip(pairs, rows, strict=True):
        replica = trace.records[record].turns[turn].replica
        lanes = next(r for r in found["replicas"] if r["name"] == replica)
        assert lanes["first"] <= row < lanes["first"] + lanes["lanes"] < found["rows"]
    bars = [[unpack(k[name]).tolist() for name in ("row", "begin", "end")] for k in found["kinds"].values()]
    every = sorted(bar for columns in bars for bar in zip(*columns, strict=True))
    for (row, _, end), (next_row, begin, _) in pairwise(every):
        assert row != next_row or begin >= end - 1e-4


def test_the_page_stays_within_a_bound_of_turns_and_keeps_the_slowest_and_the_newest() -> None:
    traces = [step_trace(step) for step in range(1, 6)]
    traces[1].seconds = 99.0
    assert [t.step for t in choose_steps(traces, limit=36)] == [2, 4, 5]
    assert [t.step for t in choose_steps(traces, limit=1)] == [2]
    assert choose_steps([]) == []


def test_names_from_outside_cannot_break_the_page(tmp_path: Path) -> None:
    trace = step_trace()
    trace.records[0].turns[0].reason = "</script><script>alert(1)</script>"
    name = "<b>@DATA@</b>"
    text = build({name: load_summary(write_run(tmp_path / "r"))}, [trace])
    page = Page(text)
    assert page.stack == [] and "alert(1)</script>" not in text
    assert text.count("&lt;b&gt;@DATA@&lt;/b&gt;") >= 2


def test_two_runs_are_compared_with_the_check_of_equal_work(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "vllm", rollout="vllm")
    page = Page(report(run, other))
    assert page.texts["verdict"].startswith("Equal work") and "SLOWER" in page.texts["questions"]
    names = {d["name"] for d in json.loads(page.texts["data"])["figures"]["throughput"]["data"]}
    assert names == {"all replicas (war)", "all replicas (vllm)"}
    less = write_run(tmp_path / "less", rollout="vllm", trajectories=5)
    page = Page(report(run, less))
    assert page.texts["verdict"].startswith("NOT EQUAL WORK") and "Not comparable" in page.texts["questions"]


def test_a_run_without_a_trace_says_so(tmp_path: Path) -> None:
    text = report(write_run(tmp_path / "r", trace="off"))
    assert "war.trace=off" in text and re.search(r'id="timeline-section" hidden', text)


def test_the_questions_are_answered(run: Path) -> None:
    summary = load_summary(run)
    speedups = [e["metrics"]["war/spec/estimated_speedup"] for e in summary["steps"]]
    assert f"{sum(speedups) / 3:.2f}x as fast (3.40 tokens per verify step)" in is_it_helping(summary)
    assert max(speedups) > 1.02
    assert "environment and tools" in where_does_time_go(summary)
    assert re.match(r"Step 2: .* environment and tools grew most \(\+30\.0 s\)", why_is_a_step_slow(summary))
    assert is_anything_broken(summary) == ["No alarm fired."]
    summary["steps"][2]["metrics"]["war/rollout/failed"] = 8.0
    summary.update(status="failed", error="engine died")
    broken = is_anything_broken(summary)
    assert broken[0] == "The run failed: engine died." and "Step 3, many_failed" in broken[1]


def test_a_run_without_steps_still_gives_a_page(tmp_path: Path) -> None:
    page = Page(report(write_run(tmp_path / "r", steps=0, trace="off")))
    assert "No time split" in page.texts["questions"]


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0 and (run / "report.html").stat().st_size > 1_000_000
    assert main([str(run), "--out", str(tmp_path / "x.html")]) == 0 and (tmp_path / "x.html").is_file()
    assert main([str(tmp_path / "nowhere")]) == 1 and "no run summary" in capsys.readouterr().err
