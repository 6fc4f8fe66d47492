# SPDX-License-Identifier: Apache-2.0
"""One real training run for each configuration, shared by the tests that look at it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_run import tiny_model, tiny_overrides

TIMEOUT_S = 900


@dataclass
class Run:
    """A finished run: exit code, output, summary, verl's own metrics by step."""

    folder: Path
    code: int
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run" / "summary.json").read_text()))

    def step(self, number: int) -> dict[str, float]:
        return dict(next(s["metrics"] for s in self.summary["steps"] if s["step"] == number))

    def trajectories(self) -> list[dict[str, Any]]:
        files = sorted((self.folder / "trajectories").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def run_training(folder: Path, *overrides: str) -> Run:
    """`war-rl train` on the tiny model in a process of its own."""
    command = [sys.executable, "-m", "war_rl", "train", *tiny_overrides(folder, *overrides)]
    env = {**os.environ, "WANDB_MODE": "offline", "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    (folder / "output.log").write_text(done.stdout)
    return Run(folder, done.returncode, done.stdout)


@pytest.fixture(scope="session")
def grpo_war(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two GRPO steps with the WAR worker group."""
    folder = tmp_path_factory.mktemp("grpo_war")
    return run_training(
        folder,
        "trainer.rollout=war",
        f"war.record_trajectories={folder}/trajectories",
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
    )


@pytest.fixture(scope="session")
def ppo_war(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One PPO step with a GAE critic and a stock agent loop for validation."""
    return run_training(
        tmp_path_factory.mktemp("ppo_war"),
        "trainer.rollout=war",
        "algorithm.adv_estimator=gae",
        "trainer.total_training_steps=1",
        *CRITIC,
    )


@pytest.fixture(scope="session")
def grpo_vllm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One GRPO step with verl's stock rollout."""
    return run_training(tmp_path_factory.mktemp("grpo_vllm"), "trainer.rollout=vllm", "trainer.total_training_steps=1")


CRITIC = (
    f"critic.model.path={tiny_model()}",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "critic.optim.lr=1e-3",
)
