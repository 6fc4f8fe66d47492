# SPDX-License-Identifier: Apache-2.0
"""What hangs without dying: an agent loop that blocks its worker's event loop, an engine that is stopped in a rollout,
an engine that does not return from a weight update."""

from __future__ import annotations

import re

import psutil
import pytest

from tests.support.failing import FILE_VARIABLE, HANGS
from tests.support.training import Run, find, run_training

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


def stop_engine(process: psutil.Process) -> None:
    """The engine process lives, and does nothing any more; its server answers as before."""
    find(process, "VLLM::EngineCore")[0].suspend()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Run:
    limits = ("war.fault.stall_s=15", "war.progress=on")
    folder = tmp_path_factory.mktemp("stopped")
    return run_training(folder, *limits, loop="SlowLoop", when="] step 1:", act=stop_engine)


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("stuck")
    return run_training(
        folder,
        "war.fault.update_timeout_s=20",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=tests.support.failing.HangingExtension",
        environment={FILE_VARIABLE: str(folder / "hangs")},
        when=HANGS,
        act=lambda process: None,
    )


def test_an_engine_that_hangs_in_a_rollout_ends_the_run_and_is_named(stopped: Run):
    assert stopped.code not in (0, 130), stopped.output[-5000:]
    cause = r"rollout replica \S+ is dead: it has requests to run and has made no step for 15 s \(war.fault.stall_s\)"
    assert re.search(cause, stopped.summary["error"]), stopped.summary["error"]
    assert stopped.summary["faults"] == {"war/fault/replica_lost": 1.0}


def test_a_weight_update_that_hangs_ends_the_run_and_names_who_waits(stuck: Run):
    assert stuck.code not in (0, 130), stuck.output[-5000:]
    cause = (
        r"the weights of step 1 have been on their way for 20 s \(war.fault.update_timeout_s\); replicas without them: "
    )
    assert re.search(cause, stuck.summary["error"]), stuck.summary["error"]
    assert stuck.summary["faults"] == {"war/fault/update_stuck": 1.0}


def test_they_end_in_time_and_leave_nothing(stopped: Run, stuck: Run):
    for run in (stopped, stuck):
        assert 0 < run.seconds_after_action < 120
        assert run.left_processes == []
