# SPDX-License-Identifier: Apache-2.0
"""Ray and its devices: who of the benchmark's replicas runs where."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any


def start_ray(config: Any, quiet: bool) -> None:
    """Ray as verl's ``run_ppo`` starts it: a cluster that runs already is joined."""
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    given = OmegaConf.to_container(config.ray_kwargs.get("ray_init", {}), resolve=True)
    assert isinstance(given, dict)
    # Only None: an empty value would ask for a cluster without resources.
    init = {str(key): value for key, value in given.items() if value is not None}
    env = OmegaConf.merge(get_ppo_ray_runtime_env(config), init.pop("runtime_env", None) or {})
    ray.init(**init, runtime_env=OmegaConf.to_container(env), log_to_driver=not quiet)


def cluster() -> dict[str, Any]:
    """Nodes of the Ray cluster and the accelerators on them, for the report."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kinds = {
        name.removeprefix("accelerator_type:") for node in nodes for name in node if name.startswith("accelerator")
    }
    return {"nodes": len(nodes), "accelerators": sorted(kinds)}


@dataclass(frozen=True)
class Place:
    """Stands for a training worker where verl asks one for its node and device; a real one would load torch and verl
    for each replica only to answer that. Its device is reserved by a slot actor."""

    node: str
    device: str

    @property
    def __ray_call__(self) -> Place:
        return self

    def remote(self, function: Any) -> asyncio.Future[tuple[str, str]]:
        del function  # verl's question: where are you?
        answer: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        answer.set_result((self.node, self.device))
        return answer


@dataclass
class WorkerGroup:
    """What ``LLMServerManager`` needs of a hybrid worker group: the workers of all ranks, and how many are its own."""

    workers: list[Any]
    world_size: int


class Slot:
    """Holds one device of the cluster for a replica."""

    def where(self) -> tuple[str, str]:
        import ray

        context = ray.get_runtime_context()
        ids = [str(i) for found in context.get_accelerator_ids().values() for i in found]
        return context.get_node_id(), ids[0]


class Slots:
    """One device per rank, replica by replica, each replica on one node where it fits.

    Raises:
        RuntimeError: the cluster has not got that many free devices.
    """

    def __init__(self, replicas: int, per_replica: int, timeout_s: float = 120.0) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
        from verl.plugin.platform import get_platform

        resource = get_platform().ray_resource_name()
        most = max((int(node["Resources"].get(resource, 0)) for node in ray.nodes() if node["Alive"]), default=0)
        strategy = "STRICT_PACK" if per_replica <= most else "PACK"
        self._groups = [placement_group([{resource: 1}] * per_replica, strategy) for _ in range(replicas)]
        ready, _ = ray.wait([g.ready() for g in self._groups], num_returns=replicas, timeout=timeout_s)
        if len(ready) < replicas:
            raise RuntimeError(
                f"{replicas * per_replica} {resource}s are needed for all sides' replicas together; the cluster has "
                f"{ray.available_resources().get(resource, 0):g} free of {ray.cluster_resources().get(resource, 0):g}. "
                "Compare fewer sides, or use fewer --replicas"
            )
        slot = ray.remote(Slot)
        self._actors = []
        self.places: list[Place] = []
        for group in self._groups:
            options = {"num_cpus": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(group)}
            actors = [
                slot.options(**options, **get_platform().ray_resource_options(1)).remote() for _ in range(per_replica)
            ]
            self._actors += actors
            answers = sorted(ray.get([actor.where.remote() for actor in actors], timeout=timeout_s))
            self.places += [Place(node, device) for node, device in answers]


def threads_per_replica(replicas: int) -> None:
    """Set the threads of a CPU replica: the cores over one side's replicas, as the other sides are idle meanwhile."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("WAR_CPU_THREADS", str(max(1, cores // replicas)))
