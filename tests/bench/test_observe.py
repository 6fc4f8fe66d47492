# SPDX-License-Identifier: Apache-2.0
"""The trainer's observer around a benchmarked run, over servers and a router that only answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support.records import BEGAN, REPLICAS, step_trace
from war_rl.bench.driver import Replay
from war_rl.bench.observe import Players, SideObserver
from war_rl.bench.stats import COUNTERS
from war_rl.trace import read
from war_rl.trainers.verl import observer as observer_module


class Actor:
    """An actor handle: each call answers the next of its values, the last of them for ever."""

    def __init__(self, **answers: list[Any]) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        answers = self._answers[name]
        return SimpleNamespace(remote=lambda *args: answers.pop(0) if len(answers) > 1 else answers[0])


class Clock:
    """Ten seconds between a rollout's begin and its end, and none otherwise."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return BEGAN


def side(is_war: bool, **war: Any) -> Any:
    before = {"decode_seconds_saved": 40.0, "propose_seconds": 1.0}
    after = {"decode_seconds_saved": 42.0, "propose_seconds": 1.5}
    servers = {name: Actor(war_counters=[before, after]) for name in REPLICAS}
    router = Actor(take_step_stats=[{}])
    return SimpleNamespace(
        config=OmegaConf.create({"war": war}), is_war=is_war, servers=servers, router=router, client=object()
    )


def observe(
    monkeypatch: pytest.MonkeyPatch, folder: Path, is_war: bool = True, **war: Any
) -> tuple[dict[str, float], float | None]:
    clock = Clock()
    monkeypatch.setattr(observer_module, "time", clock)
    monkeypatch.setattr(observer_module, "ray", SimpleNamespace(get=lambda value, timeout=None: value))
    monkeypatch.setattr(observer_module, "_read_metrics", lambda server_id: {})
    state = Replay(4)

    async def main() -> tuple[dict[str, float], float | None]:
        observer = SideObserver(side(is_war, **war), folder, "off")
        await observer.begin("x", 7, state)
        state.records += step_trace(step=7).records
        clock.now += 10.0
        return await observer.end()

    return asyncio.run(main())


def test_a_run_leaves_a_trace_and_says_what_it_cost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counters, _ = observe(monkeypatch, tmp_path)
    assert set(counters) <= set(COUNTERS) and counters["traced_trajectories"] == 4
    assert counters["observer_seconds"] == counters["trace_seconds"] == 0.0
    (traced,) = read(tmp_path)
    assert (traced.step, traced.seconds, traced.total, len(traced.records)) == (7, 10.0, 4, 4)


def test_a_side_without_a_trace_writes_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counters, _ = observe(monkeypatch, tmp_path, trace="off")
    assert counters["traced_trajectories"] == 0 and list(tmp_path.iterdir()) == []


def test_a_side_that_drafts_says_what_that_brought(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Each replica saved 2 s and spent half a second on it: the last would have ended 1.5 s later than after 10 s.
    assert observe(monkeypatch, tmp_path)[1] == pytest.approx(1.15)
    assert observe(monkeypatch, tmp_path, spec={"policy": "off"})[1] is None
    assert observe(monkeypatch, tmp_path, is_war=False)[1] is None


def test_the_run_answers_as_agent_loop_workers_do() -> None:
    state = Replay(3)
    state.records += step_trace(trajectories=2).records
    state.running += step_trace(trajectories=1).records
    state.records[1].status = "failed"
    client = SimpleNamespace(
        publisher=SimpleNamespace(counters={"feed_items": 3.0}), link=SimpleNamespace(counters={"router_calls": 2.0})
    )
    players = Players(client, state)
    (progress,) = players.war_call("war_progress", timeout=1.0)
    # Nine turns of 20, 21 and 20 tokens, three of each.
    assert progress == {
        "finished": 2,
        "failed": 1,
        "running": 1,
        "turns": 9,
        "generated_tokens": 183,
        "prompt_tokens": 1800,
        "cached_tokens": 810,
        "errors": [],
    }
    assert players.war_call("war_client_counters") == [{"feed_items": 3.0, "router_calls": 2.0}]
    assert [len(part) for part in players.war_call("war_take_records", False)] == [2]
    assert players.war_call("war_take_records", False) == [[]]
