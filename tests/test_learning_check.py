# SPDX-License-Identifier: Apache-2.0
"""The recipe that compares reward curves: its statistics, its memory, and that its trainings would be accepted."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "recipes" / "learning_check" / "learning_check.py"


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("learning_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_permutation_test_is_exact(check):
    assert check.permutation_test([1, 2, 3], [4, 5, 6]) == pytest.approx(2 / 20)
    assert check.permutation_test([4, 5, 6], [1, 2, 3]) == pytest.approx(2 / 20)
    assert check.permutation_test([1, 1, 1], [1, 1, 1]) == 1.0
    # Of the 20 dealings of 1..6, all but those of differences 1/3 or less either way.
    assert check.permutation_test([1, 3, 5], [2, 4, 6]) == pytest.approx(14 / 20)


def curves(war, vllm):
    return {
        name: {str(seed): [0.2, 0.2, 0.2, end, end, end] for seed, end in enumerate(ends)}
        for name, ends in (("war", war), ("vllm", vllm))
    }


def test_curves_that_overlap_and_curves_that_do_not(check):
    same = check.judge(curves([0.5, 0.6, 0.7], [0.55, 0.65, 0.6]), alpha=0.1)
    assert same["overlap"] and same["can_tell"] and same["learned"]
    apart = check.judge(curves([0.3, 0.31, 0.32], [0.5, 0.6, 0.7]), alpha=0.1)
    assert not apart["overlap"] and "DIFFERENT" in check.describe(apart)


def test_too_few_seeds_are_called_that(check):
    verdict = check.judge(curves([0.3, 0.31], [0.6, 0.7]), alpha=0.1)
    assert verdict["overlap"] and not verdict["can_tell"]
    assert "too few seeds" in check.describe(verdict)


def test_a_run_that_did_not_learn_is_told(check):
    verdict = check.judge(curves([0.5, 0.6, 0.1], [0.5, 0.6, 0.7]), alpha=0.1)
    assert not verdict["learned"] and "NOT ALL RUNS LEARNED" in check.describe(verdict)


def test_what_is_done_is_not_done_again(check, monkeypatch, tmp_path):
    trained = []

    def train(folder, rollout, seed, steps):
        trained.append((rollout, seed, steps))
        if len(trained) == 4:
            raise RuntimeError("stopped")
        return {"rewards": [0.2] * 10 + [0.4 + 0.01 * seed] * (steps - 10)}

    monkeypatch.setattr(check, "train", train)
    out = ["--steps", "12", "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")]
    with pytest.raises(RuntimeError, match="stopped"):
        check.main(out)
    assert check.main(out) == 0
    assert len(trained) == 7 and len(set(trained)) == 6
    assert json.loads((tmp_path / "r.json").read_text())["verdict"]["overlap"]
    assert (tmp_path / "p.png").stat().st_size > 5000


@pytest.mark.slow
def test_its_trainings_are_accepted(check, monkeypatch, tmp_path):
    from war_rl.trainers.verl import settings
    from war_rl.trainers.verl.main_ppo import compose

    monkeypatch.setenv("WAR_PLATFORM", "cpu")
    for rollout in check.ROLLOUTS:
        config = compose(check.overrides(tmp_path, rollout, 1, 5))
        settings.check(config)
        assert (config.trainer.rollout, config.trainer.total_training_steps) == (rollout, 5)
