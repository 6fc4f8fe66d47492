# SPDX-License-Identifier: Apache-2.0
"""Which weights a turn may come from: the guard in the replica, and the look at the batch before it is trained on."""

from __future__ import annotations

import pytest

from war_rl.trainers.verl.version import VersionGuard, WrongVersion, check_batch, version_of
from war_rl.types import TrajectoryId, encode_request_id

TRAINING = encode_request_id(TrajectoryId("g", 2, 5), 3)
VALIDATION = encode_request_id(TrajectoryId("g", 2, 5, validate=True), 0)


def test_a_step_samples_from_what_the_step_before_left_and_a_validation_from_its_own():
    assert version_of(1, validate=False) == 0
    assert version_of(5, validate=True) == 5


def test_turns_under_the_weights_of_their_step_pass():
    guard = VersionGuard()
    guard.check(TRAINING + "-8chars", 4, "before")
    guard.check(VALIDATION, 5, "after")
    assert guard.refused == 0


@pytest.mark.parametrize(("request_id", "version"), [(TRAINING, 5), (TRAINING, 3), (VALIDATION, 4), (VALIDATION, 6)])
def test_a_late_or_early_turn_is_refused_by_name_and_counted(request_id, version):
    guard = VersionGuard()
    with pytest.raises(WrongVersion) as refused:
        guard.check(request_id, version, "before it began")
    assert "g/2" in str(refused.value) and f"has {version} before" in str(refused.value)
    assert guard.refused == 1


def test_who_has_no_trajectory_or_no_trainer_is_not_judged():
    guard = VersionGuard()
    guard.check("0123456789abcdef", 17, "before")
    guard.check(TRAINING, None, "before")
    assert guard.refused == 0


def tags(*versions):
    return [{"min_global_steps": low, "max_global_steps": high} for low, high in versions]


def test_a_batch_of_one_version_passes_and_what_is_not_said_is_not_judged():
    check_batch(["a", "b"], tags((4, 4), (None, None)), 5, validate=False)
    check_batch(["a"], tags((5, 5)), 5, validate=True)


@pytest.mark.parametrize("versions", [(3, 4), (4, 5), (5, 5), (None, 3)])
def test_a_sample_that_spans_an_update_or_is_stale_stops_the_training(versions):
    with pytest.raises(WrongVersion, match="sample b of step 5"):
        check_batch(["a", "b"], tags((4, 4), versions), 5, validate=False)
