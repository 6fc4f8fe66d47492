# SPDX-License-Identifier: Apache-2.0
"""The event loop: nothing is lost, nothing is computed twice, and the scheduler cannot tell it from the real router."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from war_rl.config import SchedulerConfig, SpecConfig
from war_rl.rollout.scheduler import GlobalScheduler
from war_rl.sim.drafts import Acceptance
from war_rl.sim.engine import EngineSettings
from war_rl.sim.simulator import Setup, Simulation, simulate
from war_rl.sim.times import StepTimes
from war_rl.sim.work import Shape, SimTrajectory, SimTurn, from_items, make_work, working_set
from war_rl.traces.workload import WorkItem, WorkTurn
from war_rl.trainers.shell import SchedulerShell
from war_rl.types import TrajectoryId

TIMES = StepTimes(0.02, 0.001, 1e-6, 0.0005, send_s=0.003, return_s=0.002, alone=0.8)
SHAPE = Shape(groups=6, n=4, turns=4, system=48, prompt=80, model=20, env=40, tool=0.3, max_context=1500)
POLICIES = ("cost", "war", "sticky_least_inflight", "cache_aware", "round_robin")
RATES = Acceptance(own=((1.5, 2.0), (2.5, 3.0)), sibling=((3.0, 4.0),))


def setup(policy="cost", share=0.4, **changes):
    work = make_work(SHAPE, 16, 3)
    kv = max(1600, int(share * working_set(work, 16) / 2))
    scheduler = SchedulerConfig(policy=policy, idle_prior_s=0.3, war_threshold=8)
    return work, replace(Setup(2, EngineSettings(kv, 16, 16, 256), TIMES, scheduler), **changes)


def test_a_replica_that_works_alone_has_the_machine_to_itself():
    # Steps of 1 s while both work, of half a second alone. One turn of 5 tokens and one of 11: five steps beside each
    # other (the first of them prefill), then six alone. A third trajectory, begun when the first has ended, finds the
    # other at work again.
    def one(uid: str, *turns: SimTurn) -> SimTrajectory:
        return SimTrajectory(TrajectoryId(uid, 0, 1), 16, turns, ((int(uid) << 24, 8),))

    times = StepTimes(1.0, 0.0, alone=0.5)
    how = Setup(2, EngineSettings(1600, 16), times, SchedulerConfig(policy="round_robin"))
    short, long = one("1", SimTurn(5, 0, 0.0)), one("2", SimTurn(11, 0, 0.0))
    assert simulate(how, [short, long]).seconds == pytest.approx(5 * 1.0 + 6 * 0.5)
    assert simulate(replace(how, replicas=1), [short]).seconds == pytest.approx(5.0)  # No neighbour, nothing to share.
    back = one("1", SimTurn(5, 0, 2.0), SimTurn(2, 0, 0.0))
    # Its tool takes 2 s, four steps of the other; its two further steps are beside the other's last two.
    assert simulate(how, [back, long]).seconds == pytest.approx(5 * 1.0 + 4 * 0.5 + 2 * 1.0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [0.2, 3.0])
def test_the_work_is_done_once(policy, share):
    work, how = setup(policy, share)
    done = simulate(how, work)
    assert done.generated_tokens == sum(t.generated for t in work)
    assert done.turns == done.placements == sum(len(t.turns) for t in work)
    asked, context = 0, 0
    for t in work:
        context = t.prompt
        for turn in t.turns:
            asked += context
            context += turn.model + turn.env
    assert done.requested_prompt_tokens == asked
    # What engines compute: prompts that were not cached, a token per further step, and what preemptions threw away.
    assert done.scheduled_tokens == (
        done.prefill_computed_tokens + done.generated_tokens - done.turns + done.recomputed_tokens
    )
    if share == 3.0 and policy == "round_robin":
        # Sticky with room for all: each text is computed where it lives, once; only the last, unhashed part of a block
        # and the last token of a turn come again.
        assert done.preemptions == done.recomputed_tokens == 0
        own = sum(t.context - t.prompt for t in work)
        assert done.prefill_computed_tokens < own + 6 * 2 * (48 + 80) + done.turns * 32


@given(
    st.integers(0, 10_000),
    st.sampled_from(POLICIES),
    st.floats(0.05, 3.0),
    st.integers(1, 12),
    st.sampled_from(["off", "war", "budget"]),
)
@settings(max_examples=40, deadline=None)
def test_any_work_ends_and_every_block_comes_back(seed, policy, share, seqs, drafts):
    work = make_work(replace(SHAPE, groups=3, tool=0.1), 16, seed)
    kv = max(1600, int(share * working_set(work, 16)))
    how = Setup(
        2,
        EngineSettings(kv, 16, seqs, 128),
        TIMES,
        SchedulerConfig(policy=policy, war_threshold=4),
        SpecConfig(policy=drafts),
        RATES,
        seed=seed,
    )
    run = Simulation(how)
    done = run.run(work)
    assert done.generated_tokens == sum(t.generated for t in work)
    for engine in run.replicas.values():
        engine.cache.check()
        assert engine.cache.free == engine.cache.capacity
        assert not engine.busy
    if drafts == "off":
        assert done.scheduled_tokens == (
            done.prefill_computed_tokens + done.generated_tokens - done.turns + done.recomputed_tokens
        )


def test_the_same_seed_gives_the_same_result_and_another_seed_another_work():
    work, how = setup("sticky_least_inflight")
    assert simulate(how, work).to_json() == simulate(how, make_work(SHAPE, 16, 3)).to_json()
    assert [t.turns for t in make_work(SHAPE, 16, 4)] != [t.turns for t in work]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_real_router_decides_the_same(policy):
    """The simulation's events, fed to the asynchronous shell that serves training, give the same placements."""
    work, how = setup(policy)
    events = []
    run = Simulation(how, observe=lambda *event: events.append(event))
    run.run(work)
    assert asyncio.run(replayed(how, run, events)) == [(key, name) for _, kind, key, name in events if kind == "place"]


async def replayed(how, run, events):
    clock = {"now": 0.0}
    shell = SchedulerShell(GlobalScheduler(how.scheduler, seed=how.seed), clock=lambda: clock["now"])
    for name in run.replicas:
        shell.add(run.infos[name])
    shell.weights_updated(1)
    placed, tasks = [], []

    async def ask(request):
        replica, _ = await shell.acquire(request)
        placed.append((request.key, replica))

    pending = iter([*events, None])
    event = next(pending)
    while event is not None:
        at, kind, what, _ = event
        clock["now"] = at
        if kind == "submit":
            tasks.append(asyncio.ensure_future(ask(what)))
        elif kind == "release":
            shell.release(*what)
        elif kind == "finish":
            shell.finish(what)
        elif kind == "wake":
            # The loop's own timer would call it by the wall clock.
            shell._decide(at)
        await asyncio.sleep(0)
        shell._wake_at(None, at)
        await asyncio.sleep(0)
        event = next(pending)
    await asyncio.gather(*tasks)
    return placed


def test_weights_take_the_cache_and_steps_follow_each_other():
    work, how = setup(share=3.0, update_s=5.0)
    run = Simulation(how)
    first, second = run.run(work), run.run(work)
    assert second.prefill_computed_tokens == pytest.approx(first.prefill_computed_tokens, rel=0.1)
    assert run.now == pytest.approx(first.seconds + 5.0 + second.seconds)


def test_a_trajectory_that_fits_no_replica_is_refused():
    work, how = setup()
    with pytest.raises(ValueError, match="fits no replica"):
        simulate(replace(how, engine=EngineSettings(160, 16)), work)
    with pytest.raises(ValueError, match="text, or a measured acceptance"):
        simulate(replace(how, spec=SpecConfig(policy="budget")), work)


def test_drafts_save_steps_where_few_run_and_nothing_where_many_do():
    work, how = setup(share=3.0)
    drafting = replace(how, spec=SpecConfig(policy="war", max_running=1), acceptance=RATES)
    plain, few = simulate(replace(how, at_once=2), work), simulate(replace(drafting, at_once=2), work)
    assert few.engine_steps < 0.7 * plain.engine_steps
    assert few.seconds < plain.seconds
    assert few.accepted_tokens > 0
    many = simulate(replace(how, spec=SpecConfig(policy="war", max_running=0), acceptance=RATES), work)
    assert (many.draft_tokens, many.seconds) == (0, simulate(how, work).seconds)


def test_siblings_text_helps_only_where_it_is_fed():
    work, how = setup("sticky_least_inflight", share=3.0)
    spec = SpecConfig(policy="war", max_running=64)
    fed = simulate(replace(how, spec=spec, acceptance=RATES), work)
    alone = simulate(replace(how, spec=replace(spec, feed=False), acceptance=RATES), work)
    assert fed.accepted_tokens > alone.accepted_tokens


def item(name, session, tokens, turns):
    """``turns``: (model, env) lengths, cut from ``tokens`` behind its prompt."""
    at = len(tokens) - sum(m + e for m, e in turns)
    prompt, made = tokens[:at], []
    for model, env in turns:
        made.append(WorkTurn(tokens[at : at + model], tokens[at + model : at + model + env], 0.0))
        at += model + env
    return WorkItem(TrajectoryId(name, session, 0, name), f"{name}/{session}", prompt, tuple(made))


def test_text_becomes_segments_that_are_shared_exactly_where_it_is_equal():
    rng = np.random.default_rng(0)
    system, group, a, b, c = (rng.integers(0, 999, n).astype(np.int32) for n in (8, 8, 20, 20, 28))
    items = [
        item("x", 0, np.concatenate([system, group, a]), [(6, 6)]),
        item("x", 1, np.concatenate([system, group, b]), [(6, 6)]),
        item("y", 0, np.concatenate([system, c]), [(6, 6)]),
    ]
    one, two, three = from_items(items, 4)
    assert [size for _, size in one.path] == [2, 2, 5]
    assert [size for _, size in three.path] == [2, 7]
    assert one.path[:2] == two.path[:2] and one.path[2] != two.path[2]
    assert one.path[0] == three.path[0] and one.path[1] != three.path[1]
    assert one.hashes(3) == two.hashes(3) and one.hashes(5) != two.hashes(5)
    again = from_items(items, 4, repeat=2)
    assert len(again) == 6 and again[3].path[0] == again[0].path[0] and again[3].path[1] != again[0].path[1]


def test_repeated_text_is_drafted_and_random_text_is_not():
    rng = np.random.default_rng(1)
    phrase = rng.integers(0, 999, 40).astype(np.int32)
    repeated = [item(f"g{i}", 0, np.concatenate([phrase, phrase, phrase]), [(40, 0)]) for i in range(2)]
    noise = [item(f"g{i}", 0, rng.integers(0, 9999, 120).astype(np.int32), [(40, 0)]) for i in range(2)]
    how = Setup(1, EngineSettings(4096), TIMES, SchedulerConfig(policy="round_robin"), SpecConfig(policy="war"))
    good, bad = simulate(how, from_items(repeated, 16)), simulate(how, from_items(noise, 16))
    assert good.generated_tokens == bad.generated_tokens == 80
    assert good.accepted_tokens > 40 and bad.accepted_tokens == 0
    assert good.engine_steps < bad.engine_steps / 2
