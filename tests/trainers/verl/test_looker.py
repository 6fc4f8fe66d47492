# SPDX-License-Identifier: Apache-2.0
"""Looks at a rollout, over workers, pages and a router that only answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.records import step_trace
from war_rl.progress import Progress
from war_rl.trainers.verl import looker as looker_module
from war_rl.trainers.verl.episodes import count_progress
from war_rl.trainers.verl.looker import Looker

SERVERS = ["a:1", "b:1"]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Router:
    """The router actor's handle, whose estimate is ten seconds."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.snapshot = SimpleNamespace(remote=lambda: {"running": {"a:1": 17, "b:1": 2}, "waiting": 3})
        self.seconds_left = SimpleNamespace(remote=self._left)

    def _left(self, *args: Any) -> float:
        self.asked.append(args)
        return 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(looker_module, "time", made)
    monkeypatch.setattr(looker_module, "ray", SimpleNamespace(get=lambda value, timeout=None: value))
    return made


def look(looker: Looker) -> Progress | None:
    """What the look shows that is due now."""
    assert looker.poll() is None
    if looker._pending is not None:
        looker._pending.exception()
    return looker.poll()


def workers() -> list[dict[str, Any]]:
    records = step_trace(trajectories=3).records
    records[0].turns[0].cached_tokens = None
    records[1].status, records[1].error = "failed", "why"
    return [count_progress(records[:2], records[2:]), count_progress([], [])]


def test_everything_that_can_be_known(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    pages: dict[str, dict[str, float]] = {}
    monkeypatch.setattr(looker_module, "read_gauges", lambda server, timeout_s: pages[server])
    router = Router()
    looker = Looker(SERVERS, router, workers, max_running=16)
    started = {"spec_decode_num_drafts": 50.0, "spec_decode_num_draft_tokens": 200.0}
    looker.begin(8, True, {"a:1": {**started, "spec_decode_num_accepted_tokens": 90.0}, "b:1": {}})
    pages["a:1"] = {"drafts": 60.0, "draft_tokens": 230.0, "accepted_tokens": 100.0}
    pages["b:1"] = {"drafts": 10.0, "draft_tokens": 20.0, "accepted_tokens": 10.0}
    assert looker.poll() is None and looker._pending is None  # half a second has not passed
    clock.now += 2.0
    state = look(looker)
    assert state is not None and router.asked == [(True, 6)]
    assert (state.finished, state.total, state.running, state.waiting, state.turns) == (2, 8, 1, 3, 9)
    assert state.elapsed == 2.0 and state.extra == {"failed": "1"}
    # Nine turns with prompts of 100, 200 and 300 tokens, of which 0, 90 and 180 were cached; one did not say.
    assert state.hit_rate == pytest.approx(3 * 270 / 1700)
    assert (state.acceptance_rate, state.acceptance_length) == (0.4, 2.0)
    assert state.regimes == {"replica0": "high", "replica1": "low(2)"} and state.seconds_left == 10.0
    # Pages and the estimate are not asked for at every look; the time left runs down meanwhile.
    pages.clear()
    clock.now += 1.0
    state = look(looker)
    assert state is not None and (state.acceptance_rate, state.seconds_left) == (0.4, 9.0) and len(router.asked) == 1
    clock.now += 0.5
    assert looker.poll() is None and looker._pending is None


def test_the_stock_rollout_has_no_router_and_no_drafts(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(looker_module, "read_gauges", lambda server, timeout_s: {"running": 1.0})
    looker = Looker(SERVERS, None, lambda: [count_progress([], [])], max_running=16)
    looker.begin(4, False, {"a:1": {}, "b:1": {}})
    clock.now += 1.0
    assert look(looker) == Progress(0, 4, 0, 1.0, running=0, turns=0)


def test_a_look_that_fails_is_told_once_and_stops_nothing(
    clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[dict[str, Any]]:
        raise RuntimeError("a worker died")

    looker = Looker(SERVERS, None, broken, max_running=16)
    looker.begin(4, False, {})
    for _ in range(3):
        clock.now += 2.0
        assert look(looker) is None
    assert caplog.text.count("a worker died") == 1
    looker.finish()


def test_a_page_that_does_not_come_leaves_the_rest(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def no_answer(server: str, timeout_s: float) -> dict[str, float]:
        raise OSError("timed out")

    monkeypatch.setattr(looker_module, "read_gauges", no_answer)
    looker = Looker(SERVERS, None, workers, max_running=16)
    looker.begin(8, False, {})
    clock.now += 1.0
    state = look(looker)
    assert state is not None and state.finished == 2 and state.acceptance_rate is None
