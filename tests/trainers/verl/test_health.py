# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import ray

from war_rl.trainers.verl import health
from war_rl.trainers.verl.health import (
    ReplicaDead,
    ReplicaHealth,
    UpdateStuck,
    UpdateWatch,
    check_router,
    probe,
    raise_if_dead,
    unfinished_requests,
    while_alive,
)
from war_rl.trainers.verl.router import RouterLost


def server(errored: bool, exitcode: int | None = None):
    process = SimpleNamespace(name="EngineCore", pid=123, exitcode=exitcode)
    resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
    return SimpleNamespace(engine=SimpleNamespace(errored=errored, engine_core=SimpleNamespace(resources=resources)))


def test_a_healthy_engine_has_no_cause(monkeypatch):
    assert probe(server(False)) == ""
    assert probe(SimpleNamespace()) == ""  # still starting


def test_a_killed_engine_is_named_with_its_signal_and_its_last_words(monkeypatch):
    monkeypatch.setattr(health, "_log_lines", lambda: [])
    assert probe(server(True, -9)) == "EngineCore (pid 123) was killed by SIGKILL"
    lines = [
        "INFO all is well\n",
        "(EngineCore pid=123) ERROR 11-29 [core.py:1] RuntimeError: out of blocks\n",
        "EngineDeadError: EngineCore encountered an issue.\n",
    ]
    monkeypatch.setattr(health, "_log_lines", lambda: lines)
    text = probe(server(True, 1))
    assert "exited with code 1" in text
    assert text.endswith("RuntimeError: out of blocks")


def test_an_unreadable_log_hides_nothing(monkeypatch):
    def broken():
        raise OSError("no log")

    monkeypatch.setattr(health, "_log_lines", broken)
    assert "SIGKILL" in probe(server(True, -9))


def test_every_dead_replica_is_named():
    raise_if_dead([ReplicaHealth("a", "")])
    with pytest.raises(ReplicaDead, match=r"replica b is dead: x; rollout replica c is dead: y"):
        raise_if_dead([ReplicaHealth("a", ""), ReplicaHealth("b", "x"), ReplicaHealth("c", "y")])


class FakeRouter:
    """Answers ``is_configured.remote()`` through a stand-in for ray.get."""

    def __init__(self, answer):
        self.is_configured = SimpleNamespace(remote=lambda: answer)


@pytest.mark.parametrize(
    "answer, words",
    [
        (False, "started again"),
        (ray.exceptions.GetTimeoutError(), "has not answered for 3 s"),
        (ray.exceptions.RayActorError(), "is gone"),
    ],
)
def test_a_router_that_is_lost_stops_the_run(monkeypatch, answer, words):
    def get(ref, timeout):
        if isinstance(ref, Exception):
            raise ref
        return ref

    monkeypatch.setattr(health.ray, "get", get)
    check_router(FakeRouter(True), 3.0)
    with pytest.raises(RouterLost, match=words):
        check_router(FakeRouter(answer), 3.0)


def test_a_call_that_waits_for_a_dead_replica_is_given_up_with_its_cause():
    never, looks = threading.Event(), []

    def check():
        looks.append(1)
        if len(looks) == 3:
            raise ReplicaDead("replica a is dead")

    try:
        with pytest.raises(ReplicaDead, match="replica a is dead"):
            while_alive(never.wait, check, 0.01)
    finally:
        never.set()


def test_a_call_that_returns_or_fails_is_itself():
    assert while_alive(lambda: 7, lambda: None, 0.01) == 7
    with pytest.raises(KeyError, match="x"):
        while_alive(lambda: {}["x"], lambda: None, 0.01)


class Replica:
    """Runs a function in itself, as ``__ray_call__`` would; None: it does not answer."""

    def __init__(self, step):
        self.global_steps = step
        self.__ray_call__ = self

    def remote(self, call):
        return (self, call)


def test_a_weight_update_that_does_not_end_names_the_replicas_it_has_not_reached(monkeypatch):
    now = [10.0]
    servers = {"a": Replica(5), "b": Replica(4), "c": Replica(None)}

    def wait(refs, num_returns, timeout):
        assert num_returns == 3 and timeout > 0
        return [ref for ref in refs if ref[0].global_steps is not None], []

    monkeypatch.setattr(health.ray, "wait", wait)
    monkeypatch.setattr(health.ray, "get", lambda ref: ref[1](ref[0]))
    watch = UpdateWatch(servers, 5, 60.0, lambda: now[0])
    now[0] = 69.0
    watch()
    now[0] = 70.0
    with pytest.raises(UpdateStuck, match=r"step 5 .* for 60 s \(war.fault.update_timeout_s\); replicas .*: b, c\."):
        watch()
    UpdateWatch(servers, 5, 0.0, lambda: 1e9)()


def test_requests_before_an_engine_are_counted_where_they_were_handed_over(monkeypatch):
    busy, starting, silent = Replica(1), Replica(1), Replica(None)
    busy.engine = SimpleNamespace(output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 3))

    def wait(refs, num_returns, timeout):
        return [ref for ref in refs if ref[0].global_steps is not None], []

    monkeypatch.setattr(health.ray, "wait", wait)
    monkeypatch.setattr(health.ray, "get", lambda ref: ref[1](ref[0]))
    counts = unfinished_requests({"busy": busy, "starting": starting, "silent": silent}, 5.0)
    assert counts == {"busy": 3, "starting": 0, "silent": 0}
