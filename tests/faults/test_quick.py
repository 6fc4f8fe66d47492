# SPDX-License-Identifier: Apache-2.0
"""Faults against our own classes, driven directly: what each costs, and what it is called."""

from __future__ import annotations

import asyncio
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from war_rl.config import load_config
from war_rl.metrics import NOT_FINITE, step_metrics
from war_rl.trainers.verl import agent_loop, observer
from war_rl.trainers.verl.agent_loop import WarAgentLoopWorker, _waited_for
from war_rl.trainers.verl.client import LLMServerClient, MeasuredClient, NonFiniteLogProbs, WarClient, check_log_probs
from war_rl.trainers.verl.context import Episode
from war_rl.trainers.verl.episodes import running_episode
from war_rl.trainers.verl.health import ReplicaDead
from war_rl.trainers.verl.observer import RolloutObserver
from war_rl.trainers.verl.workers import WorkerLost
from war_rl.types import TrajectoryId, TrajectoryRecord, TurnRecord

IDENTITY = TrajectoryId("g", 3, 7)


def episode() -> Episode:
    return Episode(TrajectoryRecord(IDENTITY, started=1000.0, clock_offset=1000.0))


def turn(**kwargs: Any) -> TurnRecord:
    values = {"started": 0.0, "queue_seconds": 0.0, "seconds": 0.0, **kwargs}
    return TurnRecord(2, "10.0.0.1:5", 10, None, 0, **values)


# ---------------------------------------------------------------------- NaN


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_log_probs_that_are_no_numbers_name_the_replica_and_the_trajectory(bad: float):
    with pytest.raises(NonFiniteLogProbs, match=r"replica 10\.0\.0\.1:5 returned 1 of 3 .* token 1\) in turn 2 .* g/3"):
        check_log_probs(TokenOutput(token_ids=[1, 2, 3], log_probs=[-0.1, bad, -2.0]), turn(), episode())
    with pytest.raises(NonFiniteLogProbs, match="returned 2 of 2"):
        check_log_probs(TokenOutput(token_ids=[1, 2], log_probs=[math.inf, -math.inf]), turn(), None)


@pytest.mark.parametrize("fine", [None, [], [-0.5, -1e308, -1e308]])
def test_log_probs_that_are_numbers_or_not_there_pass(fine: list[float] | None):
    output = TokenOutput(token_ids=[1], log_probs=fine)
    assert check_log_probs(output, turn(), None) is output


class FakeLink:
    """Remembers what a client tells the router."""

    def __init__(self) -> None:
        self.released: list[tuple[str, Any]] = []
        self.finished: list[TrajectoryId] = []

    def release(self, key: str, result: Any) -> None:
        self.released.append((key, result))

    def finish(self, trajectory: TrajectoryId) -> None:
        self.finished.append(trajectory)


@pytest.mark.parametrize("client_class", [MeasuredClient, WarClient])
def test_a_turn_of_noise_fails_its_trajectory_and_is_not_drafted_from(monkeypatch, client_class: type[Any]):
    async def generate(self, request_id, *, prompt_ids, **kwargs):
        return TokenOutput(token_ids=[7, 8], log_probs=[-1.0, math.nan])

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    link, fed = FakeLink(), []
    config = OmegaConf.create({"trainer": {"device": "gpu"}, "actor_rollout_ref": {"rollout": {"name": "war"}}})
    client = client_class(config=config)
    if client_class is WarClient:
        client._link = link
        client._publisher = SimpleNamespace(publish=fed.append, count_rewritten=lambda: None)

    async def play():
        with running_episode(IDENTITY, client) as running:
            try:
                await client.generate("r", prompt_ids=[1, 2], sampling_params={})
            finally:
                records.append(running.record)

    records: list[TrajectoryRecord] = []
    with pytest.raises(NonFiniteLogProbs):
        asyncio.run(play())
    (record,) = records
    assert record.status == "failed" and record.error.startswith(NOT_FINITE)
    values = step_metrics(records, seconds=1.0, engine={}, sched={}, spec={})
    assert values["war/fault/nonfinite_turns"] == values["war/rollout/failed"] == 1.0
    if client_class is WarClient:
        assert fed == []
        ((_, result),) = link.released
        assert result.error.startswith(NOT_FINITE)
        assert link.finished == [IDENTITY]


# ---------------------------------------------------------------------- disk full


def worker(folder: str) -> Any:
    """verl's worker without what verl builds around it."""
    made = WarAgentLoopWorker.__new__(WarAgentLoopWorker)
    made._recorder = agent_loop._recorder(folder)
    made._unrecorded, made._said_unrecorded = 0, False
    return made


OUTPUT = SimpleNamespace(
    prompt_ids=[1], response_ids=[2, 3], response_mask=[1, 1], reward_score=0.5, extra_fields={"war_env_seconds": []}
)


def test_a_trajectory_that_cannot_be_recorded_is_trained_on_and_counted(tmp_path: Path, monkeypatch, caplog):
    recording = worker(str(tmp_path / "recorded"))
    recording._record(episode().record, [OUTPUT])
    monkeypatch.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    for _ in range(3):
        recording._record(episode().record, [OUTPUT])
    monkeypatch.undo()
    assert recording.war_take_faults() == {"unrecorded_trajectories": 3.0}
    assert recording.war_take_faults() == {"unrecorded_trajectories": 0.0}
    assert caplog.text.count("No space left on device") == 1
    recording._record(episode().record, [OUTPUT])
    (file,) = (tmp_path / "recorded").iterdir()
    assert [json.loads(line)["response_ids"] for line in file.read_text().splitlines()] == [[2, 3], [2, 3]]


# ---------------------------------------------------------------------- hangs and deaths


def test_a_trajectory_that_hangs_says_where_it_is(monkeypatch):
    monkeypatch.setattr(agent_loop.time, "monotonic", lambda: 500.0)
    running = episode()
    assert _waited_for(running) == (500.0, "g/3 for 500 s (in its loop or environment)")
    running.turns_started = 1
    assert "turn 0 is generated, or held by the router" in _waited_for(running)[1]
    running.record.turns.append(turn(started=100.0, queue_seconds=20.0, seconds=30.0))
    assert _waited_for(running) == (350.0, "g/3 for 350 s (in its loop or environment)")


class Manager:
    """An agent-loop manager whose workers answer what they are told to, or raise it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.agent_loop_workers: list[Any] = []

    def war_call(self, method: str, *args: Any, timeout: float) -> list[Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer]


@pytest.fixture
def watching(monkeypatch):
    """An observer of no replicas whose workers and replicas answer as the test wants."""

    def make(answer: Any, replicas: Exception | None = None) -> RolloutObserver:
        def check(servers, timeout_s):
            if replicas is not None:
                raise replicas
            return []

        monkeypatch.setattr(observer, "check_replicas", check)
        made = RolloutObserver(load_config({}), {}, None, is_war=False)
        made.attach(Manager(answer))
        return made

    return make


def test_a_dead_worker_explains_a_rollout_that_failed(watching):
    from ray.exceptions import RayActorError

    found = watching(RayActorError()).explain(RuntimeError("no trajectories"))
    assert isinstance(found, WorkerLost) and "agent-loop worker is gone" in str(found)


def test_a_dead_replica_explains_more_than_what_its_trajectories_say(watching):
    dead = ReplicaDead("rollout replica a is dead: killed")
    assert watching({"errors": ["EngineDeadError"]}, dead).explain(RuntimeError("no trajectories")) is dead


def test_a_busy_worker_hides_no_error(watching):
    from ray.exceptions import GetTimeoutError

    error = RuntimeError("no trajectories")
    assert watching(GetTimeoutError()).explain(error) is error
    assert watching(GetTimeoutError()).what_died() is None


def test_the_trajectories_own_errors_explain_what_nobodys_death_does(watching):
    found = watching({"errors": ["KeyError: 'x'", "KeyError: 'x'"]}).explain(RuntimeError("no trajectories"))
    assert str(found) == "no trajectories The trajectories failed with: KeyError: 'x'"
