# SPDX-License-Identifier: Apache-2.0
"""The ways to start a training, as far as that goes without training."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from war_rl.trainers.verl.main_ppo import compose, join_cluster, variables_of_job, why_not_joined

MODEL = "actor_rollout_ref.model.path=/nowhere"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("address", ["10.1.2.3:6379", "ray://10.1.2.3:10001"])
def test_a_running_cluster_is_joined_with_the_sizes_it_has(monkeypatch, platform, address):
    monkeypatch.setenv("WAR_PLATFORM", platform)
    monkeypatch.setenv("RAY_ADDRESS", address)
    config = compose([MODEL])
    assert join_cluster(config) == address
    init = config.ray_kwargs.ray_init
    assert init.get("num_cpus") is None and init.get("num_gpus") is None


def test_without_one_the_configurations_sizes_count(monkeypatch):
    monkeypatch.setenv("WAR_PLATFORM", "cpu")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    config = compose([MODEL])
    assert join_cluster(config) == ""
    assert config.ray_kwargs.ray_init.num_gpus == 2


@pytest.mark.slow
def test_verls_own_entry_point_composes_our_configuration(tmp_path):
    """The two lines for a launch script of the user's own."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += ["--config-path", "pkg://war_rl.configs", "--config-name", "war_ppo_trainer"]
    command += ["--cfg", "job", "--resolve", MODEL, "war.spec.max_draft_tokens=5", f"hydra.run.dir={tmp_path}"]
    env = {**os.environ, "WAR_PLATFORM": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    from omegaconf import OmegaConf

    config = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert config.actor_rollout_ref.rollout.name == "war"
    assert config.actor_rollout_ref.rollout.custom.war.spec.max_draft_tokens == 5
    assert config.trainer.v1.trainer_mode == "war_sync"


def test_a_cluster_that_refuses_for_want_of_a_token_is_told_apart():
    error = ConnectionError("Failed to connect to Ray cluster at a:1")
    assert why_not_joined(error) == str(error)
    error.__cause__ = RuntimeError(
        "Last connection error: RPC error: InvalidAuthToken: Authentication token is missing"
    )
    assert "RAY_AUTH_MODE=token" in why_not_joined(error)


def test_what_a_submitted_job_has_set_is_not_passed_on_again(monkeypatch):
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert variables_of_job() == set()
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": {"env_vars": {"WANDB_API_KEY": "x"}}}')
    assert variables_of_job() == {"WANDB_API_KEY"}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"runtime_env": null}')
    assert variables_of_job() == set()
