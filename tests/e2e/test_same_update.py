# SPDX-License-Identifier: Apache-2.0
"""Same batch, same update: three greedy steps end in the same weights under either rollout, with drafts accepted.

What would differ by itself is neutralised in tests/support: batches are in the order of completion
(:mod:`tests.support.ordered`), and siblings that are sampled greedily are all alike
(:class:`tests.support.loops.SessionLoop`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_run import greedy_rows, tiny_model
from tests.support.training import Run, run_training

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

STEPS = (1, 2, 3)
PROMPTS, N = 4, 4
ORDERED = Path(__file__).parents[1] / "support" / "ordered.py"
ESTIMATORS = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "gae": [
        "algorithm.adv_estimator=gae",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-4",
        # The value head begins at random: this seeds it.
        "critic.fsdp.full_determinism=True",
    ],
}


def train(folder: Path, rollout: str, estimator: str) -> Run:
    run = run_training(
        folder,
        f"trainer.rollout={rollout}",
        f"data.train_files={greedy_rows(folder)}",
        "data.seed=7",
        # Two updates a step, so that it matters which samples are in which.
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        # Small enough that the greedy model does not fall into ending every turn at once.
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        f"trainer.v1.sampler.custom_sampler.path={ORDERED}",
        "trainer.v1.sampler.custom_sampler.name=OrderedReplayBuffer",
        f"+trainer.v1.sampler.sampler_kwargs.record={folder}/trained",
        *ESTIMATORS[estimator],
        *([f"critic.model.path={tiny_model()}"] if estimator == "gae" else []),
        loop="SessionLoop",
    )
    assert run.code == 0, run.output[-5000:]
    return run


@pytest.fixture(scope="module", params=list(ESTIMATORS))
def pair(request, tmp_path_factory) -> tuple[Run, Run]:
    """The same training under ``war`` and under ``vllm``."""
    name = request.param
    return tuple(train(tmp_path_factory.mktemp(f"{name}_{r}"), r, name) for r in ("war", "vllm"))


def test_the_war_run_drafted_and_the_stock_run_did_not(pair):
    war, vllm = pair
    for step in STEPS:
        assert war.step(step)["war/spec/accepted_tokens"] > 0
        assert vllm.step(step)["war/spec/drafts"] == 0


@pytest.mark.parametrize("step", STEPS)
def test_the_same_samples_are_trained_on(pair, step):
    war, vllm = (run.trained(step) for run in pair)
    assert len(war) == PROMPTS * N
    for mine, theirs in zip(war, vllm, strict=True):
        name = f"index {mine['index']} session {mine['session']}"
        assert (mine["index"], mine["session"]) == (theirs["index"], theirs["session"])
        for field in ("responses", "response_mask", "rm_scores", "advantages", "versions"):
            assert mine[field] == theirs[field], f"{field} of {name} differ"
        assert mine["versions"] == [step - 1, step - 1]


@pytest.mark.parametrize("step", STEPS)
def test_the_comparison_means_something(pair, step):
    rows = pair[0].trained(step)
    assert len({tuple(row["responses"]) for row in rows}) > PROMPTS, "siblings are all alike"
    assert any(value != 0.0 for row in rows for value in row["advantages"]), "nothing to learn"


def test_the_actors_weights_are_the_same_after_the_third_step(pair):
    from safetensors.torch import load_file

    def weights(folder: Path):
        return load_file(folder / "model.safetensors")

    war, vllm = (weights(run.folder / "run/global_step_3/actor/huggingface") for run in pair)
    before = weights(tiny_model())
    assert war.keys() == vllm.keys()
    for name, mine in war.items():
        scale = vllm[name].abs().max()
        assert (mine - vllm[name]).abs().max() <= 1e-5 * scale, name
    changed = [name for name in war if not war[name].equal(before[name].to(war[name].dtype))]
    assert len(changed) == len(war), "three steps left weights untouched"
