# SPDX-License-Identifier: Apache-2.0
"""The result document, the table, and the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from war_rl.bench import host
from war_rl.bench.plot import cached_fraction, plot_runs, shown_runs, tokens_over_time
from war_rl.bench.report import SCHEMA, build_report, render_table, write_report
from war_rl.bench.stats import ROUTER, Sample, SideRun, Work

WORK = Work(turns=10, generated_tokens=1000, requested_prompt_tokens=5000)


def samples(speed: float) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            t / 10,
            replica,
            running=3,
            queued=1,
            prompt_tokens=50 * t,
            cached_tokens=30 * t,
            generated_tokens=int(speed * t),
        )
        for t in range(10)
        for replica in ("r0", "r1")
    )


def runs(second: Work = WORK) -> list[SideRun]:
    counters = {"prefill_cached_tokens": 4000.0, "preemptions": 2.0, "replica_imbalance": 1.25}
    return [
        SideRun("war", 0, 2.0, WORK, {**counters, "drafts": 7.0}, samples(50)),
        SideRun("vllm", 0, 3.0, second, counters, samples(30)),
        SideRun("vllm", 1, 3.2, second, counters, samples(30)),
        SideRun("war", 1, 2.0, WORK, {**counters, "drafts": 9.0}, samples(50)),
    ]


WORKLOAD = {
    "trajectories": 8,
    "cut": {"trajectories": 2, "turns": 5, "prompt_tokens": 0, "model_tokens": 1234, "env_tokens": 6},
    "notes": {"tool time unknown: default_tool_seconds used": 3},
}


def report(measured: list[SideRun] | None = None) -> dict[str, Any]:
    return build_report(
        measured or runs(),
        ["war", "vllm"],
        machine={"cores": 2},
        versions={"python": "3.11"},
        workload=WORKLOAD,
        settings={"mode": "forced"},
    )


def test_the_document_has_what_the_schema_promises(tmp_path: Path) -> None:
    made = report()
    write_report(made, tmp_path / "out.json")
    loaded = json.loads((tmp_path / "out.json").read_text())
    assert loaded == made
    assert set(SCHEMA["required"]) == set(loaded) == set(SCHEMA["properties"])
    assert set(loaded["ratio"]) == {"median", "min", "max", "values", "interval"}
    assert (loaded["ratio"]["min"], loaded["ratio"]["median"], loaded["ratio"]["max"]) == (1.5, 1.55, 1.6)
    assert loaded["work_equal"] is True
    war = loaded["sides"]["war"]
    assert war["seconds"] == {"median": 2.0, "min": 2.0, "max": 2.0, "values": [2.0, 2.0]}
    assert war["counters"]["drafts"] == 8.0 and "drafts" not in loaded["sides"]["vllm"]["counters"]
    assert [run["pair"] for run in loaded["sides"]["vllm"]["runs"]] == [0, 1]


def test_the_document_validates_and_the_schema_can_refuse() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    made = report()
    jsonschema.validate(made, SCHEMA)
    for broken in ({**made, "work_equal": "yes"}, {k: v for k, v in made.items() if k != "ratio"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, SCHEMA)
    made["sides"]["war"]["counters"]["unheard of"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(made, SCHEMA)


def test_three_sides_are_each_compared_with_the_first() -> None:
    third = [SideRun("vllm+suffix", pair, 4.0, WORK) for pair in (0, 1)]
    kwargs: dict[str, Any] = {"machine": {}, "versions": {}, "workload": {}, "settings": {}}
    made = build_report([*runs(), *third], ["war", "vllm", "vllm+suffix"], **kwargs)
    assert made["ratios"]["vllm+suffix"]["median"] == 2.0
    assert made["ratio"] == made["ratios"]["vllm"]
    assert (
        "war / vllm+suffix throughput: 2.000 (min 2.000, max 2.000, 2 pairs, 95% interval 2.000 to 2.000)"
        in render_table(made)
    )


def test_unequal_work_is_said_in_both() -> None:
    made = report(runs(Work(turns=10, generated_tokens=900, requested_prompt_tokens=5000)))
    assert made["work_equal"] is False
    assert made["work_spread"]["generated_tokens"] == pytest.approx(0.1)
    assert "WORK DIFFERS: generated tokens by 10.00%" in render_table(made)


def test_the_table() -> None:
    table = render_table(report())
    lines = table.splitlines()
    assert max(map(len, lines)) <= 120
    cells = {line[: line.index("  ")].strip(): line.split()[-2:] for line in lines[2:] if "  " in line.strip()}
    assert cells["rollout seconds, median"] == ["2.00", "3.10"]
    assert cells["generated tokens"] == ["1,000", "1,000"]
    assert cells["drafts"] == ["8", "-"]
    assert cells["replica imbalance"] == ["1.25", "1.25"]
    assert "war / vllm throughput: 1.550 (min 1.500, max 1.600, 2 pairs, 95% interval 1.348 to 1.780)" in lines
    assert "work: equal (turns differs most, by 0.00%)" in lines
    assert "cut to fit the context: 2 trajectories lost 5 turns, 1,234 generated and 0 prompt tokens" in lines
    assert "note: tool time unknown: default_tool_seconds used (3 times)" in lines


def test_numbers_json_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report({"x": float("nan")}, tmp_path / "out.json")


def test_host(tmp_path: Path) -> None:
    machine = host.machine()
    assert machine["cores"] >= 1 and machine["memory_gib"] > 0
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU: 2\n")
    assert host._cpu_model(info) == "Fast CPU: 2"
    assert host._cpu_model(tmp_path / "absent") == ""
    assert set(host.versions()) >= {"python", "numpy"}


def test_cached_fraction_is_of_what_was_asked_since_the_last_point() -> None:
    looks = [
        Sample(0.0, "r", 0, 0, 0, 0, 0),
        Sample(1.0, "r", 1, 0, 100, 0, 5),
        Sample(2.0, "r", 1, 0, 100, 0, 9),
        Sample(3.0, "r", 1, 0, 200, 75, 9),
        Sample(4.0, "r", 1, 0, 250, 80, 9),
    ]
    assert cached_fraction(looks) == [(1.0, 0.0), (3.0, 0.75), (4.0, 0.1)]


def test_tokens_over_time_adds_the_replicas() -> None:
    looks = [Sample(2.0, "b", 0, 0, 0, 0, 7), Sample(1.0, "a", 0, 0, 0, 0, 5), Sample(3.0, "a", 0, 0, 0, 0, 6)]
    assert tokens_over_time(looks) == [(0.0, 0), (1.0, 5), (2.0, 12), (3.0, 13)]


def test_the_run_of_median_duration_is_shown() -> None:
    measured = [SideRun("A", pair, s, WORK, {}, samples(1)) for pair, s in enumerate((3.0, 1.0, 2.0))]
    assert [run.seconds for run in shown_runs(measured, ["A"])] == [2.0]
    with pytest.raises(ValueError, match="no timeline was recorded for side B"):
        shown_runs([*measured, SideRun("B", 0, 1.0, WORK)], ["A", "B"])


def test_plot_without_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        plot_runs(runs(), ["war", "vllm"], tmp_path / "p.png")


def test_plot_writes_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_runs(runs(), ["war", "vllm"], tmp_path / "p.png", "fake engine")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "p.png").stat().st_size > 10_000


def test_computed_prefill_is_shown_beside_what_any_schedule_must_compute():
    run = SideRun("war", 0, 2.0, WORK, {"prefill_computed_tokens": 1100.0})
    other = SideRun("vllm", 0, 2.0, WORK, {"prefill_computed_tokens": 2500.0})
    made = build_report(
        [run, other], ["war", "vllm"], machine={}, versions={}, workload={"least_prefill_tokens": 1000}, settings={}
    )
    line = "prefill tokens that any schedule must compute: 1,000 (war 1.10 times that, vllm 2.50 times that)"
    assert line in render_table(made)
    assert "any schedule" not in render_table(report())


def test_a_row_shows_what_the_router_holds(tmp_path):
    pytest.importorskip("matplotlib")
    held = tuple(Sample(t / 10, ROUTER, 0, 5, 0, 0, 0) for t in range(10))
    war, vllm = runs()[:2]
    war = SideRun("war", 0, 2.0, WORK, {}, (*war.timeline, *held))
    # The held ones add no tokens, and the side whose router holds nothing has an empty row.
    assert set(tokens_over_time(war.timeline)) == set(tokens_over_time(samples(50)))
    plot_runs([war, vllm], ["war", "vllm"], tmp_path / "a.svg")
    assert "war, router" in (tmp_path / "a.svg").read_text()


def test_what_a_side_says_of_its_drafts_stands_beside_the_measured_ratio() -> None:
    told = [
        SideRun("war", pair, 2.0, WORK, {}, (), estimate) if side == "war" else SideRun("vllm", pair, 3.0, WORK)
        for side in ("war", "vllm")
        for pair, estimate in ((0, 1.2), (1, 1.25), (2, 1.6))
    ]
    made = report(told)
    war, stock = made["sides"]["war"], made["sides"]["vllm"]
    assert war["estimated_speedup"]["mean"] == pytest.approx(1.35) and war["estimated_speedup"]["median"] == 1.25
    assert [run["estimated_speedup"] for run in war["runs"]] == [1.2, 1.25, 1.6]
    assert "estimated_speedup" not in stock and "estimated_speedup" not in stock["runs"][0]
    pytest.importorskip("jsonschema").validate(made, SCHEMA)
    lines = render_table(made).splitlines()
    assert next(line for line in lines if line.startswith("speed-up by drafts")).split()[-2:] == ["1.350", "-"]
    at = lines.index("war / vllm throughput: 1.500 (min 1.500, max 1.500, 3 pairs, 95% interval 1.500 to 1.500)")
    assert lines[at + 1] == "war, estimated: its drafts made it 1.350 times as fast (mean of 3)"
    assert "estimated" not in render_table(report())


def test_what_observing_costs_is_a_share_of_the_rollout() -> None:
    costs = [SideRun(side, 0, 2.0, WORK, {"observer_seconds": s}) for side, s in (("war", 0.01), ("vllm", 0.003))]
    table = render_table(report(costs))
    assert "metrics and trace, as a share of the rollout seconds and not in them: war 0.50%, vllm 0.15%" in table
    assert next(x for x in table.splitlines() if x.startswith("observer seconds")).split()[-2:] == ["0.0100", "0.0030"]
    assert "metrics and trace" not in render_table(report())
