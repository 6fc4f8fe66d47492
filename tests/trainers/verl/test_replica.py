# SPDX-License-Identifier: Apache-2.0
"""The WAR server around verl's, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from war_rl.config import SchedulerConfig, WarConfig
from war_rl.types import TrajectoryId, encode_request_id

pytestmark = pytest.mark.vllm

REQUEST = encode_request_id(TrajectoryId("g", 0, 1), 3)


class Engine:
    """vLLM's cache calls; ``running`` requests are in the way of the first."""

    def __init__(self, running: int = 0):
        self.running, self.calls = running, []

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.calls.append(reset_running_requests)
        return reset_running_requests or not self.running


class SlowEngine:
    """Each request waits ``seconds`` for its first step; None where vLLM keeps no such statistics."""

    vllm_config = "its own"

    def __init__(self, seconds):
        self.seconds, self.closed = seconds, 0

    async def generate(self, prompt, request_id):
        stats = None
        if self.seconds is not None:
            stats = SimpleNamespace(queued_ts=100.0, scheduled_ts=100.0 + self.seconds)
        try:
            yield SimpleNamespace(metrics=stats, text=prompt)
            yield SimpleNamespace(metrics=stats, text=prompt)
        finally:
            self.closed += 1


def server(monkeypatch, *, priority=False, version=0, during=None, engine=None):
    """A server whose engine answers at once; ``during`` runs while it generates."""
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from war_rl.trainers.verl.replica import WarHttpServer
    from war_rl.trainers.verl.version import VersionGuard

    made = object.__new__(WarHttpServer)
    made._war = WarConfig(scheduler=SchedulerConfig(engine_priority=priority))
    made._war_guard, made._war_can_draft = VersionGuard(), False
    made.replica_rank, made.node_rank, made.global_steps, made.engine = 1, 0, version, engine
    made.seen = []

    async def generate(self, **kwargs):
        self.seen.append(kwargs)
        if during is not None:
            during(self)
        return SimpleNamespace(extra_fields={})

    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    return made


@pytest.mark.parametrize("wanted, expected", [(True, {"priority": -3}), (False, {})])
def test_a_request_gets_its_priority_from_the_turns_behind_it(monkeypatch, wanted, expected):
    war = server(monkeypatch, priority=wanted)
    output = asyncio.run(war.generate(request_id=REQUEST, prompt_ids=[1]))
    assert output.extra_fields == {"war_replica": 1}
    assert war.seen == [{"request_id": REQUEST, "prompt_ids": [1], **expected}]


def test_an_agent_loops_own_priority_goes_through(monkeypatch):
    war = server(monkeypatch)
    asyncio.run(war.generate(request_id=REQUEST, prompt_ids=[1], priority=7))
    assert war.seen[0]["priority"] == 7


def test_a_server_tells_how_long_each_request_waited_in_its_engine(monkeypatch):
    pytest.importorskip("vllm")
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from war_rl.trainers.verl.replica import WarHttpServer

    async def run_server(self, args):
        self.engine = args

    async def generate(self, **kwargs):
        async for _ in self.engine.generate(kwargs["prompt_ids"], request_id=kwargs["request_id"]):
            await asyncio.sleep(0)
        return SimpleNamespace(extra_fields={})

    async def told(seconds):
        await war.run_server(SlowEngine(seconds))
        assert war.engine.vllm_config == "its own"
        return [(await asyncio.create_task(war.generate(request_id=r, prompt_ids=[1]))).extra_fields for r in "ab"]

    war = server(monkeypatch)
    monkeypatch.setattr(vLLMHttpServer, "run_server", run_server)
    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    assert WarHttpServer.run_server is not run_server
    both = {"war_replica": 1, "war_engine_queue_seconds": 2.5}
    assert asyncio.run(told(2.5)) == [both, both]
    assert asyncio.run(told(None)) == [{"war_replica": 1}] * 2


def test_a_caller_that_leaves_ends_the_request_in_the_engine():
    from war_rl.engines.vllm.queue_watch import WatchedEngine

    async def leave():
        engine = SlowEngine(1.0)
        outputs = WatchedEngine(engine).generate([1], request_id="a")
        await anext(outputs)
        await outputs.aclose()
        return engine.closed

    assert asyncio.run(leave()) == 1


@pytest.mark.parametrize("version", [1, 2])
def test_a_turn_of_a_step_that_is_over_never_reaches_the_engine(monkeypatch, version):
    from war_rl.trainers.verl.version import WrongVersion

    war = server(monkeypatch, version=version)
    with pytest.raises(WrongVersion, match="before it began"):
        asyncio.run(war.generate(request_id=REQUEST, prompt_ids=[1]))
    assert war.seen == [] and war._war_guard.refused == 1


def test_a_turn_that_runs_while_the_weights_change_is_thrown_away(monkeypatch):
    from war_rl.trainers.verl.version import WrongVersion

    war = server(monkeypatch, during=lambda self: setattr(self, "global_steps", 1))
    with pytest.raises(WrongVersion, match="after it ended"):
        asyncio.run(war.generate(request_id=REQUEST, prompt_ids=[1]))
    assert war._war_guard.refused == 1


@pytest.mark.parametrize(("running", "calls"), [(0, [False]), (2, [False, True])])
def test_the_cache_is_empty_after_an_update_whatever_runs(monkeypatch, running, calls):
    engine = Engine(running)
    war = server(monkeypatch, version=4, engine=engine)
    war._war_guard.refused = 3
    assert asyncio.run(war.war_begin_step(4)) == {"version": 4, "late_turns": 3}
    assert engine.calls == calls
