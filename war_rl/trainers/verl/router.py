# SPDX-License-Identifier: Apache-2.0
"""The router actor: the shared :class:`~war_rl.trainers.shell.SchedulerShell` behind Ray.

It speaks verl's ``RequestLoadBalancer`` protocol (for anything that knows only that) and the richer messages of
:class:`~war_rl.trainers.verl.link.RouterLink`. A turn that may not start yet waits on a future; nothing blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import ray

from war_rl.config import SchedulerConfig, load_config
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.trainers.prometheus import State, look, serve
from war_rl.trainers.shell import SchedulerShell, decisions
from war_rl.trainers.verl.exchange import Answer, Ask, Event, Exchange, Grant, Server
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

logger = logging.getLogger(__name__)

# A client process takes at most two places of the actor (a message, and a call that waits for held turns), however many
# turns it has. Only callers of verl's own acquire_server take one for each waiting turn; they must never fill the
# house, because the release that would let one of them go could not come in any more.
MAX_CALLS = 200_000

METRICS_TIMEOUT_S = 5.0
"""Longest that a scrape waits for the router's loop."""

RESTARTED = (
    "the router was started again and has lost which turns run where; the run cannot go on. Restart it: training "
    "resumes from its last checkpoint"
)


class RouterLost(RuntimeError):
    """The router actor is gone, or came back without what it knew. The run must stop: no turn can be placed."""


class Router:
    """Serves verl's calls from the shared shell. Runs on one asyncio loop, so no state needs a lock."""

    def __init__(self, servers: Mapping[str, Any], yaml_config: Mapping[str, Any] | None = None) -> None:
        del yaml_config  # verl passes router.yaml; the settings come with configure()
        self._servers: dict[str, Any] = {}
        self._infos: dict[str, ReplicaInfo] = {}
        self._by_request: dict[str, list[str]] = {}
        self._version = 0
        self._use(GlobalScheduler(SchedulerConfig()))
        self._configured = False
        self._metrics_address = ""
        self.add_servers(dict(servers))

    # ------------------------------------------------------------------ War-RL's own calls

    def configure(self, war: Mapping[str, Any], infos: Mapping[str, Mapping[str, Any]], seed: int = 0) -> None:
        """Set the policy and what the replicas reported of themselves. Called once, before the first turn.

        Args:
            war: the plain ``war:`` section.
            infos: by server id, what ``WarHttpServer.war_info`` returned.
            seed: of the scheduler's random choices.
        """
        if self._shell.inflight:
            raise RuntimeError("the router cannot be configured while turns are running")
        scheduler = load_config(war).scheduler
        self._use(GlobalScheduler(scheduler, seed=seed))
        self._configured = True
        self._version += 1
        if scheduler.explain:
            _log_decisions()
        for server_id in self._servers:
            self._infos[server_id] = _replica_info(server_id, infos.get(server_id, {}))
            self._shell.add(self._infos[server_id])

    def is_configured(self) -> bool:
        """False in a router that was started again: it has lost what it knew, see :class:`RouterLost`."""
        return self._configured

    def exchange(self, client: str, version: int, events: Sequence[Event]) -> Answer:
        """Carry out what has happened to the client's turns, in order; the turns that may start now are in the answer.

        ``client`` names the calling process; what it holds is released when it falls silent (:meth:`renew`). It makes
        one such call at a time. ``version``: that of the servers that it knows.

        Raises:
            RouterLost: this router was started again in the middle of a run.
        """
        if not self._configured and any(isinstance(event, Ask) for event in events):
            raise RouterLost(RESTARTED)
        return self._answer(version, self._exchange.apply(client, events))

    async def collect(self, client: str, version: int) -> Answer:
        """Wait until turns of the client that were held may start, or never will; see :meth:`exchange`."""
        return self._answer(version, await self._exchange.collect(client))

    def renew(self, client: str) -> None:
        """The client process lives."""
        self._shell.renew(client)

    def release_client(self, client: str) -> int:
        """The client process is gone: its turns and trajectories end. Returns how many turns that were."""
        return len(self._shell.release_client(client))

    def weights_updated(self, step: int) -> None:
        """All replicas hold the weights of ``step``; what they had cached is gone."""
        self._shell.weights_updated(step)

    def lose_server(self, server_id: str, reason: str) -> None:
        """A replica is dead: forget it, and let the scheduler place its turns again when their clients ask."""
        self._servers.pop(server_id, None)
        self._version += 1
        self._infos.pop(server_id, None)
        lost = self._shell.lose(server_id, reason)
        logger.error("replica %s is lost (%s); %d turns must run elsewhere", server_id, reason, len(lost))

    def drain_server(self, server_id: str) -> None:
        """No turn starts there until :meth:`resume_server`; for a weight update of one replica at a time."""
        self._shell.drain(server_id)

    def resume_server(self, server_id: str) -> None:
        """The replica takes turns again.

        Raises:
            KeyError: there is no such replica.
        """
        self._shell.add(self._infos[server_id])

    def get_block_size(self) -> int:
        """Tokens in a KV block, for the clients' hashes; 0 where replicas differ or did not say."""
        sizes = {info.block_size for info in self._infos.values()}
        return sizes.pop() if len(sizes) == 1 else 0

    def take_step_stats(self, validate: bool) -> dict[str, float]:
        """``sched/...`` values since the last call, training and validation apart."""
        return dict(self._shell.scheduler.take_step_stats(validate))

    def snapshot(self) -> dict[str, Any]:
        """State for the progress line and for debugging: turns running by replica, and turns held here."""
        return {"running": self._shell.running(), "waiting": self._shell.waiting}

    def seconds_left(self, validate: bool, to_come: int) -> float | None:
        """How long a rollout still takes of which ``to_come`` trajectories have not ended; None if that is unknown."""
        return self._shell.seconds_left(validate, to_come)

    def explanations(self) -> list[dict[str, Any]]:
        """The last ``war.scheduler.explain`` decisions; see :meth:`GlobalScheduler.explanations`."""
        return self._shell.scheduler.explanations()

    def counters(self) -> dict[str, float]:
        """Cumulative counts and present gauges of the scheduler."""
        return self._shell.scheduler.counters()

    async def serve_metrics(self) -> str:
        """Serve the scheduler's state for Prometheus, on a free port of the address that verl's servers bind on a node.

        Returns:
            ``host:port``; the same at every call.
        """
        if not self._metrics_address:
            loop = asyncio.get_running_loop()

            async def state() -> State:
                return look(self._shell.scheduler)

            def ask() -> State:
                # Scrapes come in a thread of the HTTP server; the state belongs to this loop.
                return asyncio.run_coroutine_threadsafe(state(), loop).result(timeout=METRICS_TIMEOUT_S)

            host = ray.util.get_node_ip_address().strip("[]")
            self._metrics_address = await asyncio.to_thread(serve, ask, host)
        return self._metrics_address

    # ------------------------------------------------------------------ verl's RequestLoadBalancer protocol

    async def acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        """verl's call, for clients that know nothing of trajectories: sticky by ``request_id``."""
        request = TurnRequest(
            key=f"plain-{uuid4().hex}",
            trajectory=TrajectoryId(uid=f"request-{request_id}", session=0, step=-1),
            turn=0,
            prompt_tokens=len(extra.get("prompt_ids") or ()),
        )
        self._by_request.setdefault(request_id, []).append(request.key)
        server_id, _ = await self._shell.acquire(request)
        return server_id, self._servers[server_id]

    def release_server(self, server_id: str, request_id: str | None = None) -> None:
        keys = self._by_request.get(request_id or "", [])
        key = next((k for k in keys if self._shell.home(k) == server_id), None)
        if key is None:
            return
        keys.remove(key)
        if not keys:
            del self._by_request[request_id or ""]
        self._shell.release(key, TurnResult())

    def require_acquire_fields(self) -> list[str]:
        return ["prompt_ids"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        self._version += 1
        for server_id, handle in servers.items():
            self._servers[server_id] = handle
            self._shell.add(self._infos.setdefault(server_id, _replica_info(server_id, {})))

    def remove_servers(self, server_ids: list[str]) -> None:
        for server_id in server_ids:
            self.lose_server(server_id, "removed")

    def get_all_servers(self) -> list[str]:
        return list(self._servers)

    def get_inflight_count(self, server_id: str) -> int:
        return self._shell.running().get(server_id, 0)

    def get_total_inflight(self) -> int:
        return self._shell.inflight

    def get_status(self) -> dict[str, Any]:
        return {
            "servers": self._shell.running(),
            "total_inflight": self._shell.inflight,
            "active_servers": len(self._servers),
            "waiting": self._shell.waiting,
        }

    def clear_sticky_cache(self) -> dict[str, Any]:
        """verl calls this where residency has become worthless; so does a weight update."""
        self._shell.weights_updated(-1)
        return {"cleared_entries": 0, "server_loads": self._shell.running()}

    # ------------------------------------------------------------------ inside

    def _use(self, scheduler: GlobalScheduler) -> None:
        self._shell = SchedulerShell(scheduler)
        self._exchange = Exchange(self._shell)

    def _answer(self, version: int, grants: list[Grant]) -> Answer:
        if version == self._version:
            return Answer(version, None, grants)
        servers = {i: Server(handle, self._infos[i].can_draft) for i, handle in self._servers.items()}
        return Answer(self._version, servers, grants)


def _replica_info(server_id: str, info: Mapping[str, Any]) -> ReplicaInfo:
    return ReplicaInfo(
        id=server_id,
        kv_tokens=int(info.get("kv_tokens", 0)),
        block_size=int(info.get("block_size", 16)),
        can_draft=bool(info.get("can_draft", True)),
        max_running=int(info.get("max_running", 0)),
    )


def _log_decisions() -> None:
    """Show every decision in this process's log, whatever level the process logs at otherwise."""
    decisions.setLevel(logging.DEBUG)
    if not decisions.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s decision: %(message)s"))
        decisions.addHandler(handler)
        decisions.propagate = False


@ray.remote(num_cpus=0, max_concurrency=MAX_CALLS)
class WarRouter(Router):
    """:class:`Router` as a Ray actor. One async method makes Ray run all of them on one event loop."""
