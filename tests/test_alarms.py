# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest

from war_rl.alarms import RULES, Alarms, Situation

WELL = {
    "war/rollout/generated_tokens": 5000.0,
    "war/rollout/turns": 64.0,
    "war/rollout/trajectories": 16.0,
    "war/rollout/failed": 0.0,
    "war/regime/low_share": 0.6,
    "war/spec/drafts": 300.0,
    "war/spec/draft_tokens": 900.0,
    "war/spec/acceptance_rate": 0.6,
    "war/spec/estimated_speedup": 1.3,
    "war/spec/feed_lag_s": 0.1,
    "war/spec/requests_not_draftable": 0.0,
    "war/cache/hit_rate": 0.7,
    "war/cache/unreported_turns": 0.0,
    "war/sched/residency_error": 0.02,
    "war/sched/residency_abs_error_tokens": 3000.0,
    "war/sched/replica_tokens_max_over_mean": 1.1,
    "war/replica/tokens_per_s_min": 90.0,
    "war/replica/tokens_per_s_max": 100.0,
    "training/rollout_probs_diff_mean": 0.001,
}
SITUATION = Situation(drafting=True, replicas=2)

# By cause: what makes it fire after a healthy step, and something near to it that must not.
CASES: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "no_drafts": ({"war/spec/drafts": 0.0}, {"war/spec/drafts": 0.0, "war/regime/low_share": 0.05}),
    "acceptance_too_good": (
        {"war/spec/acceptance_rate": 0.99},
        {"war/spec/acceptance_rate": 0.99, "war/spec/draft_tokens": 20.0},
    ),
    "drafting_loses": ({"war/spec/estimated_speedup": 0.9}, {"war/spec/estimated_speedup": 0.99}),
    "hit_rate_collapsed": ({"war/cache/hit_rate": 0.2}, {"war/cache/hit_rate": 0.5}),
    "residency_wrong": (
        {"war/sched/residency_error": 0.3},
        {"war/sched/residency_error": 0.3, "war/sched/residency_abs_error_tokens": 100.0},
    ),
    "replica_behind": (
        {"war/replica/tokens_per_s_min": 30.0},
        {"war/replica/tokens_per_s_min": 30.0, "war/rollout/turns": 10.0},
    ),
    "probs_drift": ({"training/rollout_probs_diff_mean": 0.05}, {"training/rollout_probs_diff_mean": 0.01}),
    "feed_late": ({"war/spec/feed_lag_s": 9.0}, {"war/spec/feed_lag_s": 2.0}),
    "fallbacks": ({"war/spec/requests_not_draftable": 3.0}, {}),
    "many_failed": ({"war/rollout/failed": 4.0}, {"war/rollout/failed": 1.0}),
    "not_finite": ({"war/fault/nonfinite_turns": 1.0}, {"war/fault/nonfinite_turns": 0.0}),
}


def test_every_rule_has_its_cases() -> None:
    assert set(CASES) == set(RULES)


@pytest.mark.parametrize("cause", CASES)
def test_a_rule_fires_on_its_trouble_alone_and_once(cause: str) -> None:
    alarms = Alarms(SITUATION)
    assert alarms.check(WELL) == []
    broken = {**WELL, **CASES[cause][0]}
    (alarm,) = alarms.check(broken)
    assert alarm.cause == cause and len(alarm.text) > 20
    assert alarms.check(broken) == []


@pytest.mark.parametrize("cause", CASES)
def test_a_rule_keeps_quiet_near_by(cause: str) -> None:
    alarms = Alarms(SITUATION)
    alarms.check(WELL)
    assert alarms.check({**WELL, **CASES[cause][1]}) == []


def test_no_drafts_is_no_trouble_where_none_are_wanted() -> None:
    assert Alarms(Situation(drafting=False, replicas=2)).check({**WELL, "war/spec/drafts": 0.0}) == []


def test_one_replica_is_never_behind() -> None:
    broken = {**WELL, "war/replica/tokens_per_s_min": 0.0}
    assert Alarms(Situation(drafting=True, replicas=1)).check(broken) == []


def test_a_difference_that_was_always_there_is_told_in_the_first_step_and_growth_needs_a_factor() -> None:
    high = {**WELL, "training/rollout_probs_diff_mean": 0.05}
    assert [a.cause for a in Alarms(SITUATION).check(high)] == ["probs_drift"]
    alarms = Alarms(SITUATION)
    alarms.check({**WELL, "training/rollout_probs_diff_mean": 0.019})
    assert alarms.check(high) == []


def test_nothing_known_and_nothing_finite_fire_nothing() -> None:
    assert Alarms(SITUATION).check({}) == []
    alarms = Alarms(SITUATION)
    assert alarms.check({**WELL, "training/rollout_probs_diff_mean": math.nan}) == []
    assert alarms.check({**WELL, "training/rollout_probs_diff_mean": 0.05}) != []
