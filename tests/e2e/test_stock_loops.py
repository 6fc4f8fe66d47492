# SPDX-License-Identifier: Apache-2.0
"""verl's own tool agent, unchanged, with a real function tool; and a loop whose trajectories have several samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_run import stock_loop_validation
from tests.support.tool_model import tool_model, tool_rows
from tests.support.training import Run, run_training

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

STEPS = (1, 2)
PROMPTS, N = 4, 4
VALIDATION = 4 * 2
TOOLS = Path(__file__).parents[1] / "support" / "tools.py"


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("tools")
    return run_training(
        folder,
        "trainer.rollout=war",
        f"actor_rollout_ref.model.path={tool_model()}",
        *stock_loop_validation(folder, agent="textarena_agent"),
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        f"data.train_files={tool_rows(folder)}",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={TOOLS}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        f"war.record_trajectories={folder}/trajectories",
        loop="TwoOutputsLoop",
    )


def test_the_run_finishes(tools):
    assert tools.code == 0, tools.output[-5000:]
    assert all(tools.step(s)["war/rollout/failed"] == 0 for s in STEPS)


def test_the_model_calls_the_tool_and_reads_its_answer(tools):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tool_model())
    training = [t for t in tools.trajectories() if not t["validate"]]
    assert len(training) == len(STEPS) * PROMPTS * N
    answered = 0
    for trajectory in training:
        pairs = list(zip(trajectory["response_ids"], trajectory["response_mask"], strict=True))
        environment = tokenizer.decode([token for token, mine in pairs if not mine])
        answered += environment.count("sum=")
    # By heart it is two for each; at temperature 1 one may slip.
    assert answered >= 1.5 * len(training)


def test_its_turns_are_one_trajectory_to_the_router_and_the_drafter(tools):
    training = [t for t in tools.trajectories() if not t["validate"]]
    assert max(len(t["replicas"]) for t in training) >= 3
    assert all(len(set(t["replicas"])) == 1 for t in training)
    for step in STEPS:
        metrics = tools.step(step)
        assert metrics["war/sched/sticky_rate"] == 1.0
        assert metrics["war/cache/hit_rate"] > 0.3
        assert 0 < metrics["war/spec/accepted_tokens"] <= metrics["war/spec/draft_tokens"]
        assert metrics["training/rollout_probs_diff_max"] < 1e-4


def test_a_trajectory_may_leave_several_samples(tools):
    validation = [t for t in tools.trajectories() if t["validate"]]
    assert len(validation) == 2 * VALIDATION
    metrics = tools.step(1)
    assert metrics["war_val/rollout/trajectories"] == VALIDATION
    assert metrics["war_val/rollout/turns"] == 2 * VALIDATION
    assert metrics["war_val/rollout/failed"] == 0
