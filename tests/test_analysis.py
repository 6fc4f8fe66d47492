# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.analysis import (
    MAX_NAMED_REPLICAS,
    TIME_KINDS,
    EngineSeconds,
    busy_seconds,
    estimated_speedup,
    recomputed_tokens,
    regime_shares,
    replica_values,
    time_split,
    turn_times,
)
from war_rl.types import TrajectoryId, TrajectoryRecord, TurnRecord


def turn(replica: str, started: float, seconds: float, queue: float = 0.0, **more: object) -> TurnRecord:
    base = {"turn": 0, "prompt_tokens": 100, "cached_tokens": 0, "generated_tokens": 10}
    return TurnRecord(replica=replica, started=started, queue_seconds=queue, seconds=seconds, **{**base, **more})  # type: ignore[arg-type]


def record(started: float, finished: float, *turns: TurnRecord, offset: float = 1000.0, env: float = 0.0):
    identity = TrajectoryId("g", 0, 1)
    return TrajectoryRecord(identity, started, finished, list(turns), env_seconds=env, clock_offset=offset)


# A rollout of 20 s from 1000 on. One trajectory uses all kinds of time; the other ends early.
LONG = record(1001.0, 1018.0, turn("a", 1.0, 5.0, queue=2.0), turn("a", 11.0, 4.0, queue=1.0), env=3.0)
SHORT = record(1000.0, 1004.0, turn("b", 0.0, 4.0))


def test_turn_times_are_unix_seconds() -> None:
    first, second = turn_times(LONG)
    assert (first.asked, first.began, first.ended) == (1001.0, 1003.0, 1008.0)
    assert (second.asked, second.began, second.ended) == (1011.0, 1012.0, 1016.0)


def test_without_an_offset_the_first_turn_begins_with_the_trajectory() -> None:
    other = record(50.0, 60.0, turn("a", 7.0, 1.0), turn("a", 9.0, 1.0), offset=0.0)
    assert [t.asked for t in turn_times(other)] == [50.0, 52.0]


def test_the_time_split_of_two_trajectories_by_hand() -> None:
    split = time_split([LONG, SHORT], 1000.0, 20.0, EngineSeconds(prefill=4.0, queue=1.0, drafting=1.3))
    # Engine time 5 + 4 + 4 = 13, of which 1 queueing and 4 prefill; the replicas were busy for 9 + 4 = 13 s, a tenth of
    # which went into drafts, and so a tenth of the 12 s that requests were being worked on.
    total = {kind: 2 * value for kind, value in split.items()}
    assert total == pytest.approx(
        {
            "dispatch": 1.0,
            "admission": 2.0,
            "queue": 1.0,
            "engine_queue": 1.0,
            "prefill": 4.0,
            "decode": 8.0 - 1.2,
            "drafting": 1.2,
            "env": 3.0,
            "other": 17.0 - 12.0 - 3.0,
            "idle_tail": 2.0 + 16.0,
        }
    )
    assert math.fsum(split.values()) == pytest.approx(20.0)


def test_without_the_engines_account_all_engine_time_is_decoding() -> None:
    split = time_split([LONG, SHORT], 1000.0, 20.0, EngineSeconds())
    assert split["decode"] == 6.5 and split["prefill"] == split["engine_queue"] == split["drafting"] == 0.0


@given(
    st.lists(
        st.tuples(
            st.floats(0, 50),
            st.floats(0, 50),
            st.floats(0, 30),
            st.lists(st.tuples(*[st.floats(0, 20)] * 3), max_size=4),
        ),
        min_size=1,
        max_size=6,
    ),
    st.floats(0.1, 60),
    st.tuples(st.floats(0, 1000), st.floats(0, 1000), st.floats(0, 1000)),
)
def test_the_time_split_always_adds_up_to_the_rollout(rows: list, seconds: float, engine: tuple) -> None:
    """Whatever the clocks, overlaps and engine counts say."""
    records = [
        record(s, s + life, *(turn("a", at, long, queue=q) for at, long, q in turns), offset=0.0, env=env)
        for s, life, env, turns in rows
    ]
    split = time_split(records, 0.0, seconds, EngineSeconds(*engine))
    assert set(split) == set(TIME_KINDS) and all(v >= -1e-9 for v in split.values())
    assert math.fsum(split.values()) == pytest.approx(seconds)


def test_regimes_by_hand() -> None:
    # Replica a: one turn from 0 to 4, three from 4 to 6 (limit 2), one to 8; b idles: 20 s of replica time in all.
    records = [record(1000, 1010, turn("a", 0.0, 8.0)), *(record(1000, 1010, turn("a", 4.0, 2.0)) for _ in range(2))]
    assert regime_shares(records, ["a", "b"], 10.0, 2) == pytest.approx({"low": 0.3, "high": 0.1, "idle": 0.6})
    assert regime_shares([], [], 10.0, 2) == {"low": 0.0, "high": 0.0, "idle": 0.0}


def test_a_turn_that_ends_when_the_next_begins_is_no_overlap() -> None:
    records = [record(1000, 1010, turn("a", 0.0, 5.0), turn("a", 5.0, 5.0))]
    assert regime_shares(records, ["a"], 10.0, 1)["high"] == 0.0 and busy_seconds(records) == {"a": 10.0}


def test_replicas_are_numbered_in_the_order_given_and_idle_ones_count() -> None:
    values = replica_values([LONG, SHORT], ["b", "c", "a"], 20.0)
    assert [values[f"replica/{i}/tokens_per_s"] for i in range(3)] == [0.5, 0.0, 1.0]
    assert values["replica/0/busy_share"] == 0.2 and values["replica/busy_share_min"] == 0.0
    assert (values["replica/tokens_per_s_min"], values["replica/tokens_per_s_max"]) == (0.0, 1.0)


def test_many_replicas_are_not_named() -> None:
    many = [f"r{i}" for i in range(MAX_NAMED_REPLICAS + 1)]
    assert set(replica_values([], many, 1.0)) == {
        "replica/tokens_per_s_min",
        "replica/tokens_per_s_max",
        "replica/busy_share_min",
    }


def test_recomputed_tokens_are_those_the_turn_before_had_computed() -> None:
    first = turn("a", 0, 1, prompt_tokens=100, generated_tokens=10)
    assert recomputed_tokens([first, turn("a", 2, 1, prompt_tokens=150, cached_tokens=96)]) == 13  # 109 known
    assert recomputed_tokens([first, turn("b", 2, 1, prompt_tokens=150, cached_tokens=0)]) == 109
    # A sibling's text may be cached beyond what this trajectory computed; a rewritten history is shorter.
    assert recomputed_tokens([first, turn("a", 2, 1, prompt_tokens=150, cached_tokens=128)]) == 0
    assert recomputed_tokens([first, turn("a", 2, 1, prompt_tokens=40, cached_tokens=16)]) == 24
    assert recomputed_tokens([first, turn("a", 2, 1, prompt_tokens=150, cached_tokens=None)]) == 0


def test_estimated_speedup_is_that_of_the_replica_that_would_have_ended_last() -> None:
    # a ends at 16 s, b at 4 s.
    assert estimated_speedup([LONG, SHORT], 1000.0, 20.0, {"a": 10.0, "b": 1.0}) == pytest.approx(1.5)
    assert estimated_speedup([LONG, SHORT], 1000.0, 20.0, {"b": 17.0}) == pytest.approx(1.25)
    assert estimated_speedup([LONG, SHORT], 1000.0, 20.0, {"a": -2.0}) == pytest.approx(0.9)
    assert estimated_speedup([LONG, SHORT], 1000.0, 20.0, {}) == 1.0
    assert estimated_speedup([], None, 0.0, {"a": 1.0}) == 1.0
