# SPDX-License-Identifier: Apache-2.0
"""Real replicas for the benchmark, one set per side, started and reached through the code that training uses: verl's
``LLMServerManager``, its or War-RL's replicas, router and client, on the same composed configuration."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

from war_rl.bench.cluster import Slots, WorkerGroup
from war_rl.bench.options import ROLLOUTS
from war_rl.bench.presets import Settings
from war_rl.bench.stats import ROUTER, Sample
from war_rl.engine_page import read_gauges

_CALL_TIMEOUT_S = 120.0
_EMPTY_TIMEOUT_S = 20.0


def side_overrides(
    rollout: str, settings: Settings, *, model: str, max_model_len: int, kv_tokens: int | None
) -> list[str]:
    """Hydra overrides of one side's configuration.

    Args:
        rollout: one of :data:`ROLLOUTS`.
        settings: of the benchmark.
        model: folder or name of the model.
        max_model_len: longest context. Unit: tokens.
        kv_tokens: KV cache of each replica, a multiple of the block size; None leaves it to the engine. Unit: tokens.
    """
    if rollout not in ROLLOUTS:
        raise ValueError(f"--sides {rollout}: not one of {', '.join(ROLLOUTS)}")
    at = "actor_rollout_ref.rollout"
    vllm = f"++{at}.engine_kwargs.vllm"
    extension = "ForcedWarWorkerExtension" if rollout == "war" else "ForcedCpuWorkerExtension"
    out = [
        f"trainer.rollout={'war' if rollout == 'war' else 'vllm'}",
        f"actor_rollout_ref.model.path={model}",
        f"{at}.load_format=auto",
        f"{at}.dtype=bfloat16",
        f"{at}.max_model_len={max_model_len}",
        f"{at}.max_num_seqs={settings.max_running}",
        f"{at}.temperature={settings.temperature}",
        f"{vllm}.block_size={settings.block_size}",
        f"{vllm}.worker_extension_cls=war_rl.bench.forcing.{extension}",
        f"war.spec.max_draft_tokens={settings.draft_tokens}",
    ]
    if kv_tokens is not None:
        # vLLM keeps one block for itself.
        out.append(f"{vllm}.num_gpu_blocks_override={kv_tokens // settings.block_size + 1}")
    if rollout == "vllm+suffix":
        out.append(f"{vllm}.speculative_config={{method:suffix,num_speculative_tokens:{settings.draft_tokens}}}")
    if rollout == "vllm+ngram":
        out.append(
            f"{vllm}.speculative_config={{method:ngram,num_speculative_tokens:{settings.draft_tokens},"
            "prompt_lookup_min:2,prompt_lookup_max:5}"
        )
    return out


def compose_side(overrides: Sequence[str], devices: int) -> Any:
    """The side's whole, checked configuration. ``devices``: what all sides' replicas need together.

    Raises:
        ConfigError: an override that Hydra or War-RL refuses.
    """
    from war_rl.trainers.verl.main_ppo import choose_platform, compose
    from war_rl.trainers.verl.settings import prepare

    if choose_platform() == "cpu":
        # On this platform Ray counts as many devices as it is told.
        overrides = [f"trainer.n_gpus_per_node={devices}", *overrides]
    config = compose(list(overrides))
    prepare(config)
    return config


UNSEEN = ("scheduler", "trace", "trace_mb", "progress")
"""Keys of the ``war:`` section that the router and the benchmark's own process read, and no engine (but for
``war.scheduler.engine_priority``)."""


def can_share_engines(one: Any, other: Any) -> bool:
    """Whether two sides' engines would be equal: both run War-RL's rollout and differ in nothing but :data:`UNSEEN`.

    Equal configurations do not share: comparing a side with its like is there to see how engines differ by chance.
    """
    from war_rl.trainers.verl.settings import is_war

    if not (is_war(one) and is_war(other)):
        return False
    (first, unseen), (second, others) = _split(one), _split(other)
    return bool(first == second and unseen != others)


def _split(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What engines see of a side's configuration, and the values of :data:`UNSEEN`."""
    from omegaconf import OmegaConf, open_dict

    war = OmegaConf.to_container(config.war, resolve=True)
    assert isinstance(war, dict)
    unseen = {key: war.get(key) for key in UNSEEN}
    seen = copy.deepcopy(config)
    # Before anything is resolved: the section is interpolated into the rollout's configuration as well.
    with open_dict(seen):
        for key in UNSEEN:
            seen.war.pop(key, None)
    plain = OmegaConf.to_container(seen, resolve=True)
    assert isinstance(plain, dict)
    priority = (unseen["scheduler"] or {}).get("engine_priority")
    return {**{str(key): value for key, value in plain.items()}, "engine_priority": priority}, unseen


def devices_per_replica(config: Any) -> int:
    """Devices of one replica: tensor x data x pipeline parallel."""
    rollout = config.actor_rollout_ref.rollout
    return int(rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size)


class Side:
    """The engines of one side, and what is measured of them."""

    def __init__(self, label: str, config: Any, manager: Any) -> None:
        from war_rl.trainers.verl.client import MeasuredClient, WarClient
        from war_rl.trainers.verl.settings import is_war

        self.label = label
        self.config = config
        self.is_war = is_war(config)
        self.servers: dict[str, Any] = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        self.router = manager.global_load_balancer
        self.client = manager.get_client(client_cls=WarClient if self.is_war else MeasuredClient)
        self._manager = manager
        self._names = {address: f"replica {i}" for i, address in enumerate(self.servers)}

    @classmethod
    async def start(cls, label: str, config: Any, slots: Slots, first_rank: int, replicas: int) -> Side:
        """Start the side's engines; ranks are counted over all sides, so that named actors of two never meet."""
        from verl.workers.rollout.llm_server import LLMServerManager

        world = replicas * devices_per_replica(config)
        # verl cuts a replica's workers out by its rank.
        per_replica = devices_per_replica(config)
        group = WorkerGroup([None] * (first_rank * per_replica) + slots.places, world)
        manager = await LLMServerManager.create(config=config, worker_group=group, start_rank=first_rank)
        side = cls(label, config, manager)
        if side.is_war:
            await side._configure_router()
        return side

    async def sharing(self, label: str, config: Any) -> Side:
        """Another side on the same engines, behind a router of its own."""
        manager = copy.copy(self._manager)
        manager.config = config
        await manager._init_global_load_balancer()
        side = Side(label, config, manager)
        await side._configure_router()
        return side

    async def _configure_router(self) -> None:
        from war_rl.config import to_dict
        from war_rl.trainers.verl.settings import war_config

        infos = await asyncio.gather(*(server.war_info.remote() for server in self.servers.values()))
        war = to_dict(war_config(self.config))
        seed = int(self.config.actor_rollout_ref.rollout.seed)
        await self.router.configure.remote(war, dict(zip(self.servers, infos, strict=True)), seed)

    async def kv_tokens(self) -> list[int]:
        """KV capacity of each replica in tokens, as its engine reports it."""
        sizes = await asyncio.gather(*(server.__ray_call__.remote(_kv_tokens) for server in self.servers.values()))
        return [int(size) for size in sizes]

    async def begin(self, step: int) -> None:
        """Empty every cache and memory that an earlier run of the same work has filled, as a weight update would."""
        calls = [server.__ray_call__.remote(_empty_cache) for server in self.servers.values()]
        emptied = await asyncio.wait_for(asyncio.gather(*calls), _CALL_TIMEOUT_S)
        if not all(emptied):
            raise RuntimeError(f"a replica of {self.label} still holds KV blocks of the run before")
        calls = [server.collective_rpc.remote("war_bench_forget") for server in self.servers.values()]
        await asyncio.wait_for(asyncio.gather(*calls), _CALL_TIMEOUT_S)
        if self.is_war:
            calls = [self.router.weights_updated.remote(step), self.router.take_step_stats.remote(False)]
            calls += [server.war_begin_step.remote(step) for server in self.servers.values()]
            await asyncio.wait_for(asyncio.gather(*calls), _CALL_TIMEOUT_S)
        else:
            await self.router.clear_sticky_cache.remote()

    async def settle(self) -> None:
        """Wait until text that is still on its way to the drafters has arrived."""
        if self.is_war:
            await self.client.publisher.flush()

    async def counters(self) -> dict[str, dict[str, float]]:
        """Cumulative counters of each replica, by address: vLLM's own and the benchmark extension's."""
        calls = [server.__ray_call__.remote(_collective, "war_bench_counters") for server in self.servers.values()]
        extension = await asyncio.wait_for(asyncio.gather(*calls), _CALL_TIMEOUT_S)
        pages = await asyncio.to_thread(lambda: [read_gauges(address) for address in self.servers])
        return {
            address: {**page, **ranks[0]} for address, page, ranks in zip(self.servers, pages, extension, strict=True)
        }

    def sampler(self, before: Mapping[str, Mapping[str, float]], clock: Any) -> Any:
        """A blocking function that takes one :class:`Sample` of each replica, counts since ``before``, and one of the
        router where it may hold turns back."""
        import ray

        def read() -> list[Sample]:
            # One time for all, so that their sum over time has no steps that are none.
            now = clock()
            samples = [
                _sample(now, name, read_gauges(address), before.get(address, {}))
                for address, name in self._names.items()
            ]
            if self.is_war:
                # verl's own router holds nothing back.
                held = ray.get(self.router.snapshot.remote(), timeout=_CALL_TIMEOUT_S)["waiting"]
                samples.append(Sample(now, ROUTER, 0, int(held), 0, 0, 0))
            return samples

        return read

    async def raise_if_dead(self) -> None:
        """Raises:
        ReplicaDead: a replica is dead; the message holds its engine's own error.
        """
        from war_rl.trainers.verl.health import check_replicas, raise_if_dead

        raise_if_dead(await asyncio.to_thread(check_replicas, self.servers, 30.0))


def _on_loop(server: Any, call: Any) -> Any:
    """Inside the server actor: the result of a coroutine on the engine's loop, waited for in the thread that Ray has
    for closures."""
    return asyncio.run_coroutine_threadsafe(call, server._server_task.get_loop()).result(timeout=_CALL_TIMEOUT_S)


def _collective(server: Any, method: str) -> list[Any]:
    """Answers of all of a replica's workers to one call; verl's own ``collective_rpc`` keeps them to itself."""
    return list(_on_loop(server, server.engine.collective_rpc(method)))


def _empty_cache(server: Any) -> bool:
    """Empty a replica's prefix cache; verl's own ``clear_kv_cache`` does not tell whether that worked, and vLLM refuses
    while the last request's blocks are not free yet."""
    until = time.monotonic() + _EMPTY_TIMEOUT_S
    while not _on_loop(server, server.engine.reset_prefix_cache()):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _kv_tokens(server: Any) -> int:
    cache = server.engine.vllm_config.cache_config
    return int(cache.num_gpu_blocks or 0) * int(cache.block_size)


def _sample(t: float, name: str, page: Mapping[str, float], before: Mapping[str, float]) -> Sample:
    def since(key: str) -> int:
        return int(page.get(key, 0.0) - before.get(key, 0.0))

    return Sample(
        t=t,
        replica=name,
        running=int(page.get("running", 0)),
        queued=int(page.get("waiting", 0)),
        prompt_tokens=since("prompt"),
        cached_tokens=since("cached"),
        generated_tokens=since("generated"),
    )
