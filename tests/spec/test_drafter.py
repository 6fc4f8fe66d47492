# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from war_rl.config import SpecConfig
from war_rl.spec import kernels
from war_rl.spec.budget import FITTED_STEPS, Budget
from war_rl.spec.calibration import SAFE_PRIOR, Calibration
from war_rl.spec.drafter import Drafter, RequestView
from war_rl.spec.index import PagedIndex
from war_rl.steptime import CPU_TABLE, StepTable
from war_rl.types import FeedItem, TrajectoryId

STOP = 2


class Clock:
    """Every look costs a millisecond, so a slice ends after few looks."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def spec(policy: str = "war", **changes: object) -> SpecConfig:
    return dataclasses.replace(SpecConfig(), policy=policy, memory_mb=8, **changes)  # type: ignore[arg-type]


def make(policy: str = "war", tick: float = 0.0, **changes: object) -> Drafter:
    return Drafter(spec(policy, **changes), clock=Clock(tick), stop_token_ids=frozenset([STOP]), step_time=CPU_TABLE)


def trajectory(session: int = 0, uid: str = "g", step: int = 1, index: str = "7", validate: bool = False):
    return TrajectoryId(uid, session, step, index, validate)


def view(name: TrajectoryId | None, text: list[int], sampled: int = 1, key: str = "", **changes: object) -> RequestView:
    made = RequestView(key or str(name), name, np.array(text, np.int32), 1, sampled, True, 1000)
    for field, value in changes.items():
        setattr(made, field, value)
    return made


PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]


def test_drafts_from_own_text_and_counts_what_was_accepted() -> None:
    drafter = make()
    text = [1, *PHRASE, 5, *PHRASE[:4]]
    (draft,) = drafter.propose([view(trajectory(), text)])
    assert draft[:3] == PHRASE[4:7]
    drafter.propose([view(trajectory(), [*text, *PHRASE[4:6], 99], sampled=3)])
    counters = drafter.counters()
    assert counters["accepted_tokens"] == 2
    assert counters["draft_tokens"] >= counters["accepted_tokens"]
    assert counters["accepted_tokens_own"] == 2


def test_a_siblings_text_from_the_feed_is_draftable_and_never_entered_twice() -> None:
    drafter = make()
    item = FeedItem(trajectory(1), 0, np.array([1, *PHRASE], np.int32), True)
    drafter.feed([item, item])
    (draft,) = drafter.propose([view(trajectory(0), [1, *PHRASE[:3]])])
    (draft,) = drafter.propose([view(trajectory(0), [1, *PHRASE[:4]])])
    assert draft[:2] == PHRASE[4:6]
    assert drafter.counters()["feed_tokens"] == 9
    assert drafter.counters()["draft_tokens_fed"] >= len(draft)


def test_a_siblings_running_turn_is_draftable_token_by_token() -> None:
    drafter = make()
    other = [1, 500, 501, 502]
    for known in range(5, len(PHRASE) + 1):
        # The sibling is one token ahead within the same engine step, its turn far from over.
        ahead = view(trajectory(1), [1, *PHRASE[:known]])
        behind = view(trajectory(0), [*other, *PHRASE[: known - 1]])
        _, draft = drafter.propose([ahead, behind])
        assert draft[:1] == [PHRASE[known - 1]]
        assert drafter.explain(behind.key)[0] == ("group", known - 1)
    # Another prompt sees it only once the turn is over: then it is published, a slice per step.
    stranger = view(trajectory(0, uid="else", index="8"), [1, *PHRASE[:6]])
    assert drafter.propose([ahead, behind, stranger])[2] == []
    drafter.propose([stranger])
    assert drafter.propose([stranger])[0][:2] == PHRASE[6:8]


def test_text_that_ran_here_does_not_count_as_fed() -> None:
    drafter = make()
    drafter.propose([view(trajectory(1), [1, *PHRASE])])
    drafter.propose([])
    (draft,) = drafter.propose([view(trajectory(0), [1, *PHRASE[:4]])])
    assert draft[:2] == PHRASE[4:6]
    assert drafter.counters().get("draft_tokens_fed", 0) == 0


def test_a_trajectory_keeps_its_text_over_turns_and_rebuilds_when_it_differs() -> None:
    drafter = make()
    first = [1, *PHRASE, STOP]
    drafter.propose([view(trajectory(), first, key="turn0")])
    drafter.propose([])
    drafter.propose([view(trajectory(), [*first, 3, *PHRASE[:4]], key="turn1")])
    assert drafter.counters()["rebuilds"] == 0
    drafter.propose([])
    drafter.propose([view(trajectory(), [1, 9, 9, 9], key="turn2")])
    assert drafter.counters()["rebuilds"] == 1
    assert drafter.counters()["live_trees"] == 1


def test_what_must_not_be_drafted() -> None:
    text = [1, *PHRASE, 5, *PHRASE[:4]]
    off = make("off")
    assert off.propose([view(trajectory(), text)]) == [[]]
    drafter = make(max_running=1)
    assert drafter.propose([view(trajectory(), text), view(trajectory(1), text)]) == [[], []]
    assert make().propose([view(trajectory(), text, max_draft=2)])[0] == PHRASE[4:6]
    assert make().propose([view(trajectory(), text, max_draft=0)]) == [[]]
    assert make().propose([view(trajectory(), text, sampled=0)]) == [[]]
    unsupported = make()
    for _ in range(2):
        assert unsupported.propose([view(trajectory(), text, draftable=False)]) == [[]]
    assert unsupported.counters()["unsupported_requests"] == 1
    ended = [1, 11, 12, 13, 14, STOP, 4, 4, 11, 12, 13]
    assert make().propose([view(trajectory(), ended)])[0] == [14, STOP]


def test_groups_and_old_steps_leave() -> None:
    drafter = make(window_steps=1)
    for step in (1, 2, 3):
        drafter.feed([FeedItem(trajectory(0, uid=f"g{step}", step=step), 0, np.array(PHRASE, np.int32))])
    drafter.idle()
    assert drafter.counters()["live_trees"] == 3
    drafter.begin_step(3)
    assert drafter.counters()["live_trees"] == 2
    drafter.forget_group(trajectory(0, uid="g3", step=3).group)
    assert drafter.counters()["live_trees"] == 1


def test_an_earlier_epochs_text_of_the_prompt_is_a_source_of_its_own() -> None:
    drafter = make()
    drafter.feed([FeedItem(trajectory(0, uid="old", step=1), 0, np.array([1, *PHRASE], np.int32), True)])
    drafter.idle()
    drafter.begin_step(2)
    drafter.propose([view(trajectory(0, uid="new", step=2), [1, *PHRASE[:4]])])
    assert drafter.counters()["draft_tokens_prompt"] > 0


def test_long_text_is_taken_in_slices() -> None:
    drafter = make(tick=0.001, ingest_ms=2.0)
    text = list(range(1, 20_000))
    request = view(trajectory(), text)
    assert drafter.propose([request]) == [[]]
    looks = [drafter.propose([request]) for _ in range(200)]
    assert drafter.counters()["live_trees"] == 1
    assert drafter._running[request.key].entry.length == len(text)
    assert looks


def test_a_slice_that_is_used_up_at_once_still_moves_running_and_fed_text() -> None:
    drafter = make(tick=0.001, ingest_ms=0.1)
    request = view(trajectory(), list(range(1, 2_000)))
    fed = np.arange(3, 1_003, dtype=np.int32)
    drafter.feed([FeedItem(trajectory(0, uid="other"), 0, fed, True)])
    for _ in range(20):
        drafter.propose([request])
    assert drafter._running[request.key].entry.length == 1_999
    assert drafter.counters()["feed_tokens"] == len(fed)


def test_validation_is_counted_apart() -> None:
    drafter = make()
    drafter.propose([view(trajectory(validate=True), [1, *PHRASE, 5, *PHRASE[:4]])])
    counters = drafter.counters()
    assert counters["val/drafts"] == 1
    assert "drafts" not in counters


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_aborts_at_random_moments_leave_nothing_behind(data: st.DataObject) -> None:
    drafter = make(data.draw(st.sampled_from(["war", "budget"])), tick=data.draw(st.sampled_from([0.0, 0.001])))
    texts: dict[str, list[int]] = {}
    names: dict[str, TrajectoryId | None] = {}
    for number in range(data.draw(st.integers(1, 25))):
        for key in [k for k in texts if data.draw(st.booleans())]:
            del texts[key]
        key = f"r{number}"
        texts[key] = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=30))
        names[key] = trajectory(number) if number % 2 else None
        views = []
        for name, text in texts.items():
            fresh = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
            text.extend(fresh)
            views.append(view(names[name], text, sampled=len(fresh), key=name))
        drafts = drafter.propose(views)
        assert len(drafts) == len(views)
        for request, draft in zip(views, drafts, strict=True):
            assert STOP not in draft[:-1]
            assert len(draft) <= spec().max_draft_tokens
            assert request.draftable
    drafter.propose([])
    drafter.begin_step(100)
    while drafter.idle():
        pass
    counters = drafter.counters()
    assert counters["live_trees"] == 0
    assert counters["running"] == 0
    index = drafter._corpus.index
    assert index.free_tokens() == (index._pages - 1) * 256  # type: ignore[attr-defined]


def test_memory_is_bounded_and_the_oldest_step_leaves_first() -> None:
    drafter = Drafter(dataclasses.replace(spec(), memory_mb=2), clock=Clock())
    rng = np.random.default_rng(0)
    for step in range(1, 9):
        text = rng.integers(0, 1000, 6000).astype(np.int32)
        drafter.feed([FeedItem(trajectory(0, uid=f"g{step}", step=step), 0, text)])
        while drafter.idle():
            pass
        assert drafter.counters()["bytes"] <= 2 << 20
    kept = sorted(drafter._corpus._by_step)
    assert drafter.counters()["evicted_trajectories"] > 0
    assert kept == list(range(kept[0], 9))


# -- budget and calibration -----------------------------------------------------------------------------------------


def test_a_lone_straggler_is_drafted_hard_and_noise_is_not() -> None:
    budget = Budget()
    assert budget.choose([[0.95, 0.9, 0.85, 0.8, 0.7]], 1, 0, CPU_TABLE) == [5]
    assert Budget().choose([[0.04, 0.002]], 1, 0, CPU_TABLE) == [0]


def test_a_saturated_replica_does_not_draft_what_a_lone_request_would() -> None:
    saturated = StepTable({1: 0.02, 2: 0.04, 64: 1.28})
    reach = [[0.5, 0.3]] * 32
    assert Budget().choose(reach, 32, 0, saturated) == [0] * 32
    assert Budget().choose(reach[:1], 1, 0, CPU_TABLE)[0] > 0


FAST = StepTable({1: 0.01, 64: 0.016, 128: 0.024})
"""An accelerator: a step of 32 requests takes 13 ms, what predicting for them costs is no longer nothing."""


def looks(budget: Budget, running: int, table: StepTable, steps: int = 1000) -> int:
    """In how many of so many steps the budget asks for predictions that never pay."""
    count = 0
    for _ in range(steps):
        if not budget.asleep(running):
            count += 1
            budget.choose([[0.01]] * running, running, 0, table)
    return count


def test_nothing_gained_means_nothing_predicted_until_a_rare_look() -> None:
    budget = Budget()
    assert looks(budget, 32, FAST) < 80
    while budget.asleep(32):
        pass
    assert budget.choose([[0.9, 0.8]] * 32, 32, 0, FAST)[0] == 2


def test_how_rare_follows_from_what_a_look_costs() -> None:
    dear, cheap = Budget(), Budget()
    for _ in range(200):
        dear.looked(4, 4 * 1e-3)
        cheap.looked(4, 4 * 1e-6)
    assert looks(cheap, 4, FAST) == 1000
    assert looks(dear, 4, FAST) < 40
    # A look at the one request of a slow engine costs nothing worth saving.
    assert looks(Budget(), 1, CPU_TABLE) == 1000


def test_drafting_that_hardly_pays_goes_on_but_does_not_start() -> None:
    # 1.5 percent gain: below what starts drafting, above what ends it.
    flat = StepTable({1: 1.0, 2: 1.478})
    begun, idle = Budget(), Budget()
    assert idle.choose([[0.5]], 1, 0, flat) == [0]
    assert begun.choose([[0.9]], 1, 0, flat) == [1]
    assert begun.choose([[0.5]], 1, 0, flat) == [0]  # the long-run rate wants more than this
    begun._regimes[1].rate = 0.0
    assert begun.choose([[0.5]], 1, 0, flat) == [1]


class Jump(StepTable):
    """A step that verifies drafts takes half as long again, and a token nothing worth mentioning."""

    def __init__(self) -> None:
        super().__init__({1: 1.0, 101: 1.1})

    def seconds(self, tokens: float, kv_tokens: float = 0.0, verify: bool = False) -> float:
        return super().seconds(tokens) + 0.5 * verify


def test_what_a_verified_step_costs_by_itself_is_worth_paying_for_many_tokens_only() -> None:
    assert Budget().choose([[0.4]], 1, 0, Jump()) == [0]
    # None of them would pay alone: 1.4 tokens in 1.5 s. Once it is paid for, even an unlikely token is cheap.
    assert Budget().choose([[0.4, 0.3, 0.2, 0.1]], 1, 0, Jump()) == [4]


def test_the_choice_is_the_best_of_all_choices_at_its_own_rate() -> None:
    reach = [[0.9, 0.5, 0.1], [0.6, 0.3]]
    budget = Budget()
    for _ in range(2000):
        lengths = budget.choose(reach, 2, 0, CPU_TABLE)

    def rate(a: int, b: int) -> float:
        return (2 + sum(reach[0][:a]) + sum(reach[1][:b])) / CPU_TABLE.seconds(2 + a + b)

    best = max(rate(a, b) for a in range(4) for b in range(3))
    assert rate(*lengths) == pytest.approx(best, rel=0.01)


class Looks(PagedIndex):
    """Counts what is asked of it."""

    predictions = 0

    def predict(self, slots, *args):  # type: ignore[no-untyped-def]
        self.predictions += len(slots)
        return super().predict(slots, *args)


def looked_at(table: StepTable | None = None, **how: bool) -> tuple[Drafter, Looks]:
    index = Looks(8 << 20)
    drafter = Drafter(spec("budget"), index_factory=lambda _: index, clock=Clock(), step_time=table, **how)
    return drafter, index


def run(drafter: Drafter, texts: list[list[int]], steps: int, seconds: float | None = None) -> int:
    """Let the requests write their texts one token a step, from the fifth on; returns the tokens drafted."""
    drafted = 0
    for at in range(5, 5 + steps):
        views = [view(trajectory(i), text[:at]) for i, text in enumerate(texts)]
        drafted += sum(map(len, drafter.propose(views, seconds)))
    return drafted


def repeated(session: int, count: int = 400) -> list[int]:
    return [1, *[100 * session + token for token in PHRASE] * (count // len(PHRASE))]


def test_where_no_draft_could_pay_nothing_is_even_matched() -> None:
    saturated = StepTable({1: 0.02, 2: 0.04, 64: 1.28})
    drafter, index = looked_at(saturated)
    assert run(drafter, [repeated(i) for i in range(32)], 100) == 0
    assert index.predictions == 0
    assert drafter.counters()["steps_held_off"] == 100


def test_a_lone_straggler_is_drafted_to_the_limit() -> None:
    drafter, _ = looked_at(CPU_TABLE)
    run(drafter, [repeated(0)], 100)
    (draft,) = drafter.propose([view(trajectory(0), repeated(0)[:110])])
    assert len(draft) == SpecConfig().max_draft_tokens


def test_random_text_is_not_drafted_after_a_while() -> None:
    rng = np.random.default_rng(0)
    drafter, _ = looked_at(CPU_TABLE)
    texts = [rng.integers(3, 60, 1000).tolist() for _ in range(4)]
    run(drafter, texts, 300)
    assert run(drafter, [t[300:] for t in texts], 300) < 0.02 * 4 * 300


def test_an_unmeasured_machine_drafts_nothing_until_its_steps_were_measured() -> None:
    for trusted in (False, True):
        drafter, index = looked_at(None, trust_prior=trusted)
        early = run(drafter, [repeated(0)], FITTED_STEPS, 0.02)
        assert (early > 0) is trusted
        assert index.predictions > 0  # what is seen meanwhile teaches the calibration
        assert run(drafter, [repeated(0)], 100, 0.02) > 0
        assert drafter.counters().get("steps_unmeasured", 0) == (0 if trusted else FITTED_STEPS)


def test_the_best_chance_is_that_of_the_best_cell() -> None:
    calibration = Calibration()
    assert calibration.best() == pytest.approx(max(SAFE_PRIOR))
    three = kernels.CELLS_1 + kernels.CELLS_2 + 7 * kernels.SHARES * kernels.SOURCES * kernels.COUNTS * kernels.DEPTHS
    calibration.cells[three] = (1000.0, 1000.0)
    two = kernels.CELLS_1 + 7 * kernels.SHARES * kernels.SOURCES
    assert calibration.best() == pytest.approx(kernels.estimate(calibration.cells, 7, two, three))
    assert calibration.best() > 0.99


def test_the_correction_learns_what_tokens_say_and_best_bounds_it() -> None:
    calibration = Calibration()
    info = np.zeros((1, kernels.INFO), np.int64)
    chances = {}
    for _ in range(200):
        for token, came in ((5, 5), (6, 7)):  # alike in all but the token: one is always right, the other never
            info[0, :3] = 4, kernels.CELLS_1 + 4, kernels.CELLS_1 + kernels.CELLS_2 + 4
            kernels._features(info[0], token, 9, 1, 1, 0)
            p = kernels.estimate(calibration.cells, *(int(cell) for cell in info[0, :3]))
            chances[token] = kernels.corrected(calibration.cells, p, info[0])
            kernels.learn(calibration.cells, np.array([token], np.int32), info, 1, np.array([came], np.int32))
    assert 0.4 < p < 0.6
    assert chances[5] > 0.9 and chances[6] < 0.1
    assert calibration.best() >= chances[5]
    assert np.abs(calibration.cells[kernels.BIAS :, 0]).max() <= kernels.WEIGHT_BOUND


def test_calibration_learns_and_forgets_to_its_prior() -> None:
    drafter = make("budget")
    rng = np.random.default_rng(0)
    text = [1]
    before = drafter.calibration.chance(1)
    for _ in range(300):  # every token was seen before, none is predictable
        text.append(int(rng.integers(3, 60)))
        drafter.propose([view(trajectory(), text)])
    learned = drafter.calibration.chance(1)
    assert learned < 0.7 * before
    for _ in range(40):
        drafter.calibration.begin_step()
    assert drafter.calibration.chance(1) == pytest.approx(Calibration().chance(1), rel=0.01)


def test_a_fed_trajectory_larger_than_the_memory_does_not_evict_itself() -> None:
    drafter = Drafter(dataclasses.replace(spec(), memory_mb=1), clock=Clock())
    text = np.arange(30_000, dtype=np.int32)
    drafter.feed([FeedItem(trajectory(1), 0, text), FeedItem(trajectory(1), len(text), text)])
    while drafter.idle():
        pass
    counters = drafter.counters()
    assert counters["dropped_tokens"] > 0 and counters["bytes"] <= 1 << 20
    assert drafter.propose([view(trajectory(0), [5, 6, 7, 8])])[0] == []


def test_seconds_saved_are_what_the_same_tokens_cost_without_drafts_by_the_step_time_model() -> None:
    drafter = make(tick=0.0001)
    text = [1, *PHRASE, 5, *PHRASE[:4]]
    (draft,) = drafter.propose([view(trajectory(validate=True), text)], 0.023)
    drafter.propose([view(trajectory(validate=True), [*text, *PHRASE[4:6], 99], sampled=3)], 0.03)
    counters = drafter.counters()
    assert draft and "propose_seconds" not in counters and counters["val/propose_seconds"] > 0
    # Three tokens would have been three steps of one token each.
    expected = 3 * CPU_TABLE.seconds(1) - CPU_TABLE.seconds(1 + len(draft))
    assert counters["val/decode_seconds_saved"] == pytest.approx(expected)


def test_only_steps_in_which_every_request_decodes_teach_the_step_time_model() -> None:
    drafter = make("budget")
    a, b = [1, 2, 3], [4, 5, 6, 7]

    def step(*rows: tuple[int, list[int], int], sampled: int = 1, seconds: float = 0.02) -> int:
        """Rows of (session, text, prompt tokens); the last one sampled so many. Returns how often it has learned."""
        views = [view(trajectory(s), text, prompt_tokens=n) for s, text, n in rows]
        views[-1].sampled = sampled
        drafter.propose(views, seconds)
        return drafter.model.observations

    assert step((0, a, 2)) == 0  # its prompt was computed in this step, whose tokens nobody counted here
    assert step((0, [*a, 8], 2)) == 1
    # A second one comes: its prompt, of unknown share in the cache, is in the step.
    assert step((0, [*a, 8, 9], 2), (1, b, 3), seconds=0.5) == 1
    assert step((0, [*a, 8, 9, 10], 2), (1, [*b, 11], 3)) == 2
    # The first has ended; it was in no step since.
    assert step((1, [*b, 11, 12], 3)) == 3
    # A prompt that is computed in two pieces: neither piece is a decode step.
    assert step((1, [*b, 11, 12, 13], 3), (2, [1, 2], 4), sampled=0) == 3
    assert step((1, [*b, 11, 12, 13, 14], 3), (2, [1, 2, 3, 4, 5], 4)) == 3
    assert drafter.model.outliers == 0
