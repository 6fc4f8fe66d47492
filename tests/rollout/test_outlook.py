# SPDX-License-Identifier: Apache-2.0
"""How long a rollout still takes: 10 ms a token alone, 1 ms more for each other turn, trajectories of 100 tokens."""

from __future__ import annotations

import pytest

from war_rl.config import SchedulerConfig
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

CONFIG = SchedulerConfig(prior_decode_ms=10.0, prior_interference_ms=1.0, idle_prior_s=2.0)


def turn(uid: str, number: int = 0, validate: bool = False, step: int = 1) -> TurnRequest:
    return TurnRequest(f"{uid}/{number}", TrajectoryId(uid, 0, step, validate=validate), number, 16)


def start(scheduler: GlobalScheduler, request: TurnRequest, now: float = 0.0) -> None:
    scheduler.submit(request, now)
    for placement in scheduler.decide(now):
        scheduler.reserve(placement, now)


def play(scheduler: GlobalScheduler, uid: str, turns: int = 1, validate: bool = False) -> None:
    """A whole trajectory in no time, which teaches lengths and no speeds."""
    for number in range(turns):
        request = turn(uid, number, validate)
        start(scheduler, request)
        scheduler.release(request.key, TurnResult(generated_tokens=100), 0.0)
    scheduler.finish(request.trajectory, 0.0)


def make(replicas: int = 2, max_running: int = 0) -> GlobalScheduler:
    scheduler = GlobalScheduler(CONFIG)
    for i in range(replicas):
        scheduler.add_replica(ReplicaInfo(f"r{i}", 0, 16, max_running=max_running), 0.0)
    return scheduler


def test_nothing_is_told_before_anything_is_known() -> None:
    scheduler = make()
    start(scheduler, turn("b"))
    assert scheduler.seconds_left(False, 2, 0.5) is None
    play(scheduler, "a")
    assert scheduler.seconds_left(False, 1, 0.5) is not None
    assert scheduler.seconds_left(True, 1, 0.5) is None  # of validation nothing is known
    for name in ("r0", "r1"):
        scheduler.drain_replica(name, 1.0)
    assert scheduler.seconds_left(False, 1, 1.0) is None


def test_the_time_runs_down_and_not_below_zero() -> None:
    scheduler = make()
    play(scheduler, "a")
    start(scheduler, turn("b"))
    left = [scheduler.seconds_left(False, 1, now) for now in (0.0, 0.4, 0.9, 50.0)]
    assert left == pytest.approx([1.0, 0.6, 0.1, 0.0])


def test_trajectories_that_have_not_begun_are_work_for_all_replicas() -> None:
    scheduler = make()
    play(scheduler, "a")
    start(scheduler, turn("b"))
    # 100 tokens of its own and 200 of those to come, three at a time at 12 ms.
    assert scheduler.seconds_left(False, 5, 0.0) == pytest.approx(300 * 0.012 / 3)
    scheduler = make(max_running=1)
    play(scheduler, "a")
    start(scheduler, turn("b"))
    assert scheduler.seconds_left(False, 5, 0.0) == pytest.approx(300 * 0.010)


def test_tools_take_their_time() -> None:
    scheduler = make(1)
    play(scheduler, "a", turns=2)
    request = turn("b")
    start(scheduler, request)
    gap = scheduler.tool_seconds
    assert scheduler.seconds_left(False, 1, 0.0) == pytest.approx(2.0 + gap)
    scheduler.release(request.key, TurnResult(generated_tokens=100), 0.0)
    assert scheduler.seconds_left(False, 1, 0.5) == pytest.approx(1.0 + gap - 0.5)


def test_trajectories_of_an_earlier_step_do_not_count() -> None:
    scheduler = make(1)
    play(scheduler, "a")
    start(scheduler, turn("forgotten", step=0))
    scheduler.release("forgotten/0", TurnResult(generated_tokens=1), 0.0)
    assert scheduler.seconds_left(False, 0, 0.0) == pytest.approx(99 * 0.010 + scheduler.tool_seconds)
    start(scheduler, turn("b"))
    assert scheduler.seconds_left(False, 1, 0.0) == pytest.approx(1.0)
