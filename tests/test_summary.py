# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from war_rl.summary import (
    RunSummary,
    compare_table,
    config_digest,
    format_table,
    load_summary,
    mark_ended,
    unequal_work,
    versions,
)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def start(folder: Path, rollout: str = "war", clock: Clock | None = None, at: float = 1000.0) -> RunSummary:
    return RunSummary(
        folder,
        rollout=rollout,
        config={"a": 1},
        clock=clock or Clock(),
        unix_time=lambda: at,
        versions={"verl": "1"},
        extra={"run": "x"},
    )


def metrics(**changes: float) -> dict[str, Any]:
    base = {"rollout/seconds": 2.0, "rollout/trajectories": 8.0, "rollout/turns": 20.0}
    base |= {"rollout/generated_tokens": 1000.0, "cache/prompt_tokens": 5000.0}
    return {f"war/{k}": v for k, v in {**base, **changes}.items()}


def test_the_file_is_whole_after_every_step(tmp_path: Path) -> None:
    clock = Clock()
    summary = start(tmp_path / "run", clock=clock)
    assert load_summary(tmp_path / "run")["status"] == "running"
    for step in (1, 2):
        clock.now += 10
        summary.add_step(step, {**metrics(), "critic/score/mean": 0.5 * step, "text": "no", "flag": True})
        data = load_summary(tmp_path / "run")
        assert [e["step"] for e in data["steps"]] == list(range(1, step + 1))
    last = data["steps"][-1]
    assert last["reward"] == 1.0 and last["wall_seconds"] == 20.0 and last["metrics"]["war/rollout/turns"] == 20.0
    assert "text" not in last["metrics"] and "flag" not in last["metrics"]
    assert data["versions"] == {"verl": "1"} and data["config_digest"] == config_digest({"a": 1}) and data["run"] == "x"
    assert os.listdir(tmp_path / "run") == ["summary.json"]


def test_a_disk_that_refuses_costs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    summary = start(tmp_path)
    summary.add_step(1, metrics())
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
        summary.add_step(2, metrics())
        assert [e["step"] for e in load_summary(tmp_path)["steps"]] == [1] and "disk full" in caplog.text
        with pytest.raises(OSError, match="disk full"):
            start(tmp_path / "new")
    assert (summary.take_unwritten(), summary.take_unwritten()) == (1, 0)
    summary.add_step(3, metrics())
    assert [e["step"] for e in load_summary(tmp_path)["steps"]] == [1, 2, 3]


def resumed(folder: Path) -> RunSummary:
    return RunSummary(folder, rollout="war", config={}, clock=Clock(), versions={}, resume=True)


def test_a_resumed_run_keeps_the_steps_up_to_its_checkpoint_and_how_the_earlier_one_ended(tmp_path: Path) -> None:
    first = start(tmp_path)
    first.add_validation(0, metrics())
    for step in (1, 2, 3):
        first.add_step(step, metrics(), 0.1 * step)
    first.finish("failed", "a replica died", {"war/fault/replica_lost": 1.0})
    second = resumed(tmp_path)
    assert [e["step"] for e in load_summary(tmp_path)["steps"]] == [1, 2, 3]  # nothing is lost before it is known
    second.resumed_from(2)
    second.started(2, {"war/sync/weight_sum": 7.5, "text": "no"})
    third = resumed(tmp_path)  # the second was killed
    third.resumed_from(2)
    third.add_step(3, metrics(), 0.9)
    data = load_summary(tmp_path)
    assert [(e["step"], e["reward"]) for e in data["steps"]] == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert [e["step"] for e in data["validations"]] == [0]
    assert [(e["status"], e["last_step"]) for e in data["earlier"]] == [("failed", 3), ("failed", 2)]
    assert data["earlier"][0]["faults"] == {"war/fault/replica_lost": 1.0} and "faults" not in data
    assert "killed" in data["earlier"][1]["error"]
    assert "earlier: failed after step 3: a replica died" in format_table(data)


def test_a_run_that_finds_no_checkpoint_or_wants_none_forgets_the_earlier_steps(tmp_path: Path) -> None:
    start(tmp_path).add_step(1, metrics())
    summary = resumed(tmp_path)
    summary.started(0, {"war/sync/weight_sum": 7.5})
    summary.resumed_from(0)
    data = load_summary(tmp_path)
    assert data["steps"] == [] and len(data["earlier"]) == 1
    assert data["start"] == {"step": 0, "war/sync/weight_sum": 7.5}
    start(tmp_path)
    assert load_summary(tmp_path)["earlier"] == []


def test_an_earlier_summary_that_cannot_be_read_does_not_keep_the_next_run_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "summary.json").write_text("{")
    resumed(tmp_path)
    assert load_summary(tmp_path)["steps"] == [] and "cannot be read" in caplog.text


def test_numbers_of_every_kind_become_json(tmp_path: Path) -> None:
    torch_like = type("Scalar", (), {"item": lambda self: 2.5})()
    summary = start(tmp_path)
    summary.add_step(
        1, {"a": np.float32(0.5), "b": np.int64(3), "c": math.nan, "d": math.inf, "e": torch_like, "f": [1]}
    )
    kept = json.loads((tmp_path / "summary.json").read_text())["steps"][0]["metrics"]
    assert kept == {"a": 0.5, "b": 3, "c": None, "d": None, "e": 2.5}


def test_a_step_done_again_replaces_the_old_one(tmp_path: Path) -> None:
    summary = start(tmp_path)
    for reward in (0.1, 0.9):
        summary.add_step(4, metrics(), reward)
    assert [(e["step"], e["reward"]) for e in load_summary(tmp_path)["steps"]] == [(4, 0.9)]


def test_the_first_ending_counts(tmp_path: Path) -> None:
    summary = start(tmp_path)
    summary.finish("failed", "engine died")
    summary.finish("finished")
    assert (load_summary(tmp_path)["status"], load_summary(tmp_path)["error"]) == ("failed", "engine died")
    with pytest.raises(ValueError, match="'done': not one of"):
        summary.finish("done")


def test_a_killed_run_can_be_closed_from_outside_once(tmp_path: Path) -> None:
    start(tmp_path).add_step(1, metrics())
    assert mark_ended(tmp_path, "interrupted") is True
    assert mark_ended(tmp_path, "failed") is False
    data = load_summary(tmp_path / "summary.json")
    assert data["status"] == "interrupted" and len(data["steps"]) == 1


def test_a_run_that_was_stopped_before_its_first_step_shows_its_seconds(tmp_path: Path) -> None:
    start(tmp_path, at=1000.0)
    assert mark_ended(tmp_path, "interrupted", unix_time=lambda: 1042.4)
    assert format_table(load_summary(tmp_path)).splitlines()[-1].startswith("interrupted after 42 s, 0 steps")


def test_seconds_after_the_last_step_count_and_a_clock_that_is_behind_takes_none_away(tmp_path: Path) -> None:
    for now, seconds in ((1100.0, 100.0), (1003.0, 30.0)):
        clock = Clock()
        summary = start(tmp_path, clock=clock, at=1000.0)
        clock.now += 30
        summary.add_step(1, metrics())
        mark_ended(tmp_path, "failed", unix_time=lambda now=now: now)  # type: ignore[misc]
        assert load_summary(tmp_path)["wall_seconds"] == seconds


def test_what_an_earlier_run_left_is_not_closed_for_this_one(tmp_path: Path) -> None:
    start(tmp_path, at=1000.0)
    assert mark_ended(tmp_path, "failed", since=2000.0, unix_time=lambda: 2010.0) is False
    assert load_summary(tmp_path)["status"] == "running"
    data = load_summary(tmp_path)
    del data["started"]  # as written by an earlier version
    (tmp_path / "summary.json").write_text(json.dumps(data))
    assert mark_ended(tmp_path, "failed") and load_summary(tmp_path)["wall_seconds"] == 0.0


def test_what_was_lost_while_a_run_was_stopped_is_no_fault_of_it(tmp_path: Path) -> None:
    start(tmp_path).finish("failed", "a replica died", {"war/fault/replica_lost": 1.0})
    assert "faults: war/fault/replica_lost 1" in format_table(load_summary(tmp_path))
    mark_ended(tmp_path, "interrupted", instead_of=("running", "failed"))
    assert "faults" not in load_summary(tmp_path)


def test_what_is_no_summary_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "summary.json")):
        load_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="found 99"):
        load_summary(tmp_path)


def test_digest_ignores_order_and_sees_changes() -> None:
    assert config_digest({"a": 1, "b": {"c": 2}}) == config_digest({"b": {"c": 2}, "a": 1})
    assert config_digest({"a": 1}) != config_digest({"a": 2})


def test_versions_lists_what_is_installed() -> None:
    found = versions(("pytest", "no-such-distribution"))
    assert set(found) == {"python", "pytest"} and found["pytest"] == pytest.__version__


def test_table_shows_each_step_and_the_ending(tmp_path: Path) -> None:
    summary = start(tmp_path)
    summary.add_step(1, metrics(**{"cache/hit_rate": 0.756}), 0.25)
    summary.add_step(2, metrics())
    summary.finish("interrupted", "stopped by the user")
    head, first, second, ending, error = format_table(load_summary(tmp_path)).splitlines()
    assert head.split()[:3] == ["step", "reward", "step"] and "cache hit" in head
    assert first.split()[:4] == ["1", "0.250", "-", "2.0"] and "0.76" in first
    assert second.split()[1] == "-"
    assert ending.startswith("interrupted after 0 s, 2 steps, rollout=war, config ") and "stopped" in error


def two_runs(tmp_path: Path, **changes: float) -> tuple[dict[str, Any], dict[str, Any]]:
    out = []
    for name, extra in (("vllm", {}), ("war", changes)):
        summary = start(tmp_path / name, name)
        for step in (1, 2, 3) if name == "war" else (1, 2):
            summary.add_step(step, metrics(**extra), 0.5)
        out.append(load_summary(tmp_path / name))
    return out[0], out[1]


def test_comparison_of_equal_work_gives_ratios_over_common_steps(tmp_path: Path) -> None:
    a, b = two_runs(tmp_path, **{"rollout/seconds": 1.0, "rollout/generated_tokens": 1040.0})
    rows = {line.split()[0]: line.split() for line in compare_table(a, b).splitlines()}
    assert rows["mean"] == ["mean", "per", "step", "vllm", "war", "war/vllm"]
    assert rows["war/rollout/seconds"] == ["war/rollout/seconds", "2.0", "1.0", "0.50"]
    assert rows["reward"][1:] == ["0.500", "0.500", "1.00"] and rows["timing_s/step"][1:] == ["-", "-", "-"]
    assert compare_table(a, b).endswith("steps 1 to 2; equal work within 5%: times may be compared")


def test_comparison_of_unequal_work_says_so(tmp_path: Path) -> None:
    a, b = two_runs(tmp_path, **{"rollout/generated_tokens": 900.0})
    assert unequal_work(a, b) == ["war/rollout/generated_tokens 1000 against 900"]
    assert "NOT EQUAL WORK" in compare_table(a, b)
    for entry in b["steps"]:
        del entry["metrics"]["war/rollout/turns"]
    assert "war/rollout/turns unknown" in unequal_work(a, b)


def test_comparison_without_common_steps_says_so(tmp_path: Path) -> None:
    a, b = two_runs(tmp_path)
    assert compare_table({**a, "steps": []}, b) == "no step that both runs have: vllm has 0, war has 3"
