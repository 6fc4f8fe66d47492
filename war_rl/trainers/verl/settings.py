# SPDX-License-Identifier: Apache-2.0
"""Reading and checking the trainer's whole configuration, before Ray starts and again in the trainer.

Everything that ``trainer.rollout`` switches is switched here or follows from an interpolation in war_ppo_trainer.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from war_rl.config import ConfigError, WarConfig, load_config
from war_rl.trainers.verl.refusals import refusals

ROLLOUTS = ("war", "vllm")
ONE_PROCESS = "war_rl.engines.vllm.one_process.OneProcessExecutor"
ROUTER_YAML = Path(__file__).with_name("router.yaml")


def war_config(config: Any) -> WarConfig:
    """The typed ``war:`` section of a whole trainer configuration.

    Raises:
        ConfigError: the section is missing or holds something that cannot work.
    """
    section = config.get("war")
    if section is None:
        raise ConfigError("the configuration has no war: section; compose it on war_ppo_trainer (pkg://war_rl.configs)")
    plain = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    assert isinstance(plain, Mapping)
    return load_config(plain)


def is_war(config: Any) -> bool:
    """Whether the WAR worker group does the rollout (rather than verl's stock one)."""
    return bool(config.trainer.rollout == "war")


def check(config: DictConfig) -> WarConfig:
    """Refuse what cannot work, before any process is started.

    Raises:
        ConfigError: naming the key, its value and what would work.
    """
    rollout = OmegaConf.select(config, "trainer.rollout")
    if rollout not in ROLLOUTS:
        raise ConfigError(f"trainer.rollout={rollout!r}: not one of {', '.join(ROLLOUTS)}")
    name = config.actor_rollout_ref.rollout.name
    if name != rollout:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name!r} contradicts trainer.rollout={rollout!r}: "
            f"set only trainer.rollout ({' or '.join(ROLLOUTS)})"
        )
    war = war_config(config)
    _check_trainer(config)
    for text in refusals(config, war, is_war(config)):
        raise ConfigError(text)
    return war


def _check_trainer(config: DictConfig) -> None:
    mode = config.trainer.v1.trainer_mode
    if mode not in ("war_sync", "sync"):
        raise ConfigError(
            f"trainer.v1.trainer_mode={mode!r}: War-RL speeds up synchronous training only; use war_sync (the default)"
        )
    if not config.trainer.use_v1:
        raise ConfigError("trainer.use_v1=False: War-RL plugs into verl's V1 trainer; use trainer.use_v1=True")
    if config.data.get("train_batch_size") is not None and config.data.train_batch_size < 1:
        raise ConfigError(f"data.train_batch_size={config.data.train_batch_size}: must be at least 1")


def check_model(config: DictConfig) -> None:
    """Refuse a local model folder that is not there: vLLM would take it for the name of a hub repository.

    Raises:
        ConfigError: naming the key and the path.
    """
    path = str(config.actor_rollout_ref.model.path)
    if path.startswith(("/", "~", ".")) and not Path(path).expanduser().exists():
        raise ConfigError(
            f"actor_rollout_ref.model.path={path!r}: there is no such folder; `war-rl prepare` makes the "
            "demonstration's model, and any Hugging Face folder will do"
        )


def prepare(config: DictConfig) -> WarConfig:
    """Check, then set what follows from ``trainer.rollout`` and cannot be an interpolation. Idempotent."""
    war = check_prepared(config)
    rollout = config.actor_rollout_ref.rollout
    engine = rollout.engine_kwargs.get("vllm") or {}
    if rollout.tensor_model_parallel_size > 1 and engine.get("distributed_executor_backend") == ONE_PROCESS:
        # The CPU platform's default holds one worker only; verl's own choice holds several.
        engine.distributed_executor_backend = None
    if is_war(config):
        with open_dict(config):
            config.actor_rollout_ref.rollout.router_config_path = str(ROUTER_YAML)
    return war


def check_prepared(config: DictConfig) -> WarConfig:
    """:func:`check` for a configuration that :func:`prepare` may already have completed."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.router_config_path == str(ROUTER_YAML):
        with open_dict(config):
            rollout.router_config_path = None
    return check(config)


def drafting_line(war: WarConfig, infos: Sequence[Mapping[str, Any]]) -> str:
    """One line for the start of a run: which replicas can draft, and what vLLM leaves off there.

    Args:
        infos: what ``WarHttpServer.war_info`` returned, one for each replica.
    """
    able = [info for info in infos if info["can_draft"]]
    keys = f"war.spec.policy={war.spec.policy}, war.spec.replicas={war.spec.replicas}"
    if not able:
        return f"drafting: no replica can draft ({keys}); all run as verl's own"
    features = {"async_scheduling": "asynchronous scheduling", "model_runner_v2": "model runner V2"}
    off = [name for key, name in features.items() if not all(info.get(key) for info in able)]
    ranks = ", ".join(str(info["replica"]) for info in able)
    return (
        f"drafting: {len(able)} of {len(infos)} replicas can draft ({ranks}; {keys}); off in vLLM there: "
        f"{', '.join(off) or 'nothing'}"
    )
