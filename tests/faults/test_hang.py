# SPDX-License-Identifier: Apache-2.0
"""An agent loop that blocks its worker's event loop: no time limit inside the worker can work any more."""

from __future__ import annotations

import pytest

from tests.support.training import Run, run_training

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.extended]


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("blocked")
    limits = ("war.fault.worker_timeout_s=60", "war.fault.stall_s=20")
    # verl submits the step's prompts with a call that the worker answers before it starts on them.
    return run_training(folder, *limits, loop="BlockingLoop")


def test_the_run_ends_and_names_the_worker(blocked: Run):
    assert blocked.code not in (0, 130), blocked.output[-5000:]
    assert blocked.summary["status"] == "failed"
    assert "has not answered for 60 s (war.fault.worker_timeout_s)" in blocked.summary["error"]
    assert blocked.summary["faults"] == {"war/fault/worker_lost": 1.0}


def test_the_log_shows_the_code_that_blocks(blocked: Run):
    assert "has been blocked for 30 s" in blocked.output
    assert "time.sleep(3600)" in blocked.output and "BlockingLoop" not in blocked.summary["error"]


def test_the_wait_is_told_of_before(blocked: Run):
    assert "[war-rl] nothing has come in for" in blocked.output
