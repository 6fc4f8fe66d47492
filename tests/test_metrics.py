# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.metrics import add_up, delta, parse_prometheus, step_metrics, tail_seconds
from war_rl.metrics_registry import METRICS, markdown, missing, undocumented
from war_rl.types import TrajectoryId, TrajectoryRecord, TurnRecord

ROOT = Path(__file__).parent.parent


def turn(number: int, replica: str, prompt: int, cached: int | None, generated: int, **more: object) -> TurnRecord:
    base = {"started": 0.0, "queue_seconds": 0.5, "seconds": 1.0}
    return TurnRecord(number, replica, prompt, cached, generated, **{**base, **more})  # type: ignore[arg-type]


def record(session: int, turns: list[TurnRecord], finished: float = 1.0, **more: object) -> TrajectoryRecord:
    validate = bool(more.pop("validate", False))
    return TrajectoryRecord(TrajectoryId("g", session, 3, validate=validate), 0.0, finished, turns, **more)  # type: ignore[arg-type]


RECORDS = [
    record(0, [turn(0, "a", 10, 0, 5), turn(1, "a", 20, 16, 7)], 4.0, env_seconds=1.0),
    record(1, [turn(0, "b", 10, 8, 5), turn(1, "a", 20, None, 3, error="lost")], 9.0, status="failed", env_seconds=2.0),
    record(2, [turn(0, "b", 10, 8, 10)], 5.0, status="truncated"),
    record(3, [turn(0, "b", 99, 9, 99)], 7.0, validate=True),
]
ENGINE = {
    "spec_decode_num_drafts": 10.0,
    "spec_decode_num_draft_tokens": 40.0,
    "spec_decode_num_accepted_tokens": 15.0,
    "num_preemptions": 2.0,
    "prefix_cache_queries": 100.0,
    "prefix_cache_hits": 25.0,
}


def compute(**changes: object) -> dict[str, float]:
    args: dict[str, object] = {"seconds": 10.0, "engine": ENGINE, "sched": {}, "spec": {}, **changes}
    return step_metrics(RECORDS, **args)  # type: ignore[arg-type]


def test_sums_of_a_small_step_by_hand() -> None:
    m = compute()
    expected = {
        "rollout/tokens_per_s": 3.0,
        "rollout/seconds": 10.0,
        "rollout/trajectories": 3,
        "rollout/turns": 5,
        "rollout/turns_max": 2,
        "rollout/generated_tokens": 30,
        "rollout/failed": 1,
        "rollout/truncated": 1,
        "rollout/turn_errors": 1,
        "rollout/preemptions": 2,
        "rollout/tail_seconds": 4.0,
        "rollout/tail_share": 0.4,
        "rollout/trajectory_seconds_max": 9.0,
        "rollout/queue_seconds": 2.5,
        "cache/prompt_tokens": 70,
        "cache/cached_tokens": 32,
        "cache/computed_tokens": 38,
        "cache/hit_rate": 32 / 50,
        "cache/unreported_turns": 1,
        "cache/engine_hit_rate": 0.25,
        "spec/drafts": 10,
        "spec/acceptance_rate": 15 / 40,
        "spec/mean_acceptance_length": 2.5,
        "spec/wasted_tokens": 25,
        "sched/sticky_rate": 0.5,
        # a: 10+5, 4+7, 20+3 = 49; b: 2+5, 2+10 = 19
        "sched/replica_tokens_max_over_mean": 49 * 2 / 68,
        "env/seconds": 3.0,
        "env/seconds_max": 2.0,
    }
    assert {k: m[f"war/{k}"] for k in expected} == pytest.approx(expected)


def test_validation_is_kept_apart() -> None:
    spec = {"fed_tokens": 5.0, "val/fed_tokens": 7.0}
    train, val = compute(spec=spec), compute(spec=spec, validate=True)
    assert train["war/rollout/generated_tokens"] == 30 and train["war/spec/fed_tokens"] == 5
    assert val["war_val/rollout/generated_tokens"] == 99 and val["war_val/spec/fed_tokens"] == 7
    assert not [k for k in val if k.startswith("war/")] and not [k for k in train if k.startswith("war_val/")]


def test_scheduler_values_win_over_observed_ones_and_the_proposers_do_not_hide_the_engines() -> None:
    m = compute(sched={"sched/sticky_rate": 0.9, "migrations": 4.0}, spec={"drafts": 12.0, "tree/group/accepted": 3.0})
    assert m["war/sched/sticky_rate"] == 0.9 and m["war/sched/migrations"] == 4
    assert m["war/spec/drafts"] == 10 and m["war/spec/proposer_drafts"] == 12
    assert m["war/spec/tree/group/accepted"] == 3


def test_nothing_happened_gives_neutral_values() -> None:
    m = step_metrics([], seconds=0.0, engine={}, sched={}, spec={})
    ones = {"spec/mean_acceptance_length", "sched/sticky_rate", "sched/replica_tokens_max_over_mean"}
    ones |= {"spec/estimated_speedup"}
    assert m == {k: float(k.removeprefix("war/") in ones) for k in m}


counts = st.integers(0, 1000)
turns_st = st.builds(
    lambda i, replica, cached, extra, generated, known: turn(
        i, replica, cached + extra, cached if known else None, generated
    ),
    counts,
    st.sampled_from("abc"),
    counts,
    counts,
    counts,
    st.booleans(),
)


@given(st.lists(st.lists(turns_st, max_size=4), max_size=8), st.just(0.0) | st.floats(1e-6, 1e6))
def test_invariants(trajectories: list[list[TurnRecord]], seconds: float) -> None:
    records = [record(i, turns, float(i)) for i, turns in enumerate(trajectories)]
    m = step_metrics(records, seconds=seconds, engine={}, sched={}, spec={})
    assert all(math.isfinite(v) and isinstance(v, float) for v in m.values())
    assert m["war/cache/cached_tokens"] + m["war/cache/computed_tokens"] == m["war/cache/prompt_tokens"]
    assert 0 <= m["war/cache/hit_rate"] <= 1 and 0 <= m["war/sched/sticky_rate"] <= 1
    assert m["war/sched/replica_tokens_max_over_mean"] >= 1 - 1e-9
    assert not missing(m) and not undocumented(m)


@pytest.mark.parametrize(
    ("finished", "tail"),
    [([], 0), ([3], 0), ([1, 5], 4), ([9, 1, 2], 7), (list(range(1, 11)), 1), (list(range(1, 21)), 2)],
)
def test_tail_runs_from_ninety_percent_to_the_last(finished: list[float], tail: float) -> None:
    assert tail_seconds(finished) == tail


PAGE = """# HELP vllm:prefix_cache_queries_total q
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 20.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 4.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{le="+Inf"} 9.0
vllm:iteration_tokens_total_count 9.0
vllm:iteration_tokens_total_sum 90.0
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 5.0
"""


def test_prometheus_page_gives_vllm_counters_summed_over_labels() -> None:
    pytest.importorskip("prometheus_client")
    assert parse_prometheus(PAGE) == {"prefix_cache_queries": 120.0, "spec_decode_num_accepted_tokens_per_pos": 4.0}
    with pytest.raises(ValueError):
        parse_prometheus("vllm:x{ 3")


def test_what_prometheus_client_writes_is_read_back() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    counter = prometheus.Counter("vllm:num_preemptions", "d", ["engine"], registry=registry)
    counter.labels("0").inc(3)
    counter.labels("1").inc(4)
    assert parse_prometheus(prometheus.generate_latest(registry).decode()) == {"num_preemptions": 7.0}


def test_sums_of_the_two_histograms_that_split_the_time_are_read() -> None:
    page = """# TYPE vllm:request_prefill_time_seconds histogram
vllm:request_prefill_time_seconds_bucket{engine="0",le="+Inf"} 4.0
vllm:request_prefill_time_seconds_count{engine="0"} 4.0
vllm:request_prefill_time_seconds_sum{engine="0"} 1.5
vllm:request_prefill_time_seconds_sum{engine="1"} 2.0
"""
    assert parse_prometheus(page) == {"request_prefill_time_seconds": 3.5}


def test_acceptance_by_source_and_the_seconds_wasted() -> None:
    spec = {"draft_tokens_own": 8.0, "accepted_tokens_own": 6.0, "draft_tokens_group": 2.0, "step_per_token_s": 0.01}
    m = compute(spec={**spec, "accepted_tokens_group": 1.0, "draft_tokens_window": 0.0})
    assert m["war/spec/acceptance_rate_own"] == 0.75 and m["war/spec/acceptance_rate_group"] == 0.5
    assert "war/spec/acceptance_rate_window" not in m and "war/spec/acceptance_rate_prompt" not in m
    assert m["war/spec/wasted_seconds"] == pytest.approx(0.25)


def test_delta_survives_a_restarted_engine() -> None:
    assert delta({"a": 10, "b": 5}, {"a": 12, "b": 5, "c": 1}) == {"a": 2, "b": 0, "c": 1}
    # b went down, so a's 12 were all counted since the restart as well
    assert delta({"a": 10, "b": 5}, {"a": 12, "b": 1}) == {"a": 12, "b": 1}
    assert delta({"a": 10}, {}) == {}


def test_counters_add_up_over_replicas() -> None:
    assert add_up([{"a": 1.0}, {"a": 2.0, "b": 3.0}, {}]) == {"a": 3.0, "b": 3.0}


def test_the_documentation_is_what_the_registry_says() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == markdown(), "run: make docs"


def test_registry_names_are_unique_and_unknown_names_are_found() -> None:
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    assert undocumented(["war/rollout/secondz", "war_val/sched/new_thing", "actor/lr"]) == ["war/rollout/secondz"]
    assert "war_val/rollout/turns" in missing(["war/rollout/turns"], validate=True)


def test_only_what_is_wanted_of_a_page_is_parsed() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    seconds = prometheus.Histogram("vllm:request_queue_time_seconds", "vllm: bucket", ["engine"], registry=registry)
    odd = prometheus.Counter("vllm:generation_tokens", "two\nlines", ["model_name"], registry=registry)
    seconds.labels("0").observe(0.25)
    seconds.labels("1").observe(2.0)
    odd.labels('a "vllm:x_bucket{}"\nmodel').inc(7)
    page = prometheus.generate_latest(registry).decode()
    assert parse_prometheus(page) == {"request_queue_time_seconds": 2.25, "generation_tokens": 7.0}


def test_every_server_is_asked_and_an_error_comes_out() -> None:
    from war_rl.engine_page import ask_all

    servers = [f"s{i}" for i in range(40)]
    assert ask_all(servers, len) == {server: len(server) for server in servers}
    assert ask_all([], len) == {}
    with pytest.raises(KeyError):
        ask_all(servers, {"s0": 1}.__getitem__)
