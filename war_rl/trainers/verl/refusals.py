# SPDX-License-Identifier: Apache-2.0
"""What verl can be told to do and War-RL cannot go along with, refused before anything starts.

One small rule for each: it returns what is wrong with the configuration and what would work, or "". What is not here
works, or is untouched by the rollout; docs/compatibility.md lists both, and how each was found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import OmegaConf

from war_rl.config import WarConfig

Rule = Callable[[Any, WarConfig], str]

ROLLOUT = "actor_rollout_ref.rollout"
MANAGER = "war_rl.trainers.verl.agent_loop.WarAgentLoopManager"


def refusals(config: Any, war: WarConfig, is_war: bool) -> Iterator[str]:
    """What is wrong with a whole trainer configuration, one text for each.

    Args:
        config: composed, with the ``war:`` section.
        war: that section, checked by itself.
        is_war: whether the WAR worker group does the rollout; most rules are about it only.
    """
    for rule in (*ALWAYS, *(WAR_ONLY if is_war else ())):
        text = rule(config, war)
        if text:
            yield text


def _seeds_on_cpu(config: Any, war: WarConfig) -> str:
    if not (config.actor_rollout_ref.rollout.full_determinism and config.trainer.device == "cpu"):
        return ""
    return (
        f"{ROLLOUT}.full_determinism=True sets a seed on every request, which kills vLLM's CPU engine at "
        "temperature > 0; leave it False on this machine"
    )


def _no_engine_counters(config: Any, war: WarConfig) -> str:
    if not config.actor_rollout_ref.rollout.disable_log_stats:
        return ""
    return (
        f"{ROLLOUT}.disable_log_stats=True: both rollouts are measured by the engines' own counters; leave it False, "
        "as war_ppo_trainer sets it"
    )


def _other_manager(config: Any, war: WarConfig) -> str:
    name = config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class")
    if name == MANAGER or _is_derived(name):
        return ""
    return (
        f"{ROLLOUT}.agent.agent_loop_manager_class={name!r}: War-RL has to know when a trajectory begins and ends; "
        f"leave it at {MANAGER}, or derive yours from it. Agent loops of your own need no manager of their own "
        "(agent.agent_loop_config_path)"
    )


def _is_derived(name: Any) -> bool:
    from verl.utils.import_utils import load_class_from_fqn

    from war_rl.trainers.verl.agent_loop import WarAgentLoopManager

    try:
        return bool(name) and issubclass(load_class_from_fqn(name, "AgentLoopManager"), WarAgentLoopManager)
    except (ImportError, AttributeError, ValueError, TypeError):
        return False


def _other_router(config: Any, war: WarConfig) -> str:
    path = config.actor_rollout_ref.rollout.router_config_path
    if not path:
        return ""
    return (
        f"{ROLLOUT}.router_config_path={path!r} contradicts trainer.rollout=war, which brings its own router: "
        "remove it, or use trainer.rollout=vllm"
    )


def _disaggregation(config: Any, war: WarConfig) -> str:
    if not config.actor_rollout_ref.rollout.disaggregation.enabled:
        return ""
    return f"{ROLLOUT}.disaggregation.enabled=True is not supported by trainer.rollout=war; use trainer.rollout=vllm"


def _pipeline_parallel(config: Any, war: WarConfig) -> str:
    size = config.actor_rollout_ref.rollout.pipeline_model_parallel_size
    if size <= 1:
        return ""
    return (
        f"{ROLLOUT}.pipeline_model_parallel_size={size}: verl's vLLM rollout has none, so neither has "
        "trainer.rollout=war; use tensor_model_parallel_size"
    )


def _data_parallel(config: Any, war: WarConfig) -> str:
    size = config.actor_rollout_ref.rollout.data_parallel_size
    if size <= 1:
        return ""
    return (
        f"{ROLLOUT}.data_parallel_size={size}: a replica of several data-parallel engines chooses one for each request "
        "by itself, so no trajectory would stay where its cache is; use data_parallel_size=1 (more replicas instead) "
        "or trainer.rollout=vllm"
    )


def _full_determinism(config: Any, war: WarConfig) -> str:
    if not config.actor_rollout_ref.rollout.full_determinism:
        return ""
    return (
        f"{ROLLOUT}.full_determinism=True: verl seeds each request by its replica, and under trainer.rollout=war the "
        "replica depends on who is busy; leave it False, or use trainer.rollout=vllm"
    )


def _no_prefix_cache(config: Any, war: WarConfig) -> str:
    if config.actor_rollout_ref.rollout.enable_prefix_caching:
        return ""
    return (
        f"{ROLLOUT}.enable_prefix_caching=False: trainer.rollout=war places turns by what the replicas' caches hold; "
        "leave it True, or use trainer.rollout=vllm"
    )


def _engine_priority(config: Any, war: WarConfig) -> str:
    policy = config.actor_rollout_ref.rollout.scheduling_policy
    if not war.scheduler.engine_priority or policy == "priority":
        return ""
    return (
        f"war.scheduler.engine_priority=True has no effect under {ROLLOUT}.scheduling_policy={policy!r}: set that to "
        "priority, or leave engine_priority False"
    )


def _mtp(config: Any, war: WarConfig) -> str:
    mtp = config.actor_rollout_ref.rollout.mtp
    if not war.spec.drafts_on(0) or mtp is None or not mtp.get("enable_rollout"):
        return ""
    return (
        f"{ROLLOUT}.mtp.enable_rollout=True and War-RL's drafting exclude each other: set war.spec.policy=off or "
        "disable MTP for the rollout"
    )


def _own_drafts(config: Any, war: WarConfig) -> str:
    engine = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    if not war.spec.drafts_on(0) or not engine.get("speculative_config"):
        return ""
    return (
        f"{ROLLOUT}.engine_kwargs.vllm.speculative_config is set, and so is drafting by War-RL: remove it, or set "
        "war.spec.policy=off to keep it"
    )


def _lora_rank(config: Any, war: WarConfig) -> str:
    """verl checks this for a rollout of the name vllm only."""
    model = config.actor_rollout_ref.model
    lora = model.get("lora") or {}
    rank = 0 if lora.get("merge", False) else max(lora.get("rank", 0), model.get("lora_rank", 0))
    if rank <= 0:
        return ""
    from verl.workers.rollout.vllm_rollout.utils import get_vllm_max_lora_rank

    try:
        get_vllm_max_lora_rank(rank)
    except ValueError as error:
        return f"actor_rollout_ref.model.lora_rank={rank}: vLLM refuses it ({error})"
    return ""


def _named_war(config: Any, war: WarConfig) -> str:
    """Engines that are no rollout: the reward model's, and distillation teachers'."""
    places = ["reward.reward_model.rollout.name"] if config.reward.reward_model.enable else []
    if OmegaConf.select(config, "distillation.enabled"):
        places += [f"distillation.teacher_models.{name}.inference.name" for name in config.distillation.teacher_models]
    wrong = [place for place in places if OmegaConf.select(config, place) == "war"]
    if not wrong:
        return ""
    return f"{wrong[0]}=war: that engine does no rollout; set it to vllm"


ALWAYS: tuple[Rule, ...] = (_seeds_on_cpu, _no_engine_counters, _other_manager)
"""Rules for both rollouts, which the same trainer runs and measures."""

WAR_ONLY: tuple[Rule, ...] = (
    _other_router,
    _disaggregation,
    _pipeline_parallel,
    _data_parallel,
    _full_determinism,
    _no_prefix_cache,
    _engine_priority,
    _mtp,
    _own_drafts,
    _lora_rank,
    _named_war,
)
