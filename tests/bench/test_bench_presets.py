# SPDX-License-Identifier: Apache-2.0
"""Presets, their flags, and the KV cache they give a replica."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.bench.presets import PRESETS, Settings, add_flags, make_settings, plan_kv, settings_from_args
from war_rl.traces.synthetic import SyntheticTokens
from war_rl.traces.workload import WorkItem, build_workload


def parse(*flags: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    parser.add_argument("--json")
    return settings_from_args(parser.parse_args([*flags, "--json", "x"]))


def items(settings: Settings) -> list[WorkItem]:
    traces = settings.no_repeat(SyntheticTokens(0, 40_000, settings.seed))
    return build_workload(traces, settings.workload_spec()).items


@pytest.mark.parametrize("name", PRESETS)
def test_every_field_of_every_preset_has_a_flag(name: str) -> None:
    preset = make_settings(name, packaged=True)
    assert parse("--preset", name) == preset
    changed = {"source": "no-repeat", "mode": "free", "tool_seconds": "0.5x"}
    for item in dataclasses.fields(Settings):
        value = changed.get(item.name, "7")
        flag = "--" + item.name.replace("_", "-")
        got = parse("--preset", name, flag, value)
        assert str(getattr(got, item.name)) in (value, "7.0")
        assert dataclasses.replace(got, **{item.name: getattr(preset, item.name)}) == preset


def test_what_each_preset_is() -> None:
    assert (make_settings("low-load").concurrency, make_settings("low-load").n) == (1, 4)
    assert 1 / 4 <= (make_settings("high-load").kv_share or 0) <= 1 / 3
    assert make_settings("mixed").kv_share == 0.5
    assert make_settings("no-repeat").source == "no-repeat"
    assert (make_settings("fits-in-cache").kv_share or 0) > 1
    assert all(settings.mode == "forced" and settings.replicas == 2 for _, settings in PRESETS.values())


def test_zero_takes_a_limit_away() -> None:
    settings = parse("--preset", "high-load", "--kv-share", "0", "--max-context", "0", "--groups", "0", "--n", "0")
    assert (settings.kv_share, settings.max_context, settings.groups, settings.n) == (None, None, None, None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"mode": "fast"}, "--mode fast: not one of forced, free"),
        ({"source": "x"}, "--source x: not one of"),
        ({"tool_seconds": "soon"}, "--tool-seconds soon"),
        ({"replicas": 0}, "--replicas 0: must be at least 1"),
        ({"kv_share": -1}, "--kv-share -1: must not be negative"),
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"concurency": 1}, "unknown setting concurency; did you mean concurrency"),
    ],
)
def test_values_that_cannot_work_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_settings("mixed", overrides)


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="--preset heavy: not one of low-load, high-load"):
        make_settings("heavy")


def test_kv_share_sets_the_pressure() -> None:
    settings = make_settings("no-repeat", {"kv_share": 0.25, "groups": 16})
    plan = plan_kv(settings, items(settings))
    # 16 trajectories of 256 + 4*64 + 3*64 = 704 tokens, nothing shared; a quarter over two replicas.
    assert (plan.working_set, plan.kv_tokens, plan.raised) == (16 * 704, 16 * 704 // 8, False)
    assert plan.pressure == 4.0


def test_a_cache_smaller_than_one_trajectory_is_raised_and_said_so_or_refused() -> None:
    settings = make_settings("no-repeat", {"kv_share": 0.01})
    plan = plan_kv(settings, items(settings))
    assert (plan.kv_tokens, plan.raised) == (704 + 16, True)
    with pytest.raises(ValueError, match="the longest trajectory needs 720"):
        plan_kv(dataclasses.replace(settings, kv_tokens=719), items(settings))
    assert plan_kv(dataclasses.replace(settings, kv_tokens=735), items(settings)).kv_tokens == 720


def test_without_a_share_the_engine_decides() -> None:
    settings = make_settings("no-repeat", {"kv_share": 0.0})
    assert plan_kv(settings, items(settings)).kv_tokens is None


@given(share=st.floats(0.01, 3), block=st.sampled_from([1, 16, 128]), replicas=st.integers(1, 4))
def test_the_cache_always_holds_the_longest_trajectory(share: float, block: int, replicas: int) -> None:
    settings = make_settings("no-repeat", {"kv_share": share, "block_size": block, "replicas": replicas, "groups": 3})
    work = items(settings)
    plan = plan_kv(settings, work)
    assert plan.kv_tokens is not None and plan.kv_tokens % block == 0
    assert plan.kv_tokens > max(len(item.tokens()) for item in work)
    if not plan.raised:
        assert plan.kv_tokens * replicas >= share * plan.working_set - replicas
