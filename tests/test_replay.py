# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from war_rl.config import SpecConfig
from war_rl.replay import parse_table, replay
from war_rl.traces.workload import WorkItem, WorkTurn
from war_rl.types import TrajectoryId

SPEC = dataclasses.replace(SpecConfig(), policy="budget", memory_mb=8)


def item(uid: str, session: int, turns: list[np.ndarray]) -> WorkItem:
    prompt = np.arange(1, 30, dtype=np.int32)
    env = np.array([40, 41, 42], np.int32)
    made = tuple(WorkTurn(turn, env if i + 1 < len(turns) else env[:0], 0.0) for i, turn in enumerate(turns))
    return WorkItem(TrajectoryId(uid, session, 0, uid), f"{uid}{session}", prompt, made)


def work(rng: np.random.Generator, alike: bool) -> list[WorkItem]:
    items = []
    for group in range(3):
        shared = [rng.integers(100, 20_000, 60).astype(np.int32) for _ in range(3)]
        for session in range(3):
            own = [rng.integers(100, 20_000, 60).astype(np.int32) for _ in range(3)]
            # Siblings that never part have nothing to copy: each later one first writes something of its own.
            late = [rng.integers(100, 20_000, 70 * session).astype(np.int32)] if session else []
            items.append(item(f"g{group}", session, late + shared if alike else own))
    return items


@pytest.mark.parametrize("concurrency", [1, 3])
def test_siblings_that_write_the_same_are_sped_up(concurrency: int) -> None:
    items = work(np.random.default_rng(0), alike=True)
    figures = replay(items, ("war", "oracle"), spec=SPEC, concurrency=concurrency, exact_step_time=True)
    war, oracle = figures["sides"]["war"], figures["sides"]["oracle"]
    assert war["modelled_speedup"] > 1.0
    # Not an upper bound: the oracle follows one occurrence to its end, war may go on with another.
    assert oracle["modelled_speedup"] > 0.9 * war["modelled_speedup"]
    assert war["by_source"]["group"]["accepted"] > 0
    assert json.dumps(figures)


def test_text_without_repetition_costs_nothing() -> None:
    items = work(np.random.default_rng(1), alike=False)
    war = replay(items, ("war",), spec=SPEC, exact_step_time=True)["sides"]["war"]
    assert 0.97 <= war["modelled_speedup"] <= 1.01


def test_off_commits_one_token_a_step() -> None:
    items = work(np.random.default_rng(2), alike=True)
    war = replay(items, ("war",), spec=dataclasses.replace(SPEC, policy="off"))["sides"]["war"]
    assert war["committed_tokens_per_step"] == 1.0
    assert war["modelled_speedup"] == pytest.approx(1.0)


def test_every_token_is_committed_once_whatever_is_drafted() -> None:
    items = work(np.random.default_rng(3), alike=True)
    figures = replay(items, ("war", "oracle"), spec=SPEC)
    turns = sum(len(i.turns) for i in items)
    for side in figures["sides"].values():
        committed = round(side["committed_tokens_per_step"] * side["steps"])
        assert committed == figures["generated_tokens"] - turns  # a turn's first token comes from prefill


def test_refusals() -> None:
    with pytest.raises(ValueError, match="sides are war, library, oracle"):
        replay(work(np.random.default_rng(0), True), ("best",))
    with pytest.raises(ValueError, match="--step-table"):
        parse_table("1-23")
    assert parse_table("1:23,32:80").seconds(1) == pytest.approx(0.023)
