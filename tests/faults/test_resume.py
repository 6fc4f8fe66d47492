# SPDX-License-Identifier: Apache-2.0
"""A run that is killed with everything around it goes on from its checkpoint as if nothing had happened.

Three real trainings: one that nobody disturbs; one that is killed with its watcher after its second step; and the one
that is started again in the second one's folder.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest

from tests.support.training import Run, kill_group, run_training

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.extended]


def recorded(folder: object, name: str) -> str:
    return f"war.record_trajectories={folder}/{name}"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("unbroken")
    return run_training(folder, "trainer.total_training_steps=3", recorded(folder, "trajectories"))


class Story(NamedTuple):
    """The killed run with its summary of that moment, what was left of it, and the run that went on."""

    killed: Run
    summary: dict[str, Any]
    processes: list[str]
    shared_memory: list[str]
    resumed: Run


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("killed")
    common = ("trainer.save_freq=1", "trainer.resume_mode=auto", "trainer.total_training_steps=3")
    killed = run_training(folder, *common, loop="SandboxLoop", when="step 2 done", act=kill_group)
    deadline = time.monotonic() + 60
    while len(killed.left_processes) > 1 and time.monotonic() < deadline:
        time.sleep(0.5)  # Ray's workers and the engines see by themselves that their parents are gone
    left, shared_memory, summary = killed.left_processes, killed.left_shared_memory, killed.summary
    resumed = run_training(folder, *common, recorded(folder, "resumed"))
    return Story(killed, summary, left, shared_memory, resumed)


def prompts(run: Run, step: int, folder: str = "trajectories") -> set[tuple[str, tuple[int, ...]]]:
    """Data set index and tokens of a step's prompts."""
    return {
        (t["index"], tuple(t["prompt_ids"]))
        for t in run.trajectories(folder)
        if t["step"] == step and not t["validate"]
    }


def test_the_killed_run_was_killed_and_the_resumed_one_finishes(story):
    assert story.killed.code == -9 and story.summary["status"] == "running"
    assert story.resumed.code == 0, story.resumed.output[-5000:]
    assert story.resumed.summary["status"] == "finished"


def test_the_third_step_has_the_prompts_of_an_unbroken_run(unbroken, story):
    assert len(prompts(unbroken, 3)) == 4
    assert prompts(story.resumed, 3, "resumed") == prompts(unbroken, 3)
    assert prompts(unbroken, 3) != prompts(unbroken, 1)  # so that it means something
    assert {t["step"] for t in story.resumed.trajectories("resumed")} == {3}


def test_the_summary_tells_of_both(story):
    summary = story.resumed.summary
    assert [s["step"] for s in summary["steps"]] == [1, 2, 3]
    (earlier,) = summary["earlier"]
    assert (earlier["status"], earlier["last_step"]) == ("failed", 2) and "killed" in earlier["error"]


def test_it_starts_with_the_weights_that_were_saved(story):
    saved = next(s["metrics"] for s in story.summary["steps"] if s["step"] == 2)
    start = story.resumed.summary["start"]
    assert start["step"] == 2
    assert start["war/sync/weight_sum"] == pytest.approx(saved["war/sync/weight_sum"], rel=1e-9)
    assert start["war/sync/weight_sum"] != story.resumed.step(1)["war/sync/weight_sum"]


def test_drafter_and_scheduler_have_what_they_need(story):
    metrics = story.resumed.step(3)
    assert metrics["war/spec/accepted_tokens"] > 0
    assert metrics["war/sched/sticky_rate"] == 1.0
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["war/sync/weights_changed"] == 1.0


def test_what_the_killed_run_left_is_gone_after_the_next_start(story):
    (sandbox,) = story.processes
    assert "war-test-sandbox" in sandbox
    assert any("war-test-sandbox" in name for name in story.shared_memory)
    assert story.killed.left_processes == []
    assert not set(story.shared_memory) & set(story.resumed.left_shared_memory)
    assert "had left 1 processes and 1 shared-memory" in story.resumed.output
