# SPDX-License-Identifier: Apache-2.0
"""No engine step is held for longer than ``war.spec.ingest_ms`` by text that comes or goes: counted, not timed.

Every piece of work on the index advances a virtual clock by what such a piece takes at most; the drafter reads that
clock only. So the bound follows from how the work is cut, whatever machine runs the test. What one engine step commits
(at most 64 tokens for a request) is taken in at once: that is decoding's own work and is not sliced.
"""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import numpy as np
import pytest

from war_rl.config import SpecConfig
from war_rl.spec import corpus, kernels
from war_rl.spec.drafter import Drafter, RequestView
from war_rl.spec.index import PagedIndex
from war_rl.types import FeedItem, TrajectoryId

TOKEN_S = 3e-6
"""Entering one token into one scope's tables, at most; `war-rl bench drafter` measures about half of it for both."""
PAGE_S = 3e-6
PIECE_S = 2.5e-4
"""One piece of growing the tables."""
FAULT_S = 2e-5
"""Touching one new page of the system for the first time, on a virtual machine in a bad hour."""
COPIED_S = 5e-9
"""Comparing one token when a turn starts."""


class Metered(PagedIndex):
    """Advances ``now`` by the work it is asked for; ``own`` is the part that decoding itself needs."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.now = self.own = 0.0
        self.pieces: dict[str, float] = {}

    def _charge(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.pieces[name] = max(self.pieces.get(name, 0.0), seconds)

    def append(self, slot: int, tokens: Any) -> int:
        if len(tokens) > corpus.FEW_TOKENS:
            self._charge("append", TOKEN_S * len(tokens))
        else:
            self.own += TOKEN_S * len(tokens)
        return super().append(slot, tokens)

    def publish(self, slot: int, tokens: int) -> bool:
        self._charge("publish", TOKEN_S * tokens)
        return super().publish(slot, tokens)

    def drop(self, slot: int, pages: int) -> bool:
        before = self.free_tokens()
        more = super().drop(slot, pages)
        self._charge("drop", PAGE_S * (self.free_tokens() - before) / kernels.PAGE)
        return more

    def truncate(self, slot: int, length: int) -> None:
        self._charge("truncate", PAGE_S * max(0, self.length(slot) - length) / kernels.PAGE)
        super().truncate(slot, length)

    def read(self, slot: int) -> Any:
        self._charge("read", COPIED_S * self.length(slot))
        return super().read(slot)

    def maintain(self) -> bool:
        touched = self._touched
        worked = super().maintain()
        if worked:
            pages = max(0, self._touched - touched) * 4 / mmap.PAGESIZE
            self._charge("maintain", max(PIECE_S, FAULT_S * pages))
        return worked


def make(memory_mb: int) -> tuple[Drafter, Metered]:
    made: list[Metered] = []

    def factory(size: int) -> Metered:
        made.append(Metered(size))
        return made[-1]

    spec = dataclasses.replace(SpecConfig(), memory_mb=memory_mb, window_steps=1)
    drafter = Drafter(spec, index_factory=factory, clock=lambda: made[-1].now, trust_prior=True)
    return drafter, made[-1]


@pytest.mark.parametrize("memory_mb", [4, 64])
def test_no_step_is_held_longer_than_the_bound(memory_mb: int) -> None:
    rng = np.random.default_rng(0)
    drafter, index = make(memory_mb)
    bound = SpecConfig().ingest_ms / 1e3
    worst, taken = 0.0, 0.0
    running: dict[str, tuple[TrajectoryId, np.ndarray, int]] = {}
    for number in range(600):
        if number % 80 == 0:
            # A burst: long finished trajectories arrive, long prompts start all at once, a step begins.
            items = [TrajectoryId(f"f{number}-{i}", i, number // 200, str(i)) for i in range(2)]
            drafter.feed([FeedItem(t, 0, rng.integers(0, 5000, 8000).astype(np.int32), True) for t in items])
            for i in range(6):
                name = TrajectoryId(f"r{number}-{i % 3}", i, number // 200, str(i % 3))
                running[f"{number}-{i}"] = (name, rng.integers(0, 5000, 6000).astype(np.int32), 3000)
        views = []
        for key, (name, text, at) in list(running.items()):
            if at + 8 >= len(text) or rng.random() < 0.02:
                del running[key]  # finished or aborted: its text is published, or leaves
                continue
            running[key] = (name, text, at + 3)
            views.append(RequestView(key, name, text[: at + 3], 3000, 3, True, 100))
        before = index.now
        if number % 200 == 150:
            drafter.begin_step(number // 200 + 1)
            drafter.forget_group(TrajectoryId(f"r{number // 80 * 80}-0", 0, number // 200, "0").group)
        drafter.propose(views)
        worst, taken = max(worst, index.now - before), taken + index.now - before
    assert worst <= bound, (worst, index.pieces)
    assert taken > 0.1  # there was work for hundreds of slices
    assert set(index.pieces) >= {"append", "publish", "drop", "read"}
    assert max(index.pieces.values()) <= 0.25 * bound, index.pieces


def test_the_backlog_is_worked_off_while_idle_in_bounded_slices() -> None:
    drafter, index = make(64)
    text = np.arange(100_000, dtype=np.int32) % 4999
    drafter.feed([FeedItem(TrajectoryId("g", 0, 0), 0, text, True)])
    slices = 0
    more = True
    while more:
        before = index.now
        more = drafter.idle()
        slices += 1
        assert index.now - before <= SpecConfig().ingest_ms / 1e3
    assert index.length(next(iter(drafter._corpus._entries.values())).slot) == len(text)
    assert slices > 100
