# SPDX-License-Identifier: Apache-2.0
"""The closed loop against a client that has no engine behind it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.bench.driver import Replay, ReplayError, Sampling, replay, turn_counters, work_of
from war_rl.traces.workload import WorkItem, WorkTurn
from war_rl.trainers.verl.context import CURRENT_EPISODE
from war_rl.types import FeedItem, TrajectoryId, TurnRecord


def tokens(*values: int) -> Any:
    return np.array(values, np.int32)


def item(session: int = 0, turns: int = 2, tool_seconds: float = 0.0) -> WorkItem:
    base = 100 * session
    made = tuple(
        WorkTurn(tokens(base + 10 * t + 1, base + 10 * t + 2), tokens(base + 10 * t + 5), tool_seconds)
        for t in range(turns - 1)
    )
    last = WorkTurn(tokens(base + 98, base + 99), tokens(), 0.0)
    return WorkItem(TrajectoryId("g", session, 0, "g"), f"trace-{session}", tokens(base + 7, base + 8), (*made, last))


class FakeClient:
    """Answers with what was forced, after some turns of the loop, and records turns as the real clients do."""

    def __init__(self, wrong: list[int] | None = None, fails: bool = False) -> None:
        self.requests: list[tuple[str, list[int], dict[str, Any], TrajectoryId]] = []
        self.running = self.most = 0
        self._wrong, self._fails = wrong, fails

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        episode = CURRENT_EPISODE.get()
        assert episode is not None
        self.requests.append((request_id, prompt_ids, sampling_params, episode.trajectory))
        number = len(self.requests)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(3):
            await asyncio.sleep(0)
        self.running -= 1
        if self._fails and number == 1:
            raise RuntimeError("the engine died")
        extra = sampling_params.get("extra_args") or {"war_forced": [5] * sampling_params["max_tokens"]}
        out = list(self._wrong or extra["war_forced"])
        replica = f"r{episode.trajectory.session % 2}"
        episode.record.turns.append(
            TurnRecord(
                episode.next_turn(), replica, len(prompt_ids), 4, len(out), started=1.0, queue_seconds=0.5, seconds=2.0
            )
        )
        return SimpleNamespace(token_ids=out)


class FakeWarClient(FakeClient):
    def __init__(self) -> None:
        super().__init__()
        self.published: list[FeedItem] = []
        self.publisher = SimpleNamespace(publish=self.published.append)
        self.finished: list[TrajectoryId] = []

    def finish_trajectory(self, trajectory: TrajectoryId) -> None:
        self.finished.append(trajectory)


def play(client: FakeClient, items: list[WorkItem], at_once: int | None = None, **sampling: Any) -> Replay:
    state = Replay(len(items))
    asyncio.run(replay(client, items, Sampling(**sampling), step=3, at_once=at_once, state=state))
    return state


def test_each_turn_sends_all_text_so_far() -> None:
    client = FakeClient()
    state = play(client, [item()])
    assert [prompt for _, prompt, _, _ in client.requests] == [[7, 8], [7, 8, 1, 2, 5]]
    assert [params["extra_args"]["war_forced"] for _, _, params, _ in client.requests] == [[1, 2], [98, 99]]
    assert all(params["max_tokens"] == 2 and params["ignore_eos"] for _, _, params, _ in client.requests)
    assert len({request_id for request_id, _, _, _ in client.requests}) == 1
    assert state.seconds > 0 and state.records[0].response_tokens == 5


def test_work_and_turn_counters() -> None:
    state = play(FakeClient(), [item(0), item(1), item(2)])
    work = work_of(state.records)
    assert (work.turns, work.generated_tokens, work.requested_prompt_tokens) == (6, 12, 21)
    assert work.requested_prompt_tokens == sum(item(i).requested_prompt_tokens for i in range(3))
    counters = turn_counters(state.records, ["r0", "r1", "r2"])
    # 8, 4 and 0 tokens on the three replicas.
    assert counters["replica_imbalance"] == pytest.approx(2.0)
    assert counters["prefill_cached_tokens"] == 24 and counters["prefill_computed_tokens"] == -3
    assert counters["longest_trajectory_seconds"] == 2.5


def test_unreported_cached_tokens_are_left_out() -> None:
    state = play(FakeClient(), [item()])
    state.records[0].turns[0].cached_tokens = None
    assert "prefill_cached_tokens" not in turn_counters(state.records, ["r0"])


@given(count=st.integers(1, 9), at_once=st.one_of(st.none(), st.integers(1, 12)))
def test_never_more_under_way_than_allowed_and_as_many_as_possible(count: int, at_once: int | None) -> None:
    client = FakeClient()
    state = play(client, [item(i) for i in range(count)], at_once)
    assert client.most == min(count, at_once or count)
    assert sorted(r.trajectory.session for r in state.records) == list(range(count))
    assert not state.running


def test_identities_differ_from_run_to_run() -> None:
    client = FakeClient()
    play(client, [item()])
    identity = client.requests[0][3]
    assert (identity.uid, identity.index, identity.step) == ("g@3", "g@3", 3)


def test_forced_tokens_must_come_back() -> None:
    with pytest.raises(ReplayError, match="trace-0, turn 0: token 1 came back as 9, recorded is 2"):
        play(FakeClient(wrong=[1, 9]), [item()])
    with pytest.raises(ReplayError, match="2 tokens were asked for, 1 came back"):
        play(FakeClient(wrong=[1]), [item()], forced=False)


def test_free_mode_continues_with_the_models_own_tokens() -> None:
    client = FakeClient()
    play(client, [item()], forced=False, temperature=0.5)
    assert client.requests[1][1] == [7, 8, 5, 5, 5]
    assert "extra_args" not in client.requests[0][2] and client.requests[0][2]["temperature"] == 0.5


def test_a_failure_stops_everything_and_comes_out() -> None:
    client = FakeClient(fails=True)
    with pytest.raises(RuntimeError, match="the engine died"):
        play(client, [item(i) for i in range(6)], at_once=2)
    # Of the twelve turns, the two that were under way, and one sent before the failure was seen.
    assert len(client.requests) <= 3 and CURRENT_EPISODE.get() is None


def test_the_router_and_the_drafters_hear_of_every_end() -> None:
    client = FakeWarClient()
    play(client, [item(0), item(1)])
    assert sorted(t.session for t in client.finished) == [0, 1]
    assert all(piece.final for piece in client.published)
    assert client.published[0].tokens.tolist() == [7, 8, 1, 2, 5, 98, 99]


def test_tool_time_is_waited_and_recorded() -> None:
    state = play(FakeClient(), [item(turns=3, tool_seconds=0.01)])
    assert state.records[0].env_seconds == pytest.approx(0.02)
    assert state.seconds >= 0.02
