# SPDX-License-Identifier: Apache-2.0
"""Plays recorded trajectories against a rollout, closed loop: a turn is sent, its tokens come back, the environment's
tokens are appended after the tool time, the next turn is sent. Knows no engine: the client is handed in."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from war_rl.bench.stats import Sample, Work, imbalance
from war_rl.traces.workload import WorkItem
from war_rl.trainers.verl.episodes import announce_text, running_episode
from war_rl.types import TrajectoryId, TrajectoryRecord

FORCED_KEY = "war_forced"
"""Where the engine's benchmark extension looks for the tokens to commit (:data:`war_rl.bench.forcing.KEY`)."""


class ReplayError(RuntimeError):
    """A trajectory could not be replayed as recorded; the message names it and its turn."""


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled.

    Attributes:
        forced: commit the recorded tokens; otherwise the model's own, as many as recorded.
        temperature, top_p, top_k: as verl's agent loops send them.
        logprobs: whether log-probabilities of the samples are asked for, as training does.
    """

    forced: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    logprobs: bool = True

    def params(self, recorded: list[int]) -> dict[str, Any]:
        """Sampling parameters of one turn; a new dict each time, because servers take it apart."""
        params = {
            "max_tokens": len(recorded),
            "ignore_eos": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": 1.0,
            "logprobs": self.logprobs,
        }
        return {**params, "extra_args": {FORCED_KEY: recorded}} if self.forced else params


@dataclass
class Replay:
    """State of one run while it goes on and after it.

    Attributes:
        total: trajectories to replay.
        records: of those that have ended.
        started: monotonic seconds at the first request; 0 before.
        seconds: from the first request to the last trajectory's end; 0 before.
    """

    total: int
    records: list[TrajectoryRecord] = field(default_factory=list)
    running: list[TrajectoryRecord] = field(default_factory=list)
    started: float = 0.0
    seconds: float = 0.0

    @property
    def generated_tokens(self) -> int:
        return sum(turn.generated_tokens for record in [*self.records, *self.running] for turn in record.turns)


def fresh_identity(trajectory: TrajectoryId, step: int) -> TrajectoryId:
    """The trajectory's identity in one run: no run may recognise another's groups or prompts."""
    return replace(trajectory, uid=f"{trajectory.uid}@{step}", index=f"{trajectory.index}@{step}", step=step)


async def replay(
    client: Any, items: Sequence[WorkItem], sampling: Sampling, *, step: int, at_once: int | None, state: Replay
) -> None:
    """Play all ``items`` in order, at most ``at_once`` at the same time (None: all), filling ``state``.

    Args:
        client: has verl's ``generate(request_id, prompt_ids=..., sampling_params=...)`` and records each turn in the
            current episode, as :class:`~war_rl.trainers.verl.client.MeasuredClient` does.
        items: the work.
        sampling: how turns are sampled.
        step: the run's own step number, part of every identity.
        at_once: trajectories under way; the next one starts when one ends.
        state: to be watched from outside.

    Raises:
        ReplayError: tokens came back that are not the recorded ones (forced) or not as many (free).
        Exception: whatever the client raised; the other trajectories are cancelled first.
    """
    waiting = deque(items)
    state.started = time.monotonic()

    async def worker() -> None:
        while waiting:
            await _play(client, waiting.popleft(), sampling, step, state)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(at_once or len(items), len(items)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    state.seconds = time.monotonic() - state.started


async def _play(client: Any, item: WorkItem, sampling: Sampling, step: int, state: Replay) -> None:
    # One id for all turns: it is what verl's own router sticks to.
    request_id = uuid4().hex
    context = item.prompt_tokens.tolist()
    with running_episode(fresh_identity(item.trajectory, step), client) as episode:
        state.running.append(episode.record)
        try:
            for number, turn in enumerate(item.turns):
                recorded = turn.model_tokens.tolist()
                output = await client.generate(
                    request_id, prompt_ids=list(context), sampling_params=sampling.params(recorded)
                )
                _check(item, number, recorded, list(output.token_ids), sampling.forced)
                context.extend(output.token_ids)
                if turn.tool_seconds:
                    await asyncio.sleep(turn.tool_seconds)
                    episode.record.env_seconds += turn.tool_seconds
                context.extend(turn.env_tokens.tolist())
            announce_text(client, episode, context)
        finally:
            state.running.remove(episode.record)
    episode.record.response_tokens = len(context) - len(item.prompt_tokens)
    state.records.append(episode.record)


def _check(item: WorkItem, turn: int, recorded: list[int], got: list[int], forced: bool) -> None:
    where = f"trajectory {item.trace_id}, turn {turn}"
    if len(got) != len(recorded):
        raise ReplayError(f"{where}: {len(recorded)} tokens were asked for, {len(got)} came back")
    if forced and got != recorded:
        first = next(i for i, (a, b) in enumerate(zip(recorded, got, strict=True)) if a != b)
        raise ReplayError(
            f"{where}: token {first} came back as {got[first]}, recorded is {recorded[first]}: the engine did not "
            "follow the recording (is its worker extension the benchmark's?)"
        )


def work_of(records: Sequence[TrajectoryRecord]) -> Work:
    """What was done, as the client saw it."""
    turns = [turn for record in records for turn in record.turns]
    return Work(
        turns=len(turns),
        generated_tokens=sum(turn.generated_tokens for turn in turns),
        requested_prompt_tokens=sum(turn.prompt_tokens for turn in turns),
    )


def turn_counters(records: Sequence[TrajectoryRecord], replicas: Sequence[str]) -> dict[str, float]:
    """Those of :data:`~war_rl.bench.stats.COUNTERS` that the clients' records hold.

    Cached tokens are left out where an engine did not report them for every turn.
    """
    turns = [turn for record in records for turn in record.turns]
    per_replica = dict.fromkeys(replicas, 0)
    for turn in turns:
        per_replica[turn.replica] = per_replica.get(turn.replica, 0) + turn.generated_tokens
    out = {
        "replica_imbalance": imbalance(per_replica.values()),
        "longest_trajectory_seconds": max((_duration(record) for record in records), default=0.0),
    }
    if all(turn.cached_tokens is not None for turn in turns):
        cached = sum(turn.cached_tokens or 0 for turn in turns)
        out["prefill_cached_tokens"] = float(cached)
        out["prefill_computed_tokens"] = float(sum(turn.prompt_tokens for turn in turns) - cached)
    return out


def _duration(record: TrajectoryRecord) -> float:
    if not record.turns:
        return 0.0
    last = record.turns[-1]
    return last.started + last.queue_seconds + last.seconds - record.turns[0].started


async def watch(
    read: Callable[[], Sequence[Sample]],
    interval_s: float,
    samples: list[Sample],
    on_look: Callable[[], Awaitable[None]],
) -> None:
    """Append what ``read`` returns to ``samples`` every ``interval_s`` seconds until cancelled.

    ``read`` blocks, so it runs in a thread; ``on_look`` is awaited after each look.
    """
    while True:
        samples.extend(await asyncio.to_thread(read))
        await on_look()
        await asyncio.sleep(interval_s)
