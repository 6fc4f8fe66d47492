# SPDX-License-Identifier: Apache-2.0
"""The configuration tree composes on verl's, and what cannot work is refused before anything starts."""

from __future__ import annotations

import pytest

from war_rl.config import ConfigError, WarConfig, load_config
from war_rl.trainers.verl import settings
from war_rl.trainers.verl.main_ppo import compose

BASE = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.model.path=/nowhere"]


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    monkeypatch.setenv("WAR_PLATFORM", "cpu")


def config(*overrides: str):
    return compose([*BASE, *overrides])


ROLLOUT = "actor_rollout_ref.rollout"
WAR_ONLY = [
    ([f"{ROLLOUT}.disaggregation.enabled=True"], ["disaggregation.enabled", "trainer.rollout=vllm"]),
    ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], ["pipeline_model_parallel_size=2", "tensor_model_parallel_size"]),
    ([f"{ROLLOUT}.data_parallel_size=2"], ["data_parallel_size=2", "more replicas"]),
    ([f"{ROLLOUT}.enable_prefix_caching=False"], ["enable_prefix_caching", "leave it True"]),
    (["actor_rollout_ref.model.mtp.enable_rollout=True"], ["mtp.enable_rollout", "war.spec.policy=off"]),
    (
        [f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config={{method:suffix,num_speculative_tokens:4}}"],
        ["speculative_config", "war.spec.policy=off"],
    ),
    (
        ["reward.reward_model.enable=True", "reward.reward_model.rollout.name=war"],
        ["reward.reward_model.rollout.name=war", "set it to vllm"],
    ),
    (
        ["distillation.enabled=True", "distillation.teacher_models.teacher_model.inference.name=war"],
        ["teacher_model.inference.name=war", "set it to vllm"],
    ),
]
"""Refused under the WAR worker group; the stock rollout is left to verl."""


@pytest.mark.parametrize("rollout", settings.ROLLOUTS)
def test_one_override_switches_the_rollout(rollout):
    c = config(f"trainer.rollout={rollout}")
    assert settings.check(c) == WarConfig()
    assert c.actor_rollout_ref.rollout.name == rollout
    assert c.trainer.v1.trainer_mode == "war_sync"
    settings.prepare(c)
    assert bool(c.actor_rollout_ref.rollout.router_config_path) == (rollout == "war")
    settings.prepare(c)  # a resumed or nested start prepares again


def test_both_rollouts_differ_in_nothing_else():
    from omegaconf import OmegaConf

    war, vllm = (OmegaConf.to_container(config(f"trainer.rollout={r}"), resolve=True) for r in settings.ROLLOUTS)

    def flat(node, prefix=""):
        if isinstance(node, dict):
            return {k2: v2 for k, v in node.items() for k2, v2 in flat(v, f"{prefix}.{k}").items()}
        return {prefix: node}

    a, b = flat(war), flat(vllm)
    differing = {key for key in a | b if a.get(key) != b.get(key)}
    named_after_the_rollout = {key for key in differing if "experiment_name" in key or "local_dir" in key}
    assert differing - named_after_the_rollout == {".trainer.rollout", ".actor_rollout_ref.rollout.name"}


def test_the_settings_reach_the_replicas_through_verls_extension_point():
    c = config("war.spec.max_draft_tokens=5")
    assert c.actor_rollout_ref.rollout.custom.war.spec.max_draft_tokens == 5


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.rollout=sglang"], ["trainer.rollout='sglang'", "war, vllm"]),
        (["actor_rollout_ref.rollout.name=vllm"], ["actor_rollout_ref.rollout.name", "trainer.rollout='war'"]),
        (["war.spec.policy=sometimes"], ["war.spec.policy='sometimes'", "off"]),
        (["+war.spec.polcy=off"], ["war.spec.polcy", "did you mean"]),
        (["trainer.v1.trainer_mode=separate_async"], ["trainer.v1.trainer_mode='separate_async'", "war_sync"]),
        (["trainer.use_v1=False"], ["trainer.use_v1"]),
        (["actor_rollout_ref.rollout.router_config_path=x.yaml"], ["router_config_path", "trainer.rollout=vllm"]),
        (["war.scheduler.engine_priority=True"], ["scheduling_policy='fcfs'", "set that to priority"]),
        (["actor_rollout_ref.rollout.full_determinism=True"], ["full_determinism", "leave it False"]),
        (["actor_rollout_ref.rollout.disable_log_stats=True"], ["disable_log_stats", "leave it False"]),
        (
            ["actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl.trainer.ppo.v1.AgentLoopManagerTQ"],
            ["agent_loop_manager_class", "WarAgentLoopManager", "agent_loop_config_path"],
        ),
        *WAR_ONLY,
    ],
)
def test_what_cannot_work_is_refused_by_name(overrides, words):
    with pytest.raises(ConfigError) as refused:
        settings.check(config(*overrides))
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("overrides", [overrides for overrides, _ in WAR_ONLY])
def test_the_stock_rollout_is_left_to_verls_own_checks(overrides):
    settings.check(config("trainer.rollout=vllm", *overrides))


def test_full_determinism_is_refused_on_gpus_too(monkeypatch):
    monkeypatch.setenv("WAR_PLATFORM", "gpu")
    with pytest.raises(ConfigError, match=r"use trainer\.rollout=vllm"):
        settings.check(config(f"{ROLLOUT}.full_determinism=True"))
    settings.check(config(f"{ROLLOUT}.full_determinism=True", "trainer.rollout=vllm"))


@pytest.mark.vllm
def test_a_lora_rank_that_vllm_has_no_kernel_for_is_refused():
    pytest.importorskip("vllm")
    settings.check(config("actor_rollout_ref.model.lora_rank=16"))
    with pytest.raises(ConfigError, match="lora_rank=100000"):
        settings.check(config("actor_rollout_ref.model.lora_rank=100000"))
    settings.check(config("actor_rollout_ref.model.lora_rank=100000", "actor_rollout_ref.model.lora.merge=True"))


def test_a_manager_derived_from_ours_is_accepted():
    settings.check(config(f"{ROLLOUT}.agent.agent_loop_manager_class=tests.support.managers.OwnManager"))


@pytest.mark.parametrize("override", ["war.spec.polcy=off", "war.sepc.policy=off"])
def test_an_unknown_key_is_refused_with_the_closest_known_one(override):
    with pytest.raises(ConfigError, match="unknown key"):
        config(override)


def test_a_model_folder_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="/nowhere"):
        settings.check_model(config())


def test_the_demonstration_composes():
    c = compose(["trainer.rollout=vllm"], "war_demo")
    settings.check(c)
    assert c.trainer.experiment_name == "demo-vllm"


def test_on_cpus_an_engine_is_one_process_unless_it_needs_several_workers():
    def executor(*overrides):
        c = config(*overrides)
        settings.prepare(c)
        return c.actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend

    assert executor() == executor("trainer.rollout=vllm") == settings.ONE_PROCESS
    assert executor("actor_rollout_ref.rollout.tensor_model_parallel_size=2") is None


def test_engine_priority_goes_with_vllms_priority_scheduling():
    c = config("war.scheduler.engine_priority=True", "actor_rollout_ref.rollout.scheduling_policy=priority")
    assert settings.check(c).scheduler.engine_priority


def test_one_line_says_who_can_draft_and_what_that_costs():
    def info(replica, can_draft):
        return {
            "replica": replica,
            "can_draft": can_draft,
            "async_scheduling": not can_draft,
            "model_runner_v2": False,
        }

    war = load_config({"spec": {"replicas": 1}})
    line = settings.drafting_line(war, [info(0, True), info(1, False)])
    assert "1 of 2 replicas can draft (0;" in line and "war.spec.replicas=1" in line
    assert "off in vLLM there: asynchronous scheduling, model runner V2" in line
    none = settings.drafting_line(load_config({"spec": {"replicas": "none"}}), [info(0, False)])
    assert "no replica can draft" in none and "war.spec.replicas=none" in none
    free = {**info(0, True), "async_scheduling": True, "model_runner_v2": True}
    assert settings.drafting_line(war, [free]).endswith("off in vLLM there: nothing")


def test_the_number_of_drafting_replicas_reaches_them():
    c = config("war.spec.replicas=1")
    assert settings.check(c).spec.replicas == "1"
    assert config("war.spec.replicas=none").actor_rollout_ref.rollout.custom.war.spec.replicas == "none"
