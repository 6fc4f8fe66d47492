# SPDX-License-Identifier: Apache-2.0
"""Three real training runs, shared by the tests that look at them; engines and trainers take a minute to start.

- ``grpo_war``: a validation with verl's own agent loop, then two GRPO steps with the WAR worker group; in the second
  one a turn comes too late.
- ``ppo_war``: PPO with a critic; some of its agent loops fail in every way they can; Ctrl-C in the second step.
- ``grpo_vllm``: GRPO with verl's stock rollout; an engine is killed in the second step.
"""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.support.tiny_run import stock_loop_validation, tiny_model
from tests.support.training import Run, find, run_training


@pytest.fixture(scope="session")
def grpo_war(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("grpo_war")
    return run_training(
        folder,
        "trainer.rollout=war",
        *stock_loop_validation(folder),
        f"war.record_trajectories={folder}/trajectories",
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        loop="LateLoop",
    )


@pytest.fixture(scope="session")
def ppo_war(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ppo_war")
    return run_training(
        folder,
        "trainer.rollout=war",
        "algorithm.adv_estimator=gae",
        f"critic.model.path={tiny_model()}",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-3",
        # Long enough that no healthy trajectory meets them on a machine that stands still for a while.
        "war.env.step_timeout_s=10",
        "war.fault.trajectory_timeout_s=60",
        "trainer.total_training_steps=5",
        loop="FaultyLoop",
        when="] step 2:",
        act=lambda process: process.send_signal(signal.SIGINT),
    )


@pytest.fixture(scope="session")
def grpo_vllm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_training(
        tmp_path_factory.mktemp("grpo_vllm"),
        "trainer.rollout=vllm",
        "trainer.total_training_steps=5",
        when="step 1 done",
        act=_kill_an_engine,
    )


def _kill_an_engine(process: psutil.Process) -> None:
    find(process, "VLLM::EngineCore")[0].kill()
