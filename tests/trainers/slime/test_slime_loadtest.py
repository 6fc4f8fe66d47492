# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from war_rl.trainers.slime import loadtest


def test_added_is_the_median_over_pairs():
    through, direct = [0.010, 0.2, 0.012, 0.3, 0.020], {0: 0.009, 2: 0.010, 4: 0.010}
    got = loadtest._summary(100.0, through, direct, failed=0, took=0.05)
    assert got["added_ms_p50"] == 2.0 and got["rate_served_per_s"] == 100.0
    assert got["direct_ms_p50"] == 10.0 and got["router_ms_p50"] == 20.0


@pytest.mark.slow
def test_a_short_run_serves_every_request_and_leaves_the_cores_as_they_were():
    before = os.sched_getaffinity(0)
    first, second = loadtest.main(["--rate", "20", "40", "--seconds", "1", "--answer-s", "0.01"])
    assert (first["requests"], second["requests"]) == (20, 40) and first["failed"] == second["failed"] == 0
    assert first["router_cpu_ms_per_request"] > 0 and os.sched_getaffinity(0) == before


@pytest.mark.slow
def test_cpu_time_is_measured_in_one_thread(monkeypatch):
    monkeypatch.setattr(loadtest, "CPU_REQUESTS", 40)
    (result,) = loadtest.main(["--cpu"])
    assert 0 < result["cpu_added_ms_p50"] <= result["cpu_added_ms_max"]
