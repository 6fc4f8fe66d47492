# SPDX-License-Identifier: Apache-2.0
"""The growth that leak_run.py measures: its arithmetic on invented processes, and a real run of some steps.

``WAR_LEAK_STEPS`` sets how many (60); the real thing is ``python -m tests.faults.leak_run --steps 300``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.leak_run import Seen, Usage, Watch, judge, leak_run, name_of, read_usage, slope, table
from war_rl.processes import Process

STEPS = int(os.environ.get("WAR_LEAK_STEPS", "60"))


def watched(memory, shared=lambda s: 0, files=lambda s: 50, steps: int = 100) -> Watch:
    """One invented process over ``steps`` steps; each argument is a function of the step."""
    watch = Watch(os.getpid())
    watch.times = {s: float(s) for s in range(1, steps + 1)}
    usages = [Usage(memory(s), shared(s), files(s)) for s in watch.times]
    watch.seen[Process(1, 1)] = Seen("x", list(watch.times), usages)
    return watch


def test_a_slope_ignores_what_happens_once():
    steps = list(range(100))
    assert slope(steps, [3.0 * s + 7 for s in steps]) == pytest.approx(3.0)
    assert slope(steps, [5.0 + 1000 * (s > 70) for s in steps]) == 0.0
    assert slope(steps, [100.0 * (s % 2) for s in steps]) == pytest.approx(0.0, abs=1e-9)
    assert slope([1], [1.0]) == 0.0


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("memory", {"memory": lambda s: 1000 + 100 * s}),
        ("shared", {"memory": lambda s: 1000, "shared": lambda s: 20 * s}),
        ("files", {"memory": lambda s: 1000, "files": lambda s: 50 + s // 20}),
    ],
)
def test_what_grows_is_named(kind, held):
    (verdict,) = judge(watched(**held), after=20)
    assert verdict.why == kind and kind in table([verdict])


def test_growth_of_the_first_steps_and_processes_that_came_and_went_do_not_count():
    (verdict,) = judge(watched(lambda s: 1000 * min(s, 20)), after=20)
    assert verdict.why == "" and verdict.memory == 0.0
    watch = watched(lambda s: 100 * s)
    one = watch.seen[Process(1, 1)]
    del one.steps[60:], one.usages[60:]
    assert judge(watch, after=20) == []


def test_this_very_process_can_be_read():
    usage = read_usage(os.getpid())
    assert usage is not None and usage.memory > 10_000 and usage.files >= 3
    assert name_of(os.getpid()) and read_usage(2**22 + 1) is None


@pytest.mark.e2e
@pytest.mark.faults
@pytest.mark.extended
def test_nothing_grows_and_nothing_is_left(tmp_path: Path):
    result = leak_run(tmp_path, STEPS, after=STEPS // 2)
    print(f"\n{table(result.verdicts)}\n{result.seconds_per_step:.2f} s for each step")
    assert result.problems == [], result.output[-3000:]
    assert len(result.verdicts) > 10
