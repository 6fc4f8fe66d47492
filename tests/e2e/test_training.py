# SPDX-License-Identifier: Apache-2.0
"""Real verl, real Ray, two real vLLM replicas, a tiny model: what a user's run must show."""

from __future__ import annotations

import math

import pytest

pytestmark = pytest.mark.e2e

STEPS = (1, 2)
PROMPTS, N = 4, 4


def test_the_run_finishes(grpo_war):
    assert grpo_war.code == 0, grpo_war.output[-5000:]
    assert grpo_war.summary["status"] == "finished"
    assert [s["step"] for s in grpo_war.summary["steps"]] == list(STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_all_groups_are_complete(grpo_war, step):
    groups: dict[str, set[int]] = {}
    for t in training(grpo_war):
        if t["step"] == step:
            groups.setdefault(t["group"], set()).add(t["session"])
    assert len(groups) == PROMPTS
    assert all(sessions == set(range(N)) for sessions in groups.values())
    assert grpo_war.step(step)["war/rollout/trajectories"] == PROMPTS * N


def training(run):
    return [t for t in run.trajectories() if not t["validate"]]


def test_trajectories_have_several_turns(grpo_war):
    assert max(len(t["replicas"]) for t in training(grpo_war)) >= 3


def test_a_stock_agent_loop_runs_unchanged_and_validation_is_kept_apart(grpo_war):
    stock = [t for t in grpo_war.trajectories() if t["validate"]]
    assert len(stock) == 4
    assert all(len(t["replicas"]) == 1 for t in stock)
    metrics = grpo_war.step(1)
    assert metrics["war_val/rollout/trajectories"] == 4
    assert metrics["war_val/rollout/failed"] == 0
    assert metrics["war/rollout/trajectories"] == PROMPTS * N


def test_each_trajectory_stays_on_one_replica_and_both_replicas_work(grpo_war):
    homes = [set(t["replicas"]) for t in training(grpo_war)]
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) == 2
    assert all(grpo_war.step(s)["war/sched/sticky_rate"] == 1.0 for s in STEPS)


@pytest.mark.parametrize("step", STEPS)
def test_the_scheduler_is_told_what_turns_waited_in_the_engines(grpo_war, step):
    told, turns = grpo_war.step(step)["war/sched/engine_queue_seconds"], grpo_war.step(step)["war/sched/placements"]
    assert 0 < told < turns * grpo_war.step(step)["war/rollout/seconds"]


@pytest.mark.parametrize("step", STEPS)
def test_drafts_are_accepted_and_log_probs_are_those_of_the_actor(grpo_war, step):
    metrics = grpo_war.step(step)
    assert 0 < metrics["war/spec/accepted_tokens"] <= metrics["war/spec/draft_tokens"]
    assert metrics["training/rollout_probs_diff_valid"] == 1
    assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_text_of_a_sibling_on_the_other_replica_is_drafted_from(grpo_war):
    assert sum(grpo_war.step(s)["war/spec/draft_tokens_fed"] for s in STEPS) > 0


@pytest.mark.parametrize("step", STEPS)
def test_metrics_add_up(grpo_war, step):
    m = grpo_war.step(step)
    assert m["war/cache/cached_tokens"] + m["war/cache/computed_tokens"] == m["war/cache/prompt_tokens"] > 0
    assert m["war/rollout/generated_tokens"] == pytest.approx(m["war/rollout/tokens_per_s"] * m["war/rollout/seconds"])
    assert m["war/spec/mean_acceptance_length"] == pytest.approx(
        1 + m["war/spec/accepted_tokens"] / m["war/spec/drafts"]
    )
    assert all(math.isfinite(v) for k, v in m.items() if k.startswith("war/"))


def test_every_war_metric_is_documented(grpo_war):
    from war_rl.metrics_registry import undocumented

    assert not undocumented({k for s in STEPS for k in grpo_war.step(s) if k.startswith("war")})


def test_both_replicas_hold_the_trained_weights(grpo_war):
    """The sums that the replicas report after step 2 are those of the checkpoint written in step 2."""
    from safetensors.torch import load_file

    from tests.support.tiny_run import tiny_model

    def total(folder):
        weights = load_file(folder / "model.safetensors")
        return sum(float(w.double().sum()) for n, w in weights.items() if n.endswith("norm.weight"))

    trained = total(grpo_war.folder / "run/global_step_2/actor/huggingface")
    assert trained != total(tiny_model())
    metrics = grpo_war.step(2)
    assert metrics["war/sync/replicas"] == 2
    assert metrics["war/sync/weights_changed"] == 1.0
    assert metrics["war/sync/weight_sum"] == pytest.approx(trained, rel=1e-7)


@pytest.mark.parametrize("step", STEPS)
def test_every_sample_comes_from_the_weights_of_its_step(grpo_war, step):
    """verl's own measure, from the least and greatest version in each sample's tags."""
    metrics = grpo_war.step(step)
    for name in ("trajectory_staleness", "trajectory_staleness_worst"):
        assert metrics[f"training/off_policy/{name}/min"] == metrics[f"training/off_policy/{name}/max"] == 0
    assert metrics["training/off_policy/trajectory_spans/max"] == 1


def test_a_turn_in_the_name_of_a_step_that_is_over_is_refused_and_counted(grpo_war):
    assert [grpo_war.step(s)["war/sync/late_turns"] for s in STEPS] == [0, 1]
    assert "WrongVersion" in next(line for line in grpo_war.output.splitlines() if "late turn:" in line)
    assert "late turn: answered" not in grpo_war.output


def test_nothing_computed_with_old_weights_is_found_again(grpo_war):
    """All prompts begin with the same rules, so only a first turn on an empty cache computes every token of its own."""
    first, second = (cached_of_first_turns(grpo_war, step) for step in STEPS)
    assert max(min(cached) for cached in first.values()) > 0, "the validation before, by the same weights, left nothing"
    assert all(min(cached) == 0 for cached in second.values())


def cached_of_first_turns(run, step):
    """By replica, the prompt tokens that each trajectory's first turn found in the cache."""
    from war_rl.trace import read

    trace = next(t for t in read(run.folder / "run") if t.step == step and not t.validate)
    turns = [record.turns[0] for record in trace.records]
    return {r: [t.cached_tokens for t in turns if t.replica == r] for r in trace.replicas}


def test_ppo_with_a_critic(ppo_war):
    metrics = ppo_war.step(1)
    assert math.isfinite(metrics["critic/vf_loss"])
    assert metrics["war/spec/accepted_tokens"] > 0
    assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_failing_trajectories_are_counted_and_named_and_their_siblings_train(ppo_war):
    metrics = ppo_war.step(1)
    assert metrics["war/rollout/trajectories"] == PROMPTS * N
    assert metrics["war/rollout/failed"] == PROMPTS
    for words in ("the loop's own error", "EnvironmentTimeout", "TrajectoryTimeout", "maximum context length"):
        assert words in ppo_war.output


def test_ctrl_c_ends_everything_and_leaves_nothing(ppo_war):
    assert ppo_war.code == 130, ppo_war.output[-5000:]
    assert ppo_war.seconds_after_action < 20
    assert ppo_war.left_processes == []
    assert ppo_war.left_shared_memory == []
    assert ppo_war.summary["status"] == "interrupted"


def test_the_stock_rollout_runs_the_same_job(grpo_vllm):
    metrics = grpo_vllm.step(1)
    assert metrics["war/spec/drafts"] == 0
    assert metrics["war/rollout/trajectories"] == PROMPTS * N
    cached, computed = metrics["war/cache/cached_tokens"], metrics["war/cache/computed_tokens"]
    assert cached + computed == metrics["war/cache/prompt_tokens"]
    assert metrics["training/rollout_probs_diff_max"] < 1e-5


def test_a_dead_engine_stops_the_run_and_names_its_cause(grpo_vllm):
    assert grpo_vllm.code not in (0, 130), grpo_vllm.output[-5000:]
    assert grpo_vllm.seconds_after_action < 60
    assert grpo_vllm.summary["status"] == "failed"
    assert "rollout replica" in grpo_vllm.summary["error"]
    assert "SIGKILL" in grpo_vllm.summary["error"]
    assert grpo_vllm.left_processes == []
