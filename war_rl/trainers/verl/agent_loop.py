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
from war_rl.trainers.verl.loopwatch import LoopWatch
from war_rl.trainers.verl.settings import war_config
from war_rl.trainers.verl.workers import WorkerSilent, lost
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
        self._unrecorded = 0
        self._said_unrecorded = False
        self._watch: LoopWatch | None = None

    async def _run_agent_loop(
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **kwargs: Any,
    ) -> Any:
        if self._watch is None:
            self._watch = LoopWatch(logger.error)
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
            self._record(episode.record, output if isinstance(output, list) else [output])

    def _record(self, record: TrajectoryRecord, outputs: list[Any]) -> None:
        assert self._recorder is not None
        try:
            self._recorder(record, outputs)
        except OSError as error:
            # The trajectory is in the batch already: a full disk must not make its whole group a failed one.
            self._unrecorded += 1
            if not self._said_unrecorded:
                self._said_unrecorded = True
                logger.error("trajectories cannot be recorded in war.record_trajectories (said once): %s", error)

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
        """:func:`~war_rl.trainers.verl.episodes.count_progress` of the step so far; ``oldest`` names the trajectories
        that have been longest without an end of a turn (seconds, what they are at)."""
        finished = self._records[False] + self._records[True]
        episodes = list(self._running.values())
        return {
            **count_progress(finished, [episode.record for episode in episodes]),
            "oldest": sorted(map(_waited_for, episodes), reverse=True)[:3],
        }

    def war_take_records(self, validate: bool) -> list[TrajectoryRecord]:
        """The finished trajectories since the last call."""
        records, self._records[validate] = self._records[validate], []
        return records

    def war_take_faults(self) -> dict[str, float]:
        """What went wrong since the last call without failing a trajectory."""
        count, self._unrecorded = self._unrecorded, 0
        return {"unrecorded_trajectories": float(count)}

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

    def generate_sequences(self, prompts: Any) -> None:
        """As verl's: hand the prompts out and return; but a worker that takes none is not waited for without end.

        Raises:
            WorkerLost: a worker is dead, or has not answered for ``war.fault.worker_timeout_s``.
        """
        chunks = prompts.chunk(len(self.agent_loop_workers))
        limit = war_config(self.config).fault.worker_timeout_s
        # As verl has it: a small batch may have fewer chunks than there are workers.
        given = zip(self.agent_loop_workers, chunks, strict=False)
        refs = [worker.generate_sequences.remote(chunk) for worker, chunk in given]
        try:
            ray.get(refs, timeout=limit)
        except ray.exceptions.RayActorError as error:
            raise lost("an agent-loop worker", error) from error
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerSilent("an agent-loop worker", limit) from error

    def war_call(self, method: str, *args: Any, timeout: float | None = None) -> list[Any]:
        """Call one method of every worker."""
        refs = [getattr(worker, method).remote(*args) for worker in self.agent_loop_workers]
        return list(ray.get(refs, timeout=timeout))


def _waited_for(episode: Episode) -> tuple[float, str]:
    """How long nothing has been heard of a running trajectory, in seconds, and where it is."""
    record, turns = episode.record, episode.record.turns
    since = turns[-1].started + turns[-1].queue_seconds + turns[-1].seconds if turns else 0.0
    since = since or record.started - record.clock_offset
    seconds = time.monotonic() - since
    at_engine = episode.turns_started > len(turns)
    where = f"turn {len(turns)} is generated, or held by the router" if at_engine else "in its loop or environment"
    return seconds, f"{record.trajectory.uid}/{record.trajectory.session} for {seconds:.0f} s ({where})"


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
