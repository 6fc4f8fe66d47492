# SPDX-License-Identifier: Apache-2.0
"""Closed loop in virtual time: an engine whose steps take what a table says, and a drafter that must not slow it down.

The drafter sees measured step times only, as in an engine. Time is virtual, so nothing here depends on the machine.
The 3 percent that are allowed are what learning costs: some tens of drafts until chances and step times are known; half
a percent more where not even the prior of the step times is trusted, because what verifying costs by itself and what
each token costs must be told apart.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from war_rl.config import SpecConfig
from war_rl.spec.drafter import Drafter, RequestView
from war_rl.steptime import CPU_TABLE, StepTable
from war_rl.types import TrajectoryId

SATURATED = StepTable({1: 0.01, 2: 0.02, 4096: 40.96})
"""Every token costs as much as the one before."""
GPU = StepTable({1: 0.012, 64: 0.014, 256: 0.024, 4096: 0.36})
"""Nearly free up to 64 tokens, then compute-bound."""


def virtual_seconds(table: StepTable, texts: list[np.ndarray], policy: str = "budget", trusted: bool = True) -> float:
    """Virtual time until all requests have written their texts, at once; a finished one leaves."""
    spec = dataclasses.replace(SpecConfig(), policy=policy, memory_mb=16)
    drafter = Drafter(spec, clock=lambda: 0.0, trust_prior=trusted)
    at = [1] * len(texts)
    drafts: dict[int, list[int]] = {}
    total, seconds = 0.0, None
    while True:
        running = [i for i in range(len(texts)) if at[i] < len(texts[i])]
        if not running:
            return total
        seconds = table.seconds(len(running) + sum(len(drafts.get(i, ())) for i in running))
        total += seconds
        views = []
        for i in running:
            draft, text = drafts.get(i, []), texts[i]
            right = 0
            while right < len(draft) and at[i] + right < len(text) and draft[right] == text[at[i] + right]:
                right += 1
            came = min(right + 1, len(text) - at[i])
            at[i] += came
            name = TrajectoryId(f"g{i}", 0, 1, str(i))
            views.append(RequestView(str(i), name, text[: at[i]], 1, came, True, len(text) - at[i]))
        drafts = dict(zip(running, drafter.propose(views, seconds), strict=True))


def repetitive(seed: int, count: int = 800) -> np.ndarray:
    """Phrases of its own, in changing order."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(3, 20_000, 12) for _ in range(4)]
    return np.concatenate([phrases[int(rng.integers(4))] for _ in range(count // 12)]).astype(np.int32)


def noise(seed: int, count: int = 800) -> np.ndarray:
    """Tokens of a small vocabulary: all have been seen before, none follows from what came."""
    return np.random.default_rng(seed).integers(3, 40, count).astype(np.int32)


def ratio(table: StepTable, texts: list[np.ndarray], trusted: bool = True) -> float:
    return virtual_seconds(table, texts, trusted=trusted) / virtual_seconds(table, texts, "off")


@pytest.mark.parametrize(
    ("table", "requests", "trusted"),
    [(SATURATED, 16, True), (CPU_TABLE, 1, True), (CPU_TABLE, 16, True), (GPU, 1, False), (GPU, 16, False)],
)
def test_random_text_is_as_fast_as_without_drafting(table: StepTable, requests: int, trusted: bool) -> None:
    assert ratio(table, [noise(i) for i in range(requests)], trusted) < 1.03


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("requests", [4, 16])
def test_a_saturated_replica_is_not_slowed_down(requests: int, trusted: bool) -> None:
    assert ratio(SATURATED, [repetitive(i) for i in range(requests)], trusted) < (1.03 if trusted else 1.035)


@pytest.mark.parametrize(("table", "bound"), [(CPU_TABLE, 0.5), (GPU, 0.25)])
def test_a_lone_straggler_is_much_faster(table: StepTable, bound: float) -> None:
    assert ratio(table, [repetitive(0)]) < bound


def test_the_tail_of_a_full_replica_is_drafted_although_its_bulk_was_noise() -> None:
    bulk = [noise(i, 200) for i in range(23)]
    alone = np.concatenate([noise(99, 200), repetitive(0)])
    assert ratio(CPU_TABLE, [*bulk, alone]) < 0.8
