# SPDX-License-Identifier: Apache-2.0
"""Each policy against examples worked out by hand."""

import random
from collections import Counter
from dataclasses import replace
from zlib import crc32

import pytest

from war_rl.config import ConfigError, SchedulerConfig
from war_rl.rollout.context import PerTurnPolicy
from war_rl.rollout.policies.war import War
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

BLOCK = 16


def blocks(name, count):
    base = crc32(repr(name).encode()) << 24
    return tuple(base + i for i in range(count))


def make(policy, replicas=2, kv=100_000, seed=0, **config):
    scheduler = GlobalScheduler(SchedulerConfig(policy=policy, **config), seed=seed)
    for i in range(replicas):
        scheduler.add_replica(ReplicaInfo(f"r{i}", kv, BLOCK, max_running=512), 0.0)
    return scheduler


def turn(group, session, n=0, tokens=160, shared=None, max_tokens=100):
    """``shared`` blocks are the group's, the rest the trajectory's own; all of them by default."""
    total = tokens // BLOCK
    shared = total if shared is None else shared
    hashes = blocks(group, shared) + blocks((group, session), total)[shared:]
    trajectory = TrajectoryId(str(group), session, 1)
    return TurnRequest(f"{group}/{session}/{n}", trajectory, n, tokens, max_tokens, hashes)


def go(scheduler, now, *turns):
    """Submit one after the other, as they come; returns where each went, None for those that wait."""
    where = {}
    for request in turns:
        scheduler.submit(request, now)
        for p in scheduler.decide(now):
            scheduler.reserve(p, now)
            where[p.key] = p
    return [where[t.key].replica_id if t.key in where else None for t in turns]


def done(scheduler, request, now, generated=20, cached=0, seconds=1.0):
    scheduler.release(request.key, TurnResult(generated, cached, 0, seconds), now)
    out = scheduler.decide(now)
    for p in out:
        scheduler.reserve(p, now)
    return out


def retire(scheduler, request, now, generated=20):
    """The turn ends and with it its trajectory; what starts then."""
    scheduler.release(request.key, TurnResult(generated, 0, 0, 1.0), now)
    scheduler.finish(request.trajectory, now)
    out = scheduler.decide(now)
    for p in out:
        scheduler.reserve(p, now)
    return out


# ---- round_robin, sticky_least_inflight


@pytest.mark.parametrize("policy", ["round_robin", "cost", "war"])
def test_idle_ties_do_not_avalanche(policy):
    s = make(policy, replicas=4)
    seen = Counter()
    for i in range(40):
        request = turn(f"g{i}", 0)
        (where,) = go(s, float(i), request)
        seen[where] += 1
        done(s, request, i + 0.5)
        s.finish(request.trajectory, i + 0.6)
    assert set(seen.values()) == {10}


def test_sticky_least_inflight_breaks_ties_by_lot_and_stays():
    s = make("sticky_least_inflight", replicas=4, seed=3)
    seen = Counter()
    for i in range(200):
        request = turn(f"g{i}", 0)
        (where,) = go(s, float(i), request)
        seen[where] += 1
        done(s, request, i + 0.3)
        assert go(s, i + 0.5, turn(f"g{i}", 0, 1)) == [where]
        s.finish(request.trajectory, i + 0.6)
    assert min(seen.values()) > 25
    other = make("sticky_least_inflight", replicas=4, seed=4)
    assert go(other, 0.0, *(turn(f"g{i}", 0) for i in range(20))) != go(
        make("sticky_least_inflight", replicas=4, seed=3), 0.0, *(turn(f"g{i}", 0) for i in range(20))
    )


def test_sticky_least_inflight_counts_requests():
    s = make("sticky_least_inflight")
    (first,) = go(s, 0.0, turn("a", 0, tokens=16_000))
    (second,) = go(s, 0.0, turn("b", 0))
    assert {first, second} == {"r0", "r1"}


def test_round_robin_goes_round():
    s = make("round_robin", replicas=3)
    places = go(s, 0.0, *(turn("a", i, tokens=160 * (1 + i)) for i in range(6)))
    assert places[:3] == places[3:] and len(set(places[:3])) == 3


# ---- cache_aware (SGLang's documented thresholds)


def test_cache_aware_defaults_are_sglangs():
    c = SchedulerConfig()
    assert (c.cache_threshold, c.balance_abs_threshold, c.balance_rel_threshold) == (0.5, 32, 1.0001)


def test_cache_aware_follows_a_match_above_half_and_not_at_half():
    s = make("cache_aware")
    base = turn("a", 0, tokens=165)  # 10 blocks
    (home,) = go(s, 0.0, base)
    above = TurnRequest("x", TrajectoryId("x", 0, 1), 0, 310, 0, base.block_hashes + blocks("x", 9))
    assert go(s, 0.0, above) == [home]  # 160 of 310 tokens match
    s = make("cache_aware")
    (home,) = go(s, 0.0, base)
    at = TurnRequest("y", TrajectoryId("y", 0, 1), 0, 320, 0, base.block_hashes + blocks("y", 10))
    assert go(s, 0.0, at) != [home]  # exactly half: smallest tree


def test_cache_aware_balances_beyond_32_and_only_beyond():
    s = make("cache_aware")
    places = go(s, 0.0, *(turn("a", i, tokens=165, shared=10) for i in range(40)))
    # 33 follow the cache (difference 0..32 when they come), then the difference exceeds 32.
    assert places[:33] == [places[0]] * 33
    assert places[33] != places[0]


def test_cache_aware_is_not_sticky():
    s = make("cache_aware")
    first = turn("a", 0, tokens=165)
    go(s, 0.0, first)
    done(s, first, 1.0)
    s.weights_updated(2, 1.5)  # nothing cached anywhere
    go(s, 2.0, turn("b", 0, tokens=1600, shared=0))
    placed = s.explanations()
    (where,) = go(s, 2.0, turn("a", 0, 1, tokens=170))
    assert where is not None and placed == []
    reasons = s.take_step_stats(False)
    assert reasons["sched/reason/smallest_tree"] == 3 and "sched/reason/sticky" not in reasons


# ---- war (as published)


def test_war_below_threshold_is_least_request_and_sticky():
    s = make("war", war_threshold=100)
    a, b = turn("a", 0, tokens=16_000), turn("b", 0)
    pa, pb = go(s, 0.0, a, b)
    assert pa != pb
    done(s, a, 1.0)
    assert go(s, 2.0, turn("a", 0, 1)) == [pa]


def test_war_window_by_hand():
    policy = War(SchedulerConfig(war_window=16.0))

    class R:
        id, running, hit_rate = "r", 0, 1.0

    # Published: min(max(1, 16), 0 + 0) = 0 when idle: nothing could ever start. Made safe: 1.
    assert policy.window(R, queue=0, replicas=2) == 1
    # Published: 3 + 1/2 = 3.5, below the 4 that one more would need. Made safe: rounded up.
    R.running = 3
    assert policy.window(R, queue=1, replicas=2) == 4
    assert policy.window(R, queue=8, replicas=2) == 7
    assert policy.window(R, queue=800, replicas=2) == 16


@pytest.mark.parametrize(
    "published, hit, grows", [(False, 0.9, True), (False, 0.1, False), (True, 0.9, False), (True, 0.1, True)]
)
def test_war_window_direction(published, hit, grows):
    policy = War(SchedulerConfig(war_published_direction=published))

    class R:
        id, running, hit_rate = "r", 100, hit

    before = policy.window(R, 10_000, 1)
    for _ in range(64):
        policy.observe(R, 100, int(100 * hit))
    after = policy.window(R, 10_000, 1)
    assert (after > before) if grows else (after < before)
    assert after >= 1


def test_war_score_by_hand():
    policy = War(SchedulerConfig(war_wait_s=10.0))

    class Replica:
        id, running = "r", 3

    class Context:
        now = 20.0

        @staticmethod
        def group_turns(turn):
            return 6.0

        @staticmethod
        def cached(turn, replica):
            return 120

    class Turn:
        request, submitted = turn("g", 0, tokens=160), 11.0

    # Waited 9 s, below the threshold. T_group 6 of at most 8; 120 of 160 tokens cached; 3 running in a window of 4.
    expected = -100.0 * 6 / 8 + 10.0 * 120 / 160 - 1.0 * 3 / 4
    assert policy.score(Turn, Replica, 4, 8.0, Context) == pytest.approx(expected) == pytest.approx(-68.25)
    Turn.submitted = 9.9
    assert policy.score(Turn, Replica, 4, 8.0, Context) == pytest.approx(1000.0 + expected)


def test_war_starts_one_on_an_idle_replica_and_no_more_than_its_window():
    s = make("war", replicas=1, war_threshold=0, war_window=2.0)
    # Idle: the published window is 0. Then 2 run, the window is full, and the third waits for one to end.
    assert go(s, 0.0, turn("a", 0), turn("b", 0), turn("c", 0)) == ["r0", "r0", None]
    assert [p.key for p in done(s, turn("a", 0), 1.0)] == ["c/0/0"]


def test_war_group_turns_follow_the_published_average():
    s = make("war", progress_alpha=0.25, prior_turns=4.0)
    for session, turns in ((0, 8), (1, 2)):
        for k in range(turns):
            request = turn("g", session, k)
            go(s, 0.0, request)
            done(s, request, 0.1)
        s.finish(request.trajectory, 0.2)
    workload = s.progress.group_turns(turn("other", 0).trajectory.group)
    # The group starts from the workload's estimate, which the long trajectory had already raised above 4.
    first = s.progress.group_turns(turn("g", 0).trajectory.group)
    assert 0.75 * (0.25 * 8 + 0.75 * 4.0) + 0.25 * 2 <= first <= 0.75 * (0.25 * 8 + 0.75 * 4.5) + 0.25 * 2
    assert workload == pytest.approx(5.0, abs=0.2)  # the mean of both


def test_war_priority_order_waiting_then_turns_then_cache():
    s = make("war", replicas=1, war_threshold=0, war_window=1.0, war_wait_s=5.0, progress_alpha=1.0)
    for name, turns in (("long", 9), ("short", 2)):
        for k in range(turns):
            request = turn(name, 9, k)
            go(s, 0.0, request)
            done(s, request, 0.1)
        s.finish(TrajectoryId(name, 9, 1), 0.2)
    s.weights_updated(1, 0.3)
    busy = turn("busy", 0)
    assert go(s, 1.0, busy) == ["r0"]
    go(s, 1.0, turn("long", 0), turn("short", 0))
    (first,) = done(s, busy, 2.0)
    assert first.key == "short/0/0"  # few group turns first
    go(s, 6.0, turn("short", 1, tokens=176, shared=0))
    (second,) = done(s, turn("short", 0), 6.5)
    assert second.key == "long/0/0"  # waited for more than 5 s: before all that have not
    go(s, 7.0, turn("short", 2))  # its prompt is cached, that of short/1 is not
    (third,) = done(s, turn("long", 0), 7.5)
    assert third.key == "short/2/0"


def test_war_prefers_the_replica_with_fewer_requests_when_nothing_is_cached():
    s = make("war", replicas=2, war_threshold=0, war_window=50.0)
    assert Counter(go(s, 0.0, *(turn(f"g{i}", 0) for i in range(8)))) == {"r0": 4, "r1": 4}


# ---- cost


FLAT = {
    "prior_prefill_tokens_per_s": 1000.0,
    "prior_interference_ms": 1.0,
    "prior_turn_tokens": 100.0,
    "prior_turns": 1.0,
    "prior_context_tokens": 260.0,
}
DEAR = {**FLAT, "prior_prefill_tokens_per_s": 100.0}
"""To compute a prompt anew takes longer than a tool."""


def test_cost_group_follows_its_prompt_until_spreading_is_cheaper():
    # 1,000 shared tokens cost 1 s to compute again; each sibling beside costs 100 tokens x 1 ms = 0.1 s.
    s = make("cost", **FLAT, prior_decode_ms=1.0)
    places = go(s, 0.0, *(turn("a", i, tokens=1005, shared=62) for i in range(20)))
    first = places.index(next(p for p in places if p != places[0]))
    # r1: 1.005 s of prefill. r0: queue of the first prompt (1.005 s at t=0) + 0.013 uncached + 0.1 per sibling:
    # dearer at once when all come in the same instant.
    assert first == 1
    s = make("cost", **FLAT, prior_decode_ms=1.0)
    lead = turn("a", 0, tokens=1005, shared=62)
    (home,) = go(s, 0.0, lead)
    later = go(s, 2.0, *(turn("a", i, tokens=1005, shared=62) for i in range(1, 16)))
    # The prompt is computed by now. Number i = 0, 1, ... costs 0.013 (its own tokens) + 0.013 i (queue) + 0.1 (1 + i)
    # there and 1.005 elsewhere: the ninth is the first for which spreading is cheaper.
    assert later[:8] == [home] * 8
    assert later[8] != home


def test_cost_sees_what_groups_placed_in_the_same_decision_share():
    # Two groups with the same 992 first tokens, submitted in one instant. Each group's first member takes a replica;
    # a further member then finds those tokens on both, and evens out the number of members.
    s = make("cost", **FLAT, prior_decode_ms=1.0)
    system = blocks("system", 62)
    for group in "ab":
        for i in range(4):
            request = turn(group, i, tokens=1005, shared=62)
            s.submit(replace(request, block_hashes=system + request.block_hashes[62:]), 0.0)
    placements = s.decide(0.0)
    assert Counter(p.replica_id for p in placements) == {"r0": 4, "r1": 4}
    assert {p.replica_id for p in placements if p.key.startswith("a/")} == {"r0", "r1"}
    second = next(p for p in placements if p.key == "a/1/0")
    # Queue of 1.005 s and 0.013 s for its own tokens and 0.1 s beside one other, on either replica.
    assert second.costs == pytest.approx({"r0": 1.118, "r1": 1.118})


def test_cost_admits_what_fits_and_resumes_before_new():
    s = make("cost", replicas=1, kv=1000, admission_fill=1.0, admission_growth=0.0, **DEAR)
    # 160 + 100 expected = 260 each, 1000 hold three.
    requests = [turn(f"g{i}", 0) for i in range(5)]
    assert go(s, 0.0, *requests) == ["r0"] * 3 + [None, None]
    assert done(s, requests[0], 0.5, generated=100) == []  # idle in its tool, it keeps what it holds
    back = turn("g0", 0, 1, tokens=260)
    assert go(s, 0.6, back) == ["r0"]  # returns before those that wait to begin
    assert [p.key for p in retire(s, back, 1.0, generated=100)] == ["g3/0/0"]


@pytest.mark.parametrize(
    ("prefill_tokens_per_s", "admitted"),
    [
        # A turn takes 10 s. To compute the whole cache and its own prompt anew, 1,160 tokens, takes longer: reserve.
        (100.0, 2),
        # Here it takes a second or two: one more running turn brings more than that costs.
        (1000.0, 3),
    ],
)
def test_cost_reserves_growth_only_where_to_outgrow_the_cache_costs_more(prefill_tokens_per_s, admitted):
    base = {**FLAT, "prior_prefill_tokens_per_s": prefill_tokens_per_s, "prior_interference_ms": 0.01}
    s = make("cost", replicas=1, kv=1000, admission_growth=1.0, progress_alpha=1.0, **base)
    for n, tokens in enumerate((160, 360)):
        request = turn("first", 0, n, tokens=tokens)
        go(s, 20.0 * n, request)
        done(s, request, 20.0 * n + 15.0, generated=100, seconds=8.4 + tokens / prefill_tokens_per_s)
    s.finish(request.trajectory, 40.0)
    # 160 + 100 expected now, and 200 more until the last turn's 460: 1,000 hold two with them and three without.
    assert go(s, 50.0, *(turn(g, 0) for g in "abcd")).count("r0") == admitted


def test_cost_nobody_overtakes_a_returning_turn_that_must_wait():
    s = make("cost", kv=1000, admission_fill=1.0, admission_growth=0.0, idle_patience=100.0, migrate_max=0, **FLAT)
    s.drain_replica("r1", 0.0)
    large, small, hog = turn("large", 0), turn("small", 0), turn("hog", 0)
    assert go(s, 0.0, large, small, hog) == ["r0"] * 3
    for request in (large, small, hog):
        done(s, request, 1.0, generated=100)
    s.finish(hog.trajectory, 1.0)
    hog = turn("hog2", 0, tokens=352)
    assert go(s, 1.0, hog) == ["r0"]
    # 452 are in use: the small one's 260 would fit, the large one's 580 in front of it do not.
    assert go(s, 2.0, turn("large", 0, 1, tokens=480)) == [None]
    assert go(s, 2.0, turn("new", 0, tokens=16)) == [None]  # nor does a new one begin before it
    assert go(s, 2.0, turn("small", 0, 1, tokens=160)) == [None]
    assert [p.key for p in retire(s, hog, 3.0)] == ["large/0/1", "small/0/1", "new/0/0"]


def test_cost_the_last_to_come_wait_where_all_have_grown_beyond_what_was_expected():
    s = make("cost", replicas=1, kv=1300, admission_fill=1.0, admission_growth=0.0, **DEAR)
    requests = [turn(name, 0) for name in ("a", "b", "c")]
    assert go(s, 0.0, *requests) == ["r0"] * 3  # 260 each, of which the claims pay for 160
    for request, generated in zip(requests, (100, 200, 100), strict=True):
        done(s, request, 1.0, generated=generated)
    # A turn is now expected to generate 133. 573, of 1300.
    a = turn("a", 0, 1, tokens=440)
    assert go(s, 1.1, a) == ["r0"]
    # It would fit beside the running one, 573 + 403. But not beside b as well, which came first: 1300 - 976 - 360.
    assert go(s, 1.2, turn("c", 0, 1, tokens=270)) == [None]
    assert go(s, 1.3, turn("b", 0, 1, tokens=380)) == ["r0"]
    assert [p.key for p in retire(s, a, 2.0)] == ["c/0/1"]


@pytest.mark.parametrize(("tokens_per_s", "starts"), [(100.0, False), (100_000.0, True)])
def test_cost_gives_up_idle_text_only_where_it_is_cheap_to_compute_again(tokens_per_s, starts):
    s = make(
        "cost", replicas=1, kv=700, admission_fill=1.0, admission_growth=0.0, idle_prior_s=1.0,
        **{**FLAT, "prior_prefill_tokens_per_s": tokens_per_s},
    )  # fmt: skip
    a, b = turn("a", 0), turn("b", 0)
    go(s, 0.0, a, b)
    done(s, b, 0.9, generated=100)
    # Three of 260 do not fit into 700. To give up what the one in its tool has written delays 2 turns by 1 s, or 1 ms;
    # it lets one turn more run for the tool's second.
    assert go(s, 1.0, turn("c", 0)) == (["r0"] if starts else [None])


def test_cost_lets_one_larger_than_the_cache_run_alone():
    s = make("cost", replicas=1, kv=500, admission_growth=0.0, **FLAT)
    big = turn("big", 0, tokens=4000)
    assert go(s, 0.0, big) == ["r0"]
    assert go(s, 0.0, turn("small", 0)) == [None]
    # In its tool gap the engine would stand still; what is promised to the big one can never be kept anyway.
    assert [p.key for p in done(s, big, 1.0)] == ["small/0/0"]
    assert go(s, 1.5, turn("big", 0, 1, tokens=4100)) == [None]
    assert [p.key for p in retire(s, turn("small", 0), 2.0)] == ["big/0/1"]


def test_cost_shared_prompt_is_promised_once():
    s = make("cost", replicas=1, kv=3000, admission_fill=1.0, admission_growth=0.0, **FLAT)
    # One prompt of 1,600 tokens (100 blocks) and 105 own tokens each: 13 fit. Counted in full, 1 would.
    assert Counter(go(s, 0.0, *(turn("a", i, tokens=1605, shared=100) for i in range(20))))["r0"] == 13


def test_cost_idle_promises_decay():
    s = make("cost", replicas=1, kv=600, admission_fill=1.0, admission_growth=0.0, idle_prior_s=1.0, **DEAR)
    a, b = turn("a", 0), turn("b", 0)
    go(s, 0.0, a, b)
    done(s, a, 1.0, generated=100)
    done(s, b, 1.0, generated=100)
    assert go(s, 1.1, turn("c", 0)) == [None]
    assert s.next_wakeup(1.1) is not None
    assert s.decide(2.9) == []  # within two usual tool times
    assert [p.key for p in s.decide(6.0)] == ["c/0/0"]


def test_cost_orders_new_trajectories_probe_first_then_longest():
    s = make("cost", replicas=1, kv=300, admission_fill=1.0, progress_alpha=1.0, **FLAT)
    for name, tokens in (("short", 10), ("long", 90)):
        request = turn(name, 9, tokens=32)
        go(s, 0.0, request)
        retire(s, request, 0.1, generated=tokens)
    busy = turn("busy", 0)
    go(s, 1.0, busy)
    go(s, 1.0, turn("short", 0), turn("long", 0), turn("fresh", 0), turn("fresh", 1))
    order, current = [], busy
    for step in range(4):
        (p,) = retire(s, current, 2.0 + step)
        order.append(p.key)
        current = s._turns[p.key].request
    # "fresh" has no finished member: its first is the probe, whose outcome (20 tokens) puts its sibling in between.
    assert order == ["fresh/0/0", "long/0/0", "fresh/1/0", "short/0/0"]


def test_cost_old_ones_are_not_overtaken_for_ever():
    s = make("cost", replicas=1, kv=300, admission_fill=1.0, progress_alpha=1.0, max_wait_s=10.0, **FLAT)
    for name, tokens in (("short", 10), ("long", 90)):
        request = turn(name, 99, tokens=32)
        go(s, 0.0, request)
        retire(s, request, 0.1, generated=tokens)
    current = turn("long", 0, shared=0)
    go(s, 1.0, current)
    go(s, 1.0, turn("short", 0, shared=0))
    started = None
    for i in range(1, 30):
        now = 1.0 + i
        go(s, now, turn("long", i, shared=0))
        (p,) = retire(s, current, now, generated=90)
        if p.key == "short/0/0":
            started = now
            assert p.reason == "aged"
            break
        current = s._turns[p.key].request
    assert started is not None and started <= 1.0 + 10.0 + 1.0


def saturated(**config):
    """The mover's replica has no KV left for it, the other is empty."""
    base = {"migrate_margin_s": 0.5, "migrate_ratio": 1.5, "prior_turns": 5.0, "admission_growth": 0.0}
    s = make("cost", kv=1000, admission_fill=1.0, **(FLAT | base | config))
    mover = turn("m", 0, tokens=165)
    (home,) = go(s, 0.0, mover)
    done(s, mover, 1.0, generated=100, seconds=5.0)
    other = "r1" if home == "r0" else "r0"
    s.drain_replica(other, 1.0)
    hog = turn("hog", 0, tokens=640, shared=0)
    assert go(s, 5.0, hog) == [home]
    s.add_replica(ReplicaInfo(other, 1000, BLOCK, max_running=512), 5.0)
    return s, home, other, hog


def back(n=1):
    return turn("m", 0, n, tokens=280)


def test_cost_moves_in_a_tool_gap_when_it_pays():
    s, _, other, _ = saturated()
    # 740 + 160 shared are taken, 220 more do not fit: a wait of one mean turn (5 s) against a prefill of about 0.3 s.
    assert go(s, 5.5, back()) == [other]
    stats = s.take_step_stats(False)
    assert stats["sched/migrations"] == 1 and stats["sched/reason/migrated"] == 1
    assert 0.05 < stats["sched/migration_seconds"] < 2.0


@pytest.mark.parametrize("config", [{"migrate_max": 0}, {"migrate_margin_s": 1000.0}, {"migrate_ratio": 1000.0}])
def test_cost_waits_where_moving_is_beyond_its_bounds(config):
    s, home, _, hog = saturated(**config)
    assert go(s, 5.5, back()) == [None]
    (p,) = retire(s, hog, 6.0)
    assert (p.key, p.replica_id, p.reason) == (back().key, home, "sticky")


def test_cost_does_not_move_a_turn_that_can_start_at_home():
    s, home, _, hog = saturated()
    retire(s, hog, 5.2)
    s.release("nobody", None, 5.3)
    assert go(s, 5.5, back()) == [home]


def test_cost_does_not_move_a_trajectory_that_runs():
    s, home, _, hog = saturated(migrate_max=0)
    go(s, 5.5, back())
    retire(s, hog, 6.0)
    assert s._turns[back().key].replica.id == home
    # A second turn of the same trajectory, while the first runs, does not fit and has nowhere else to go.
    s.config = s.policy.config
    assert go(s, 6.5, turn("m", 0, 2, tokens=960)) == [None]


def test_cost_rests_after_a_move():
    s, _, other, hog = saturated()
    assert go(s, 5.5, back()) == [other]
    done(s, back(), 6.0, generated=100, seconds=5.0)
    retire(s, hog, 6.0)
    assert go(s, 6.1, turn("hog2", 0, tokens=640, shared=0)) is not None
    s.drain_replica("r0" if other == "r1" else "r1", 6.2)
    go(s, 6.2, turn("hog3", 0, tokens=480, shared=0))
    s.add_replica(ReplicaInfo("r0" if other == "r1" else "r1", 1000, BLOCK, max_running=512), 6.2)
    assert go(s, 6.3, back(2)) in ([other], [None])


def test_cost_sandbox_about_to_die_goes_first():
    s = make("cost", replicas=1, kv=700, admission_fill=1.0, admission_growth=0.0, sandbox_limit_s=100.0,
             sandbox_urgency_s=20.0, idle_patience=1000.0, **FLAT)  # fmt: skip
    old = turn("old", 0)
    go(s, 0.0, old)
    done(s, old, 1.0, generated=100)
    young = turn("young", 0)
    go(s, 80.0, young)
    done(s, young, 81.0, generated=100)
    hog = turn("young", 0, 1, tokens=500)
    go(s, 82.0, hog)
    third = TurnRequest("young/0/2", young.trajectory, 2, 170, 100)
    assert go(s, 83.0, third) == [None]  # 600 of 700 are taken
    assert go(s, 85.0, turn("old", 0, 1)) == [None]
    assert done(s, hog, 86.0)[0].key == "old/0/1"


# ---- registry


class Mine(PerTurnPolicy):
    def choose(self, turn, context):
        return context.replicas[-1], "mine", {}


def test_policy_by_dotted_path():
    s = make("tests.rollout.test_policies.Mine", replicas=3)
    assert go(s, 0.0, turn("a", 0), turn("a", 1)) == ["r2", "r2"]


@pytest.mark.parametrize("name", ["nope", "no.such.Module", "collections.Counter", "war_rl.rollout.bench.Nope"])
def test_unknown_policy_is_refused_with_the_choices(name):
    with pytest.raises(ConfigError, match=r"war.scheduler.policy="):
        make(name)


# ---- replicas that can draft


def mixed(policy, **config):
    """r0 cannot draft, r1 can."""
    scheduler = GlobalScheduler(SchedulerConfig(policy=policy, **config), seed=0)
    for i in range(2):
        scheduler.add_replica(ReplicaInfo(f"r{i}", 100_000, BLOCK, can_draft=i == 1, max_running=512), 0.0)
    return scheduler


def test_between_equals_the_replica_that_drafts_is_chosen():
    s = mixed("cost")
    assert go(s, 0.0, turn("a", 0)) == ["r1"]
    assert go(s, 0.0, turn("b", 0)) == ["r0"]  # now r1 has more to do: nothing is flooded


def tail(s, seconds_0, seconds_1):
    """One long trajectory on r0; both replicas have been measured, r1 is idle. Where its next turn goes."""

    def on(home, request, now):
        other = "r1" if home == "r0" else "r0"
        s.drain_replica(other, now)
        assert go(s, now, request) == [home]
        s.add_replica(s._replicas[other].info, now)

    for number in range(40):
        for home, seconds in (("r0", seconds_0), ("r1", seconds_1)):
            request = turn(f"{home}-{number}", 0)
            on(home, request, number)
            retire_after(s, request, number + 0.5, seconds)
    on("r0", turn("l", 0), 100.0)
    done(s, turn("l", 0), 101.0, seconds=seconds_0)
    (where,) = go(s, 102.0, turn("l", 0, n=1, tokens=320))
    return where


def retire_after(s, request, now, seconds):
    s.release(request.key, TurnResult(100, 0, 0, seconds), now)
    s.finish(request.trajectory, now)
    for p in s.decide(now):
        s.reserve(p, now)


@pytest.mark.parametrize(("drafts", "most"), [(False, 2), (True, 4)])
def test_between_equals_the_one_with_fewer_siblings_is_chosen_where_nobody_drafts(drafts, most):
    s = GlobalScheduler(SchedulerConfig(prior_prefill_tokens_per_s=1e9))
    for i in range(2):
        s.add_replica(ReplicaInfo(f"r{i}", 100_000, BLOCK, can_draft=drafts), 0.0)
    # Two groups whose members come by turns: taken by turns too, each group would live on a replica of its own.
    homes = {"a": Counter(), "b": Counter()}
    for session in range(4):
        for group, home in zip("ab", go(s, 0.0, turn("a", session), turn("b", session)), strict=True):
            homes[group][home] += 1
    assert max(homes["a"].values()) == max(homes["b"].values()) == most


def test_fewer_siblings_decide_also_where_their_cost_is_within_what_counts_as_equal():
    s = GlobalScheduler(SchedulerConfig(prior_prefill_tokens_per_s=10.0))
    for i in range(2):
        s.add_replica(ReplicaInfo(f"r{i}", 1_000_000, BLOCK, can_draft=False), 0.0)
    # Prefill of minutes: the slowdown by a sibling is far less than one part in fifty of it.
    where = go(s, 0.0, *(turn(g, i, tokens=16_000, shared=0) for i in range(2) for g in "ab"))
    assert where[0] != where[2] and where[1] != where[3]


def test_groups_are_seldom_split_unevenly_where_nobody_drafts_and_lengths_are_unknown():
    uneven = 0
    for seed in range(60):
        s = GlobalScheduler(SchedulerConfig(prior_interference_ms=2.4, prior_prefill_tokens_per_s=1100.0))
        for i in range(2):
            s.add_replica(ReplicaInfo(f"r{i}", 100_000, BLOCK, can_draft=False), 0.0)
        order = [turn(g, i, tokens=160 + 16 * (i + ord(g) % 5), shared=8) for g in "abcd" for i in range(4)]
        random.Random(seed).shuffle(order)
        homes = Counter((t.trajectory.uid, home) for t, home in zip(order, go(s, 0.0, *order), strict=True))
        uneven += max(homes.values()) > 2
    # By load and ties alone it is 42 of 60.
    assert uneven <= 17


def test_the_tail_moves_to_the_replica_that_drafts_when_it_is_measured_faster():
    assert tail(mixed("cost", migrate_margin_s=0.1), seconds_0=5.0, seconds_1=1.0) == "r1"


def test_the_tail_stays_where_moving_would_not_pay():
    assert tail(mixed("cost", migrate_margin_s=0.1), seconds_0=1.0, seconds_1=1.0) == "r0"
    assert tail(mixed("cost", migrate_margin_s=0.1, migrate_max=0), seconds_0=5.0, seconds_1=1.0) == "r0"


def test_nobody_moves_to_a_replica_that_does_not_draft():
    s = mixed("cost", migrate_margin_s=0.1)
    s.add_replica(ReplicaInfo("r1", 100_000, BLOCK, can_draft=False, max_running=512), 0.0)
    assert tail(s, seconds_0=5.0, seconds_1=1.0) == "r0"
