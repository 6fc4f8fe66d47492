# SPDX-License-Identifier: Apache-2.0
"""Order of runs, ratios and the equal-work alarm, on an engine whose speed is known."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.bench.stats import (
    PlannedRun,
    SideRun,
    Spread,
    Work,
    exit_code,
    imbalance,
    measure,
    plan_rounds,
    plan_runs,
    ratio_interval,
    side_labels,
    throughput_ratio,
    work_equal,
    work_spread,
)

WORK = Work(turns=10, generated_tokens=1000, requested_prompt_tokens=5000)


class FakeEngine:
    """Takes ``cost[side]`` seconds for a run, plus ``drift`` seconds more with every run done so far."""

    def __init__(self, cost: Mapping[str, float], drift: float = 0.0, work: Mapping[str, Work] | None = None) -> None:
        self.cost, self.drift, self.work = cost, drift, work or {}
        self.log: list[str] = []

    def __call__(self, planned: PlannedRun) -> SideRun:
        seconds = self.cost[planned.side] + self.drift * len(self.log)
        self.log.append(planned.side + ("w" if planned.warmup else str(planned.pair)))
        return SideRun(planned.side, planned.pair, seconds, self.work.get(planned.side, WORK))


def test_warm_up_then_a_b_b_a() -> None:
    engine, done = FakeEngine({"A": 1.0, "B": 2.0}), []
    runs = measure(plan_runs(["A", "B"], 3), engine, lambda planned, run: done.append(planned.side))
    assert engine.log == ["Aw", "Bw", "A0", "B0", "B1", "A1", "A2", "B2"]
    assert [run.side for run in runs] == ["A", "B", "B", "A", "A", "B"]
    assert len(done) == 8
    engine = FakeEngine({"A": 1.0, "B": 2.0, "C": 3.0})
    measure(plan_runs(["A", "B", "C"], 2, warmups=0), engine)
    assert engine.log == ["A0", "B0", "C0", "C1", "B1", "A1"]


def test_ratio_is_first_over_second_throughput() -> None:
    runs = measure(plan_runs(["war", "vllm"], 2), FakeEngine({"war": 2.0, "vllm": 3.0}))
    assert throughput_ratio(runs, "war", "vllm") == Spread(1.5, 1.5, 1.5, (1.5, 1.5))
    assert throughput_ratio(runs, "vllm", "war").median == pytest.approx(2 / 3)


def test_ratios_are_taken_pair_by_pair() -> None:
    seconds = {("A", 0): 1.0, ("B", 0): 2.0, ("A", 1): 10.0, ("B", 1): 10.0, ("A", 2): 4.0, ("B", 2): 1.0}
    runs = [SideRun(side, pair, s, WORK) for (side, pair), s in seconds.items()]
    assert throughput_ratio(list(reversed(runs)), "A", "B") == Spread(1.0, 0.25, 2.0, (2.0, 1.0, 0.25))


@given(cost=st.floats(1, 100), drift=st.floats(0, 0.1), pairs=st.integers(1, 4))
def test_a_drifting_machine_does_not_favour_a_side_that_meets_itself(cost: float, drift: float, pairs: int) -> None:
    runs = measure(plan_runs(["A", "B"], 2 * pairs), FakeEngine({"A": cost, "B": cost}, drift))
    ratio = throughput_ratio(runs, "A", "B")
    assert ratio.min <= 1.0 + 1e-9 and ratio.max >= 1.0 - 1e-9
    total = {side: sum(run.seconds for run in runs if run.side == side) for side in "AB"}
    assert total["A"] == pytest.approx(total["B"])


def of_seconds(**sides: list[float]) -> list[SideRun]:
    return [SideRun(side, pair, s, WORK) for side, seconds in sides.items() for pair, s in enumerate(seconds)]


def test_the_interval_is_that_of_two_samples_of_log_throughputs() -> None:
    # Deviations of 0.01 on each side: pooled 0.01 * sqrt(2), standard error the same, t(0.975, 2) = 4.303.
    runs = of_seconds(A=[math.exp(0.01), math.exp(-0.01)], B=[2 * math.exp(0.01), 2 * math.exp(-0.01)])
    reach = math.exp(4.3027 * 0.01 * math.sqrt(2))
    assert ratio_interval(runs, "A", "B") == pytest.approx((2 / reach, 2 * reach), rel=1e-4)
    assert ratio_interval(of_seconds(A=[1.0], B=[2.0]), "A", "B") is None


def test_the_interval_of_equal_sides_holds_one_as_often_as_it_says() -> None:
    draw = random.Random(4)
    trials, missed, outside = 2000, 0, 0
    for _ in range(trials):
        runs = of_seconds(**{side: [math.exp(draw.gauss(4.0, 0.03)) for _ in range(2)] for side in "AB"})
        low, high = ratio_interval(runs, "A", "B") or (0.0, 0.0)
        missed += not low <= 1.0 <= high
        ratio = throughput_ratio(runs, "A", "B")
        outside += not ratio.min <= 1.0 <= ratio.max
    # Five standard deviations of 2,000 draws around 5 %; least to greatest of two pairs misses every second time.
    assert abs(missed / trials - 0.05) < 5 * math.sqrt(0.05 * 0.95 / trials)
    assert outside / trials > 0.4


def test_unpaired_or_empty_runs_have_no_ratio() -> None:
    a, b = SideRun("A", 0, 1.0, WORK), SideRun("B", 0, 1.0, WORK)
    for runs in ([], [a], [a, b, SideRun("B", 1, 1.0, WORK)], [a, a, b]):
        with pytest.raises(ValueError, match="not measured in pairs"):
            throughput_ratio(runs, "A", "B")
    with pytest.raises(ValueError, match="generated no tokens"):
        throughput_ratio([a, SideRun("B", 0, 1.0, Work(1, 0, 5))], "A", "B")


@pytest.mark.parametrize("kind", ["turns", "generated_tokens", "requested_prompt_tokens"])
def test_the_alarm_rings_for_each_kind_of_work_beyond_one_percent(kind: str) -> None:
    for amount, equal in ((10_000, True), (9_900, True), (9_899, False), (10_102, False)):
        sizes = {"turns": 10_000, "generated_tokens": 10_000, "requested_prompt_tokens": 10_000}
        other = Work(**{**sizes, kind: amount})
        runs = [SideRun("A", 0, 1.0, Work(**sizes)), SideRun("B", 0, 9.0, other)]
        assert work_equal(runs) is equal
        assert exit_code(runs) == (0 if equal else 3)
        assert {k for k, spread in work_spread(runs).items() if spread} == ({kind} if amount != 10_000 else set())


def test_the_alarm_sees_a_later_pair_and_a_side_that_did_nothing() -> None:
    runs = measure(plan_runs(["A", "B"], 2), FakeEngine({"A": 1.0, "B": 1.0}))
    assert work_equal(runs)
    assert not work_equal([*runs[:3], SideRun("A", 1, 1.0, Work(10, 900, 5000))])
    assert not work_equal([*runs, SideRun("C", 0, 1.0, Work(0, 0, 0))])
    assert work_spread([SideRun("A", 0, 1.0, Work(0, 0, 0))])["turns"] == 0.0


def test_results_do_not_count_as_work() -> None:
    runs = [
        SideRun("A", 0, 1.0, WORK, {"prefill_cached_tokens": 4000, "preemptions": 9, "draft_tokens": 70}),
        SideRun("B", 0, 1.0, WORK, {"prefill_cached_tokens": 0, "preemptions": 0, "draft_tokens": 0}),
    ]
    assert work_equal(runs)


def test_an_engine_that_answers_for_another_run_is_caught() -> None:
    with pytest.raises(ValueError, match="asked for A, pair -1; got B"):
        measure(plan_runs(["A", "B"], 1), lambda planned: SideRun("B", planned.pair, 1.0, WORK))


def test_a_side_can_meet_itself() -> None:
    labels = side_labels(["vllm", "war", "vllm"])
    assert labels == {"vllm": "vllm", "war": "war", "vllm#2": "vllm"}
    assert plan_runs(list(labels), 1, 0)[2] == PlannedRun("vllm#2", 0)


def test_bad_plans_and_runs() -> None:
    with pytest.raises(ValueError, match="needs two sides"):
        plan_runs(["war"], 1)
    with pytest.raises(ValueError, match="not all different"):
        plan_runs(["war", "war"], 1)
    with pytest.raises(ValueError, match="pairs=0"):
        plan_runs(["a", "b"], 0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not a measurement"):
            SideRun("A", 0, seconds, WORK)
    with pytest.raises(ValueError, match="unknown counters cached"):
        SideRun("A", 0, 1.0, WORK, {"cached": 1})


def test_imbalance() -> None:
    assert imbalance([5, 5]) == 1.0
    assert imbalance([3, 1]) == 1.5
    assert imbalance([4, 0]) == 2.0
    assert imbalance([]) == imbalance([0, 0]) == 1.0


def test_rounds_share_out_the_pairs_and_reverse_the_order_of_start() -> None:
    rounds = plan_rounds(["a", "b"], 3, 2)
    assert [[(run.side, run.pair) for run in plan] for plan in rounds] == [
        [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("b", 1), ("a", 1)],
        [("b", -1), ("a", -1), ("b", 2), ("a", 2)],
    ]
    assert len(plan_rounds(["a", "b"], 1, 2)) == 1
    with pytest.raises(ValueError, match="--rounds 0"):
        plan_rounds(["a", "b"], 2, 0)
