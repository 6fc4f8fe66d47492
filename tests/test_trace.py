# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.records import step_trace
from war_rl.analysis import turn_times
from war_rl.trace import (
    FILE,
    OLD_FILE,
    SAMPLED,
    StepTrace,
    TraceWriter,
    choose,
    chrome_trace,
    decode,
    encode_step,
    main,
    read,
    stays,
)
from war_rl.types import TrajectoryId, TrajectoryRecord


def test_a_step_is_read_back_as_it_was() -> None:
    trace = step_trace(trajectories=5)
    trace.records[1].status, trace.records[1].error, trace.records[2].reward = "failed", "lost", 0.5
    trace.records[3].turns[0].cached_tokens = None
    (back,) = decode(encode_step(trace).splitlines())
    for mine, other in zip(trace.records, back.records, strict=True):
        assert (mine.trajectory, mine.status, mine.error, mine.reward) == (
            other.trajectory,
            other.status,
            other.error,
            other.reward,
        )
        assert [t.asked for t in turn_times(other)] == pytest.approx([t.asked for t in turn_times(mine)], abs=1e-3)
        for a, b in zip(mine.turns, other.turns, strict=True):
            b.started, b.seconds, b.queue_seconds = a.started, a.seconds, a.queue_seconds
            assert a == b
    assert (back.step, back.total, back.replicas) == (trace.step, 5, trace.replicas)


def test_what_a_dying_writer_cut_short_costs_one_line_only() -> None:
    text = encode_step(step_trace(step=1)) + encode_step(step_trace(step=2))
    first, second = decode(text[:-20].splitlines())
    assert len(first.records) == 4 and len(second.records) == 3


def test_sampling_keeps_the_slowest_and_spreads_the_rest() -> None:
    records = [TrajectoryRecord(TrajectoryId("g", i, 1), float(i), i + 1.0 + (i == 500) * 50) for i in range(1000)]
    kept = choose(records)
    assert len(kept) == SAMPLED and records[500] in kept
    starts = [r.started for r in kept]
    assert starts == sorted(starts) and max(b - a for a, b in pairwise(starts)) < 60
    assert choose(records[:10]) == records[:10]


@given(st.integers(1, 300), st.integers(4, 80))
def test_sampling_keeps_exactly_what_is_allowed(count: int, limit: int) -> None:
    records = [TrajectoryRecord(TrajectoryId("g", i, 1), 0.0, float(i % 7)) for i in range(count)]
    assert len(choose(records, limit)) == min(count, limit)


@pytest.mark.parametrize(("mode", "traced"), [("off", 0), ("sampled", SAMPLED), ("full", 100)])
def test_modes(tmp_path: Path, mode: str, traced: int) -> None:
    assert TraceWriter(tmp_path, mode, 1 << 20).add(step_trace(trajectories=100)) == traced
    assert (tmp_path / FILE).exists() is (mode != "off")
    if traced:
        (back,) = read(tmp_path)
        assert len(back.records) == traced and back.total == 100


def test_the_files_never_exceed_their_bound_and_hold_the_newest_steps(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "full", 20_000)
    for step in range(1, 40):
        assert writer.add(step_trace(step=step)) == 4
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000
    steps = [t.step for t in read(tmp_path)]
    assert steps == list(range(40 - len(steps), 40)) and len(steps) >= 4
    assert {file.name for file in tmp_path.iterdir()} == {FILE, OLD_FILE}


def test_a_rollout_larger_than_the_bound_is_sampled_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TraceWriter(tmp_path, "full", 150_000)
    with caplog.at_level(logging.WARNING):
        assert [writer.add(step_trace(step=s, trajectories=600)) for s in (1, 2)] == [SAMPLED, SAMPLED]
    assert len(caplog.records) == 1 and "war.trace_mb" in caplog.text


def test_a_disk_that_refuses_costs_the_trace_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    writer = TraceWriter(tmp_path / "run", "full", 1 << 20)
    with caplog.at_level(logging.WARNING):
        assert writer.add(step_trace()) == 0
    assert "cannot be written" in caplog.text


def test_what_a_full_disk_or_a_death_cut_short_costs_no_other_rollout(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(encode_step(step_trace(step=1)) + encode_step(step_trace(step=2))[:-30])
    assert TraceWriter(tmp_path, "full", 1 << 20).add(step_trace(step=3)) == 4
    assert [(t.step, len(t.records)) for t in read(tmp_path)] == [(1, 4), (2, 3), (3, 4)]


def test_a_step_done_again_replaces_the_old_one(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "full", 1 << 20)
    for trajectories in (4, 7):
        writer.add(step_trace(step=3, trajectories=trajectories))
    assert [t.total for t in read(tmp_path)] == [7]
    writer.clear()
    assert not list(tmp_path.iterdir())


def test_no_two_stays_share_a_lane_at_one_time() -> None:
    trace = step_trace(trajectories=60, migrate=True)
    taken: dict[tuple[str, int], float] = {}
    placed = sorted(stays(trace.records), key=lambda s: s.turns[0][1].asked)
    for stay in placed:
        assert stay.turns[0][1].asked >= taken.get((stay.replica, stay.lane), 0.0)
        taken[stay.replica, stay.lane] = stay.turns[-1][1].ended
    assert sum(len(s.turns) for s in placed) == sum(len(r.turns) for r in trace.records)
    assert any(len({s.replica for s in placed if s.record == i}) > 1 for i in range(60))


def test_the_chrome_trace_has_every_turn_and_no_overlap_within_a_thread() -> None:
    trace = step_trace(trajectories=20)
    events = chrome_trace([trace])["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    decodes = [e for e in slices if e["name"] == "decode"]
    assert len(decodes) == sum(len(r.turns) for r in trace.records)
    assert sum(e["args"]["generated"] for e in decodes) == sum(
        t.generated_tokens for r in trace.records for t in r.turns
    )
    assert {e["name"] for e in slices} == {"queue", "prefill", "decode", "environment"}
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["replica 0 10.0.0.1:1", "replica 1 10.0.0.1:2"]
    threads: dict[tuple[int, int], float] = {}
    for e in sorted(slices, key=lambda e: (e["ts"], e["dur"])):
        # Rounded to whole microseconds.
        assert e["ts"] >= threads.get((e["pid"], e["tid"]), 0) - 2
        threads[e["pid"], e["tid"]] = e["ts"] + e["dur"]


def test_the_command_writes_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "x.json")]) == 1
    assert "war.trace=off" in capsys.readouterr().err
    writer = TraceWriter(tmp_path, "full", 1 << 20)
    for step in (1, 2):
        writer.add(step_trace(step=step))
    assert main([str(tmp_path), "--step", "2", "--out", str(tmp_path / "x.json")]) == 0
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X"} == {2}
    assert main([str(tmp_path), "--step", "9", "--out", str(tmp_path / "x.json")]) == 1


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="off, sampled, full"):
        TraceWriter("x", "all", 1)
    with pytest.raises(ValueError, match="format"):
        list(decode(['{"format": 9}', '{"format": 9}']))
    assert StepTrace(1, False, 0.0, 1.0, [], 0).records == []
