# SPDX-License-Identifier: Apache-2.0
"""The WAR replica: verl's vLLM replica with a drafter in the engine and the calls that feed and read it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from war_rl.config import ConfigError, WarConfig, load_config
from war_rl.engines.vllm.queue_watch import ENGINE_QUEUE_SECONDS, LAST_WAIT, WatchedEngine
from war_rl.trainers.verl.version import VersionGuard
from war_rl.types import engine_priority

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "war_rl.engines.vllm.extension.WarWorkerExtension"
CPU_WORKER_EXTENSION = "war_rl.engines.vllm.extension.CpuWorkerExtension"


def war_config_of(rollout_config: Any) -> WarConfig:
    """The ``war:`` section as it reaches a replica, through verl's ``rollout.custom``.

    Raises:
        ConfigError: the section did not arrive.
    """
    custom = rollout_config.get("custom") or {}
    if not isinstance(custom, Mapping) or "war" not in custom:
        raise ConfigError(
            "actor_rollout_ref.rollout.custom.war is missing: compose the configuration on war_ppo_trainer "
            "(--config-path pkg://war_rl.configs --config-name war_ppo_trainer)"
        )
    return load_config(custom["war"])


def is_war_extension(name: str) -> bool:
    """Whether a worker extension, by its dotted name, is War-RL's or derived from it."""
    from war_rl.engines.vllm.extension import WarWorkerExtension

    module, _, cls = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), cls) if module else None
    except (ImportError, AttributeError):
        return False
    return isinstance(found, type) and issubclass(found, WarWorkerExtension)


class WarHttpServer(vLLMHttpServer):
    """verl's vLLM server with a drafter in its engine.

    ``generate`` is verl's own; only what the engine is started with differs, and control calls are added.
    """

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        self._war = war_config_of(self.config)
        self._war_guard = VersionGuard()
        self._war_can_draft = self._war.spec.drafts_on(self.replica_rank)
        extension = engine_kwargs.get("worker_extension_cls")
        if extension in (None, CPU_WORKER_EXTENSION):
            extension = WORKER_EXTENSION
        elif not is_war_extension(extension):
            raise ConfigError(
                f"actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls={extension!r} cannot be combined "
                f"with trainer.rollout=war, whose replicas need {WORKER_EXTENSION}; derive yours from it, or use "
                "trainer.rollout=vllm"
            )
        # A value here would win over _get_worker_extension_cls.
        engine_kwargs["worker_extension_cls"] = extension
        if self._war_can_draft:
            self._enable_drafting(engine_kwargs)

    def _enable_drafting(self, engine_kwargs: dict[str, Any]) -> None:
        if engine_kwargs.get("speculative_config"):
            raise ConfigError(
                "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config is set, and so is drafting by War-RL: "
                "remove it, or set war.spec.policy=off to keep it"
            )
        from war_rl.engines.vllm.proposer import PROPOSER

        engine_kwargs["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": self._war.spec.max_draft_tokens,
        }
        additional = dict(engine_kwargs.get("additional_config") or {})
        additional["war"] = {"spec": _plain(self.config["custom"]["war"]["spec"]), "stop_token_ids": self._stop_ids()}
        engine_kwargs["additional_config"] = additional

    def _stop_ids(self) -> list[int]:
        eos = self.model_config.tokenizer.eos_token_id
        return [] if eos is None else [int(eos)]

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        request_id = str(kwargs.get("request_id", ""))
        if self._war.scheduler.engine_priority:
            # How far trajectories are, which the request id tells, replaces what an agent loop may have asked for.
            kwargs["priority"] = engine_priority(request_id)
        self._war_guard.check(request_id, self.global_steps, "before it began")
        output = await super().generate(*args, **kwargs)
        self._war_guard.check(request_id, self.global_steps, "after it ended")
        output.extra_fields["war_replica"] = self.replica_rank
        waited = LAST_WAIT.get()
        if waited is not None:
            output.extra_fields[ENGINE_QUEUE_SECONDS] = waited
        return output

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        self.engine = WatchedEngine(self.engine)

    async def war_info(self) -> dict[str, Any]:
        """What the scheduler must know: KV capacity (tokens), block size (tokens), batch bound, whether it drafts.

        And what a proposer may have switched off in vLLM, as it is, for the start-up line.
        """
        config = self.engine.vllm_config
        cache = config.cache_config
        blocks = cache.num_gpu_blocks or 0
        return {
            "replica": self.replica_rank,
            "kv_tokens": int(blocks) * int(cache.block_size),
            "block_size": int(cache.block_size),
            "max_running": int(self.config.max_num_seqs),
            "can_draft": self._war_can_draft,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "model_runner_v2": bool(getattr(config, "use_v2_model_runner", False)),
        }

    async def war_feed(self, blob: bytes) -> None:
        """Pass an encoded feed message to the drafter; returns once the engine has queued it."""
        if self._war_can_draft and self.node_rank == 0:
            await self.engine.collective_rpc("war_feed", args=(blob,))

    async def war_begin_step(self, step: int) -> dict[str, Any]:
        """The weights of ``step`` are loaded: nothing computed with others may stay, and the drafter is told.

        Returns:
            ``version``: verl's number of the weights here; ``late_turns``: turns refused since the start.
        """
        if self.node_rank == 0:
            await self._empty_cache()
            if self._war_can_draft:
                await self.engine.collective_rpc("war_begin_step", args=(step,))
        return {"version": self.global_steps, "late_turns": self._war_guard.refused}

    async def _empty_cache(self) -> None:
        """Empty the prefix cache. verl does so too, but does not look whether it worked: not while a request runs."""
        if await self.engine.reset_prefix_cache(reset_connector=True):
            return
        logger.error(
            "replica %d still runs requests of an earlier step; they start again from their prompts, and what they "
            "write will be refused",
            self.replica_rank,
        )
        await self.engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    async def war_counters(self) -> dict[str, float]:
        """The drafter's cumulative counters (those of the rank whose drafts are used)."""
        if not self._war_can_draft or self.node_rank != 0:
            return {}
        results = await self.engine.collective_rpc("war_counters")
        return dict(results[0]) if results else {}

    async def war_weights(self) -> dict[str, float]:
        """Sums of a few weights as the engine holds them; see ``WarWorkerExtension.war_weights``."""
        results = await self.engine.collective_rpc("war_weights")
        return dict(results[0])


class WarReplica(vLLMReplica):
    """A vLLM replica whose server is :class:`WarHttpServer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(WarHttpServer)

    def _get_server_name_prefix(self) -> str:
        # verl's ServerAdapter looks its server up as f"{rollout.name}_server_...".
        return "war_"


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
