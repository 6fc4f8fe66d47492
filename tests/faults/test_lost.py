# SPDX-License-Identifier: Apache-2.0
"""One training of six steps that is hit again and again, started again each time, and still gets there.

Each run resumes from the checkpoint that the one before has left: an engine dies while it takes in weights, one dies in
the middle of a rollout, then the router, an agent-loop worker; the disk is full when a checkpoint is due; at last one
replica computes noise for a while, which costs trajectories only.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.support.failing import DIES, FILE_VARIABLE
from tests.support.training import Run, find, run_training

pytestmark = [pytest.mark.e2e, pytest.mark.faults, pytest.mark.extended]

STEPS = 6
IN_TIME_S = 60.0
"""The promise: from the death of a part to the end of the run."""
HITS = {"replica": "VLLM::EngineCore", "router": "ray::WarRouter", "worker": "ray::WarAgentLoopWorker"}


class Training:
    """Runs one after the other in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, Run] = {}
        self.endings: dict[str, dict] = {}

    def checkpoint(self) -> int:
        return int((self.folder / "run" / "latest_checkpointed_iteration.txt").read_text())

    def start(self, name: str, *overrides: str, **kwargs) -> None:
        run = run_training(
            self.folder,
            "trainer.save_freq=1",
            "trainer.resume_mode=auto",
            f"trainer.total_training_steps={STEPS}",
            "war.progress=on",
            *overrides,
            loop="SlowLoop",
            **kwargs,
        )
        self.runs[name], self.endings[name] = run, run.summary

    def hit(self, name: str, step: int) -> None:
        """Start, and kill a part while the trajectories of ``step`` come in."""

        def act(process: psutil.Process) -> None:
            find(process, HITS[name])[0].kill()

        self.start(name, when=f"] step {step}:", act=act)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("hit")
    made = Training(folder)
    made.start(
        "update", extension("MortalExtension"), environment=chosen(folder, "update"), when=DIES, act=lambda p: None
    )
    made.hit("replica", 2)
    made.hit("router", 3)
    made.hit("worker", 4)
    # torch.save writes to a device that is full; what it is called does not matter to it.
    due = made.checkpoint() + 1
    shard = folder / "run" / f"global_step_{due}" / "actor" / "model_world_size_2_rank_0.pt"
    if shard.parent.exists():
        shard.unlink(missing_ok=True)
    shard.parent.mkdir(parents=True, exist_ok=True)
    shard.symlink_to("/dev/full")
    made.start("disk")
    shard.unlink()
    made.start("noise", extension("NoisyExtension"), environment=chosen(folder, "noise"))
    return made


def extension(name: str) -> str:
    return f"actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=tests.support.failing.{name}"


def chosen(folder: Path, name: str) -> dict[str, str]:
    return {FILE_VARIABLE: str(folder / name)}


@pytest.mark.parametrize(
    ("name", "cause", "fault"),
    [
        ("update", r"rollout replica \S+ is dead: .* was killed by SIGKILL", "replica_lost"),
        ("replica", r"rollout replica \S+ is dead: \S*EngineCore\S* \(pid \d+\) was killed by SIGKILL", "replica_lost"),
        ("router", "the router actor is gone", "router_lost"),
        ("worker", "agent-loop worker (0 )?is gone, and with it its trajectories", "worker_lost"),
        (
            "disk",
            r"the checkpoint of step \d+ could not be written to .*newest whole one is of",
            "checkpoint_failed",
        ),
    ],
)
def test_the_run_ends_and_says_why(training: Training, name: str, cause: str, fault: str):
    run, ending = training.runs[name], training.endings[name]
    assert run.code not in (0, 130), run.output[-5000:]
    assert ending["status"] == "failed"
    assert re.search(cause, ending["error"]), ending["error"]
    assert ending["faults"] == {f"war/fault/{fault}": 1.0}
    assert "[war-rl] the run ends: " in run.output
    assert f"war/fault/{fault}:1" in run.output  # verl's console logger had it too


@pytest.mark.parametrize("name", ["update", *HITS])
def test_it_ends_in_time_and_leaves_nothing(training: Training, name: str):
    run = training.runs[name]
    assert 0 < run.seconds_after_action < IN_TIME_S
    assert run.left_processes == []


def test_each_run_goes_on_from_the_last_checkpoint(training: Training):
    for before, after in zip(training.endings.values(), list(training.endings.values())[1:], strict=False):
        saved = max((s["step"] for s in before["steps"]), default=0)
        assert after["start"]["step"] in (saved, saved + 1)  # one more: saved, and then killed before it was told
        kept = [s for s in before["steps"] if s["step"] <= after["start"]["step"]]
        assert [s for s in after["steps"] if s["step"] <= after["start"]["step"]] == kept


def test_the_training_gets_there_with_every_step_once(training: Training):
    run, summary = training.runs["noise"], training.endings["noise"]
    assert run.code == 0, run.output[-5000:]
    assert summary["status"] == "finished"
    # What the first step has logged is not known: its run died between its checkpoint and that.
    assert [s["step"] for s in summary["steps"]] == list(range(2, STEPS + 1))
    assert [e["status"] for e in summary["earlier"]] == ["failed"] * 5
    faults = [next(iter(e["faults"])) for e in summary["earlier"]]
    assert faults == [
        f"war/fault/{f}" for f in ("replica_lost", "replica_lost", "router_lost", "worker_lost", "checkpoint_failed")
    ]


def test_noise_costs_the_trajectories_of_its_replica_only_and_names_it(training: Training):
    run, summary = training.runs["noise"], training.endings["noise"]
    steps = [s["metrics"] for s in summary["steps"] if s["step"] > summary["start"]["step"]]
    turns = sum(m["war/fault/nonfinite_turns"] for m in steps)
    assert turns > 0
    assert sum(m["war/rollout/failed"] for m in steps) == turns
    named = set(re.findall(r"NonFiniteLogProbs: replica (\S+) returned", run.output))
    assert len(named) == 1
    assert "ALARM" in run.output and "NaN or infinite" in run.output
    assert all(m["training/rollout_probs_diff_max"] < 1e-5 for m in steps)
