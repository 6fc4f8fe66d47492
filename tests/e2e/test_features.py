# SPDX-License-Identifier: Apache-2.0
"""One run with many of verl's switches on at once, under the WAR worker group: each must leave its trace."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.tiny_run import stock_loop_validation
from tests.support.training import Run, run_training
from war_rl.prepare import prepare_data

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

STEPS = (1, 2)
PROMPTS, N, VALIDATION = 4, 4, 4 * 2
GROUP_SIZES = (2, 4)


def uneven_rows(folder: Path) -> Path:
    """verl's single-turn agent, and groups of two sizes (the column ``__rollout_n__``)."""
    import pandas

    rows = pandas.read_parquet(prepare_data(folder / "data", "GuessTheNumber-v0", 16, 4, 0)[0])
    rows["agent_name"] = "single_turn_agent"
    rows["__rollout_n__"] = [GROUP_SIZES[i % len(GROUP_SIZES)] for i in range(len(rows))]
    path = folder / "data" / "train_uneven.parquet"
    rows.to_parquet(path)
    return path


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("many")
    return run_training(
        folder,
        "trainer.rollout=war",
        *stock_loop_validation(folder),
        f"data.train_files={uneven_rows(folder)}",
        "data.shuffle=False",
        "data.max_response_length=64",
        # Reference policy, and KL both in the reward and in the loss.
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        # Rollout correction by the rollout's own log-probabilities.
        "algorithm.rollout_correction.rollout_is=token",
        # Groups whose rewards are all alike are replaced, and so are groups that failed.
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=reward",
        "trainer.v1.sampler.sync_refill_failed_groups=True",
        "reward.num_workers=2",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.7",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.9",
        "trainer.test_freq=1",
        f"trainer.rollout_data_dir={folder}/rollouts",
        f"trainer.validation_data_dir={folder}/validations",
        f"war.record_trajectories={folder}/trajectories",
    )


def lines(file: Path):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_run_finishes(many):
    assert many.code == 0, many.output[-5000:]
    assert many.summary["status"] == "finished"


@pytest.mark.parametrize("step", STEPS)
def test_groups_have_the_sizes_their_rows_ask_for(many, step):
    groups: dict[str, set[int]] = {}
    for t in many.trajectories():
        if t["step"] == step and not t["validate"]:
            groups.setdefault(t["group"], set()).add(t["session"])
    assert sorted(len(sessions) for sessions in groups.values()) == sorted(GROUP_SIZES * 2)
    assert many.step(step)["war/rollout/trajectories"] == sum(GROUP_SIZES) * 2


@pytest.mark.parametrize("step", STEPS)
def test_reference_policy_and_rollout_correction_leave_their_metrics(many, step):
    metrics = many.step(step)
    for name in ("actor/kl_loss", "actor/reward_kl_penalty", "rollout_corr/rollout_is_mean", "rollout_corr/kl"):
        assert math.isfinite(metrics[name]), name
    # fp32 on both sides: the rollout's probabilities are the actor's, drafts or not.
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert metrics["war/spec/accepted_tokens"] > 0


def test_validation_has_its_own_number_and_sampling(many):
    for step in STEPS:
        metrics = many.step(step)
        assert metrics["war_val/rollout/trajectories"] == VALIDATION
        assert any(name.startswith("val-core/") and "@2" in name for name in metrics)


def test_samples_are_written_where_verl_writes_them(many):
    for step in STEPS:
        assert len(lines(many.folder / "rollouts" / f"{step}.jsonl")) >= sum(GROUP_SIZES) * 2
        assert len(lines(many.folder / "validations" / f"{step}.jsonl")) == VALIDATION
    assert len(lines(many.folder / "validations" / "0.jsonl")) == VALIDATION
