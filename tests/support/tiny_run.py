# SPDX-License-Identifier: Apache-2.0
"""Overrides of a tiny end-to-end run: random model, two replicas, a text game of a few turns."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_model import tiny_model_dir
from war_rl.prepare import prepare_data

SHARPNESS = 12.0
"""Factor on the output layer: a random model is nearly uniform over its words and would accept hardly any draft."""


def tiny_model() -> Path:
    """The tiny model with a sharper output distribution, so that it repeats itself as trained models do."""
    import shutil

    from safetensors.torch import load_file, save_file

    plain = tiny_model_dir()
    sharp = plain.with_name(f"{plain.name}-sharp{SHARPNESS:g}")
    if not (sharp / "done").exists():
        shutil.copytree(plain, sharp, dirs_exist_ok=True)
        weights = load_file(sharp / "model.safetensors")
        weights["lm_head.weight"] = weights["lm_head.weight"] * SHARPNESS
        save_file(weights, sharp / "model.safetensors", metadata={"format": "pt"})
        (sharp / "done").touch()
    return sharp


def stock_loop_validation(folder: Path, agent: str = "single_turn_agent") -> list[str]:
    """Overrides that validate before training with an agent loop, by default verl's simplest, and a reward function."""
    import pandas

    rows = pandas.read_parquet(prepare_data(folder / "data", "GuessTheNumber-v0", 16, 4, 0)[1])
    rows["agent_name"] = agent
    path = folder / "data" / "val_stock_loop.parquet"
    rows.to_parquet(path)
    return [
        f"data.val_files={path}",
        f"reward.custom_reward_function.path={Path(__file__).with_name('reward.py')}",
        "trainer.val_before_train=True",
    ]


def greedy_rows(folder: Path) -> Path:
    """Training rows that ask verl for greedy sampling, each by its column ``__do_sample__``.

    ``rollout.temperature`` stays 1, by which verl also divides the actor's logits.
    """
    import pandas

    rows = pandas.read_parquet(prepare_data(folder / "data", "GuessTheNumber-v0", 16, 4, 0)[0])
    rows["__do_sample__"] = False
    path = folder / "data" / "train_greedy.parquet"
    rows.to_parquet(path)
    return path


def tiny_overrides(folder: Path, *extra: str) -> list[str]:
    """Hydra overrides for a two-step GRPO run whose every file lies below ``folder``."""
    model = tiny_model()
    train, val = prepare_data(folder / "data", "GuessTheNumber-v0", 16, 4, 0)
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={train}",
        f"data.val_files={val}",
        "data.train_batch_size=4",
        "data.max_prompt_length=384",
        "data.max_response_length=512",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.dtype=float32",
        "actor_rollout_ref.rollout.max_model_len=1024",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
        # Drafts whatever the machine's step times are; `budget` would not on one that is busy with other things.
        "war.spec.policy=war",
        "war.env.max_turns=4",
        "war.env.max_tokens_per_turn=24",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}/run",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        *extra,
    ]
