# SPDX-License-Identifier: Apache-2.0
"""The paged index against the reference: whatever happens to the text, a prediction follows a matching context."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from war_rl.spec.calibration import Calibration
from war_rl.spec.index import PAGE_BYTES, PagedIndex, ReferenceIndex
from war_rl.spec.kernels import LINKS, PAGE

NO_STOPS = np.zeros(0, np.int64)


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def predict(index: PagedIndex, slot: int, depth: int = 8, stops: np.ndarray = NO_STOPS) -> list[int]:
    found = index.predict([slot], [depth], Calibration().cells, stops, 0.0, depth)
    return found.tokens[0, : int(found.counts[0])].tolist()


class Texts(RuleBasedStateMachine):
    """Interleaved trajectories in a small alphabet, so that matches are many."""

    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.index = PagedIndex(4 << 20)
        self.reference = ReferenceIndex()
        self.open_slots: list[int] = []

    @rule(target=slots, scope=st.integers(2, 4))
    def open(self, scope: int) -> int:
        slot = self.index.open(scope, scope)
        self.reference.open(slot, scope)
        self.open_slots.append(slot)
        return slot

    @rule(slot=slots, data=st.lists(st.integers(0, 5), max_size=40), repeat=st.integers(1, 8))
    def append(self, slot: int, data: list[int], repeat: int) -> None:
        text = tokens(*(data * repeat))
        assert self.index.append(slot, text) == len(text)
        self.reference.append(slot, text)

    @rule(slot=slots, count=st.integers(1, 300))
    def publish(self, slot: int, count: int) -> None:
        self.index.publish(slot, count)
        self.reference.publish(slot, count)

    @rule(slot=slots, keep=st.floats(0, 1))
    def truncate(self, slot: int, keep: float) -> None:
        length = int(keep * self.index.length(slot))
        self.index.truncate(slot, length)
        self.reference.truncate(slot, length)

    @rule(slot=consumes(slots))
    def drop(self, slot: int) -> None:
        while self.index.drop(slot, 1):
            pass
        self.reference.drop(slot)
        self.open_slots.remove(slot)

    @rule()
    def maintain(self) -> None:
        self.index.maintain()

    @rule(slot=slots)
    def predictions_follow_a_match(self, slot: int) -> None:
        context = self.reference.read(slot)
        for token in predict(self.index, slot):
            assert token in self.reference.followers(slot, context)
            context.append(token)

    @invariant()
    def text_is_kept(self) -> None:
        for slot in self.open_slots:
            assert self.index.read(slot).tolist() == self.reference.read(slot)


TestTexts = Texts.TestCase
TestTexts.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_finds_the_longest_match_among_siblings() -> None:
    index = PagedIndex(4 << 20)
    for tail in ((7, 8, 9), (1, 1, 1), (2, 2, 2)):
        slot = index.open(5, 1)
        prefix = (10, 11, 12, 13) if tail == (7, 8, 9) else (20, 21, 12, 13)
        index.append(slot, tokens(*prefix, *tail))
    asking = index.open(5, 1)
    index.append(asking, tokens(10, 11, 12, 13))
    assert predict(index, asking, 3) == [7, 8, 9]


def test_other_prompts_see_text_only_once_published() -> None:
    index = PagedIndex(4 << 20)
    slot, asking = index.open(5, 1), index.open(6, 2)
    index.append(slot, tokens(1, 2, 3, 4, 5))
    index.append(asking, tokens(1, 2, 3))
    assert predict(index, asking, 2) == []
    index.publish(slot, 100)
    assert predict(index, asking, 2) == [4, 5]


def test_nothing_is_predicted_past_a_stop_token() -> None:
    index = PagedIndex(4 << 20)
    slot = index.open(5, 1)
    index.append(slot, tokens(1, 2, 3, 4, 5, 6, 1, 2))
    assert predict(index, slot, 4) == [3, 4, 5, 6]
    assert predict(index, slot, 4, np.array([4], np.int64)) == [3, 4]


def test_bytes_stay_below_the_bound_and_dropped_pages_come_back() -> None:
    bound = 2 << 20
    index = PagedIndex(bound)
    rng = np.random.default_rng(0)
    slot = index.open(5, 1)
    while index.append(slot, rng.integers(0, 9, 4096).astype(np.int32)) == 4096:
        while index.maintain():
            pass
        assert index.nbytes() <= bound
    assert index.nbytes() <= bound
    assert index.free_tokens() == 0
    filled = index.length(slot)
    while index.drop(slot, 3):
        pass
    assert index.free_tokens() == filled
    assert index.nbytes() + (filled // PAGE) * PAGE_BYTES <= bound


def test_growing_heads_lose_nothing() -> None:
    index = PagedIndex(64 << 20)
    rng = np.random.default_rng(1)
    text = rng.integers(0, 30_000, 40_000).astype(np.int32)
    slot = index.open(5, 1)
    for start in range(0, len(text), 500):
        index.append(slot, text[start : start + 500])
        index.maintain()
    for at in range(20, len(text) - 10, 997):
        asking = index.open(5, 2)
        index.append(asking, text[at - 10 : at])
        assert predict(index, asking, 3) == text[at : at + 3].tolist()
        index.drop(asking, 10)


def test_the_work_of_a_prediction_is_bounded() -> None:
    rng = np.random.default_rng(0)
    index = PagedIndex(8 << 20)
    for scope in range(8):
        slot = index.open(scope, 0)
        index.append(slot, rng.integers(0, 3, 2000).astype(np.int32))
        while index.publish(slot, 512):
            pass
    found = index.predict([slot], [60], Calibration().cells, NO_STOPS, 0.0, 60)
    # Everything has been seen before, in many places: without the bound each further token would look again.
    assert int(found.links[0]) == LINKS
