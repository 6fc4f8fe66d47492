# SPDX-License-Identifier: Apache-2.0
"""`war-rl bench drafter` as it is typed: arguments, table, JSON. No figure is judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from war_rl import cli

FIGURES = {
    "mean_us",
    "p99_us",
    "max_us",
    "cpu_mean_us",
    "cpu_p99_us",
    "cpu_max_us",
    "ingest_us_per_token",
    "ingest_stall_max_ms",
    "ingest_stall_p99_ms",
    "bytes_per_token",
}


def test_both_sides_are_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("arctic_inference")
    out = tmp_path / "bench.json"
    argv = ["bench", "drafter", "--sizes", "10000", "--requests", "2", "--steps", "20", "--json", str(out)]
    assert cli.main(argv) == 0
    result = json.loads(out.read_text())
    assert result["requests"] == 2 and result["steps"] == 20
    sides = result["sizes"]["10000"]
    assert set(sides) == {"war", "library"}
    for figures in sides.values():
        assert set(figures) >= FIGURES
        assert 0 < figures["mean_us"] <= figures["max_us"]
    war, machine = sides["war"], result["machine"]["10000"]
    assert 0 <= war["ingest_slices_over_2_ms"] <= war["ingest_slices"]
    assert machine["pieces"] == 2 * 10_000 // 128
    assert 0 < machine["access_p50_cpu_ms"] <= machine["access_p99_cpu_ms"] <= machine["access_max_cpu_ms"]
    table = capsys.readouterr().out
    assert "the machine alone" in table
    assert "10000 war" in table and "10000 library" in table


@pytest.mark.parametrize(("argv", "word"), [(["--sizes", "0"], "below 1"), (["--sizes", "many"], "invalid")])
def test_sizes_that_cannot_be_are_refused(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "drafter", *argv])
    assert end.value.code == 2 and word in capsys.readouterr().err
