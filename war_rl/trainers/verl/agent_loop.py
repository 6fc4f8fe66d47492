# SPDX-License-Identifier: Apache-2.0
"""Agent-loop worker and manager: verl's own, which also announce each trajectory's start and end.

Agent loops (stock or the user's own) run unchanged inside.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from war_rl.trainers.verl import textarena_loop  # noqa: F401 - registers the loop in the process that runs it
from war_rl.trainers.verl.client import WarClient
from war_rl.trainers.verl.context import CURRENT_EPISODE, Episode
from war_rl.trainers.verl.episodes import announce_text, count_progress, running_episode
from war_rl.trainers.verl.settings import war_config
from war_rl.types import TrajectoryId, TrajectoryRecord

logger = logging.getLogger(__name__)

# verl decorates the class itself; its plain class is what can be derived from.
_StockWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class TrajectoryTimeout(RuntimeError):
    """A trajectory took longer than ``war.fault.trajectory_timeout_s``."""


class WarAgentLoopWorker(_StockWorker):
    """verl's agent-loop worker with an :class:`Episode` around each trajectory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._war = war_config(self.config)
        self._records: dict[bool, list[TrajectoryRecord]] = {False: [], True: []}
        self._running: dict[int, Episode] = {}
        self._recorder = _recorder(self._war.record_trajectories)

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        identity = TrajectoryId(
            uid=str(kwargs["uid"]),
            session=int(kwargs.get("session_id", 0)),
            step=int(trajectory["step"]),
            index="" if trajectory.get("sample_index") is None else str(trajectory["sample_index"]),
            validate=bool(trajectory["validate"]),
        )
        episode: Episode | None = None
        try:
            with running_episode(identity, self.llm_client) as episode:
                self._running[id(episode)] = episode
                run = super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, trace=trace, **kwargs)
                return await self._bounded(run, identity)
        finally:
            if episode is not None:
                self._running.pop(id(episode), None)
                self._records[identity.validate].append(episode.record)

    async def _bounded(self, run: Any, identity: TrajectoryId) -> Any:
        limit = self._war.fault.trajectory_timeout_s
        if not limit:
            return await run
        try:
            return await asyncio.wait_for(run, limit)
        except asyncio.TimeoutError as error:
            raise TrajectoryTimeout(
                f"trajectory {identity.uid}/{identity.session} took longer than "
                f"war.fault.trajectory_timeout_s={limit:g} s"
            ) from error

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        """verl calls this when the agent loop has returned, with all token ids, before rewards are computed."""
        episode = CURRENT_EPISODE.get()
        if episode is not None:
            outputs = output if isinstance(output, list) else [output]
            self._describe(episode, outputs)
            if outputs:
                # Every turn was fed when it ended. Of several outputs, the last can go on from there.
                announce_text(self.llm_client, episode, [*outputs[-1].prompt_ids, *outputs[-1].response_ids])
        await super()._agent_loop_postprocess(output, validate, **kwargs)
        if episode is not None and self._recorder is not None:
            self._recorder(episode.record, output if isinstance(output, list) else [output])

    def _describe(self, episode: Episode, outputs: list[Any]) -> None:
        record = episode.record
        record.response_tokens = sum(len(o.response_ids) for o in outputs)
        record.env_seconds = sum(float(o.metrics.tool_calls) for o in outputs)
        if any(o.extra_fields.get("war_truncated") for o in outputs):
            record.status = "truncated"
        if outputs and outputs[-1].reward_score is not None:
            record.reward = float(outputs[-1].reward_score)

    # ------------------------------------------------------------------ asked by the trainer

    def war_progress(self) -> dict[str, Any]:
        """:func:`~war_rl.trainers.verl.episodes.count_progress` of the step so far."""
        finished = self._records[False] + self._records[True]
        return count_progress(finished, [episode.record for episode in self._running.values()])

    def war_take_records(self, validate: bool) -> list[TrajectoryRecord]:
        """The finished trajectories since the last call."""
        records, self._records[validate] = self._records[validate], []
        return records

    def war_client_counters(self) -> dict[str, float]:
        """Cumulative counters of this worker's feed and of its line to the router."""
        if isinstance(self.llm_client, WarClient):
            return {**self.llm_client.publisher.counters, **self.llm_client.link.counters}
        return {}


class WarAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with :class:`WarAgentLoopWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(WarAgentLoopWorker)

    def war_call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call one method of every worker."""
        refs = [getattr(worker, method).remote(*args) for worker in self.agent_loop_workers]
        return list(ray.get(refs, timeout=timeout))


def _recorder(folder: str) -> Callable[[TrajectoryRecord, list[Any]], None] | None:
    """Writes each finished trajectory to a file of this process; None when nothing is to be recorded."""
    if not folder:
        return None
    from war_rl.traces.readers.war import dump_trajectory

    path = Path(folder).expanduser() / f"{socket.gethostname()}-{os.getpid()}.jsonl"

    def write(record: TrajectoryRecord, outputs: list[Any]) -> None:
        for output in outputs:
            dump_trajectory(
                path,
                record.trajectory,
                prompt_ids=output.prompt_ids,
                response_ids=output.response_ids,
                response_mask=output.response_mask,
                tool_seconds=output.extra_fields.get("war_env_seconds", ()),
                replicas=[turn.replica for turn in record.turns],
                reward=output.reward_score,
                seconds=time.time() - record.started,
            )

    return write
