# SPDX-License-Identifier: Apache-2.0
"""Estimates of turns and tokens to come."""

import pytest

from war_rl.rollout.progress import Progress
from war_rl.types import GroupId

G = GroupId("g", 3, "i7")


def make(alpha=0.5):
    return Progress(alpha, turns=4.0, output_tokens=400.0, context_tokens=1000.0)


def test_group_rule_by_hand():
    progress = make(alpha=0.25)
    assert progress.group_turns(G) == 4.0
    progress.observe_finish(G, 8, 100, 500)
    assert progress.group_turns(G) == pytest.approx(0.25 * 8 + 0.75 * 4)
    progress.observe_finish(G, 2, 100, 500)
    assert progress.group_turns(G) == pytest.approx(0.25 * 2 + 0.75 * 5)


def test_levels_group_then_index_then_workload():
    progress = make()
    other = GroupId("h", 3, "i8")
    assert progress.remaining(other, 0, 0, 0).source == "workload"
    progress.observe_finish(G, 10, 1000, 2000)
    assert progress.remaining(G, 0, 0, 0).source == "group"
    later = GroupId("new", 9, "i7")
    assert progress.remaining(later, 0, 0, 0).source == "index"
    assert progress.group_turns(later) > progress.group_turns(GroupId("w", 9, "i9")) - 1e-9
    assert progress.remaining(GroupId("new", 9, "i7", validate=True), 0, 0, 0).source == "workload"


def test_validation_teaches_training_nothing():
    progress = make()
    progress.observe_finish(GroupId("v", 3, "i7", validate=True), 50, 5000, 9000)
    assert progress.group_turns(G) == 4.0


def test_remaining_falls_and_never_ends_before_the_trajectory_does():
    progress = make()
    for _ in range(20):
        progress.observe_finish(G, 6, 600, 3000)
    early, late = progress.remaining(G, 1, 100, 500), progress.remaining(G, 5, 500, 2500)
    assert early.turns == pytest.approx(5, abs=0.01) and late.turns == pytest.approx(1, abs=0.01)
    assert early.context_tokens > late.context_tokens
    beyond = progress.remaining(G, 60, 6000, 30_000)
    assert beyond.turns >= 1 and beyond.output_tokens >= 1 and beyond.context_tokens >= 0


def test_uncertainty_shrinks_when_members_agree_and_grows_when_not():
    agree, differ = make(), make()
    for i in range(10):
        agree.observe_finish(G, 6, 600, 3000)
        differ.observe_finish(G, 2 if i % 2 else 10, 600, 3000)
    assert agree.remaining(G, 0, 0, 0).turns_std < 0.5 < 3.0 < differ.remaining(G, 0, 0, 0).turns_std


def test_live_long_trajectories_lift_the_estimate_that_early_finishers_spoiled():
    progress = make()
    progress.observe_finish(GroupId("short", 3), 1, 10, 100)
    before = progress.group_turns(G)
    for _ in range(50):
        progress.observe_turn(G, 9, 900, 4000, 100)
    assert before < 3 < progress.group_turns(G) <= 9


def test_old_steps_are_forgotten_but_their_index_is_not():
    progress = make()
    progress.observe_finish(G, 10, 1000, 2000)
    progress.forget_before(4)
    assert not progress.probed(G)
    assert progress.remaining(G, 0, 0, 0).source == "index"
