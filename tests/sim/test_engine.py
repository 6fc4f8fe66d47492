# SPDX-License-Identifier: Apache-2.0
"""One modelled replica against schedules worked out by hand."""

from __future__ import annotations

import pytest

from war_rl.sim.engine import EngineSettings, Replica, Request
from war_rl.sim.times import StepTimes
from war_rl.sim.work import SimTrajectory, SimTurn
from war_rl.types import TrajectoryId

SECOND = StepTimes(base=1.0, per_token=0.0, per_prefill=0.01)


def request(name, prompt, target, shared=0, block=4):
    """A turn; its first ``shared`` blocks are the same for all."""
    blocks = (prompt + target) // block
    path = ((1, shared), (hash(name) % 10**6 + 2, blocks - shared)) if shared else ((hash(name) % 10**6 + 2, blocks),)
    work = SimTrajectory(TrajectoryId(name, 0, 0), prompt, (SimTurn(target, 0, 0.0),), path)
    return Request(name, work, 0, prompt, target)


def play(replica, arrivals):
    """Arrivals as (time, request), in order. Returns when each request ended."""
    ended, arrivals = {}, list(arrivals)
    while arrivals or replica.busy:
        if arrivals and arrivals[0][0] <= replica.ends:
            at, coming = arrivals.pop(0)
            replica.arrive(coming, at)
            continue
        now = replica.ends
        for done in replica.finish_steps(now):
            ended[done.key] = round(now, 6)
    return ended


def replica(blocks=100, batched=64, seqs=8, times=SECOND):
    return Replica("r", EngineSettings(blocks * 4, 4, seqs, batched), times)


def test_a_turn_alone_takes_one_prefill_step_and_a_step_for_each_further_token():
    engine = replica()
    assert play(engine, [(0.0, request("a", 10, 3))]) == {"a": 1.1 + 2.0}
    assert (engine.tally.steps, engine.tally.scheduled) == (3, 10 + 2)
    assert engine.cache.free == engine.cache.capacity


def test_an_arrival_waits_for_the_end_of_the_step_and_shares_the_next_one():
    # a: token 1 at 1.1, then one a second until 4.1, one in b's prefill step (1.1 s), six more.
    # b: prefill from 4.1 to 5.2, then one token a second.
    ended = play(replica(), [(0.0, request("a", 10, 11)), (3.5, request("b", 10, 3))])
    assert ended == {"a": 11.2, "b": 7.2}


def test_a_long_prompt_is_computed_in_chunks_within_the_token_budget():
    engine = replica(batched=8)
    # a decodes (1 token of the budget of 8), so b's 20 tokens come as 7 + 7 + 6.
    ended = play(engine, [(0.0, request("a", 4, 9)), (1.5, request("b", 20, 2))])
    assert ended["b"] == pytest.approx(1.04 + 1.0 + 1.07 + 1.07 + 1.06 + 1.0)
    assert engine.tally.scheduled == 4 + 8 + 20 + 1


def test_the_second_of_two_with_one_prompt_finds_it_cached_in_the_same_step():
    engine = replica()
    play(engine, [(0.0, request("a", 18, 2, shared=4)), (0.0, request("b", 18, 2, shared=4))])
    assert engine.tally.computed_prompt == 18 + 2
    assert engine.tally.cached_prompt == 16


def test_the_whole_prompt_is_never_a_hit():
    engine = replica()
    play(engine, [(0.0, request("a", 16, 1, shared=4)), (5.0, request("b", 16, 1, shared=4))])
    assert engine.tally.cached_prompt == 12


def test_no_more_than_max_num_seqs_run():
    ended = play(replica(seqs=1), [(0.0, request("a", 10, 3)), (0.0, request("b", 10, 3))])
    assert ended == {"a": 3.1, "b": 6.2}


def test_want_of_blocks_preempts_the_newest_and_recomputes_only_what_was_evicted():
    # Blocks of 4, four of them; two requests of 4 + 8 tokens. a's prompt, then b's beside a's first decode step, then
    # three steps of both: a has computed 8 tokens, b 7, all blocks are in use. a's next one takes b's: b's half-filled
    # second block is blank then, its first stays cached. a ends after three steps; b has 8 tokens, 4 of them cached,
    # of the other 4 it had computed 3 before; three steps more.
    engine = replica(blocks=4, times=StepTimes(1.0, 0.0))
    assert play(engine, [(0.0, request("a", 4, 8)), (0.0, request("b", 4, 8))]) == {"a": 8.0, "b": 12.0}
    assert (engine.tally.preemptions, engine.tally.recomputed) == (1, 3)
    assert engine.tally.scheduled == 8 + 7 + 3 + 4 + 3
    assert engine.cache.free == 4


def test_a_prompt_that_does_not_fit_as_a_whole_is_not_begun():
    engine = replica(blocks=6, batched=8)
    # a holds 3 blocks of 6 at its start; b's prompt needs 4 and must wait although its first chunk would fit.
    ended = play(engine, [(0.0, request("a", 11, 2)), (0.0, request("b", 16, 1))])
    assert ended["a"] < ended["b"]
    assert engine.tally.preemptions == 0


def test_a_stretch_is_as_long_as_its_steps_one_by_one():
    times = StepTimes(0.02, 0.001, 1e-5)
    total, kv = 0.0, 100.0
    for _ in range(7):
        total += times.seconds(3, kv)
        kv += 3
    assert times.stretch(7, 3, 100.0, 3.0) == pytest.approx(total)
    assert times.steps_until(total, 3, 100.0, 3.0) == 7
    assert times.steps_until(total + 1e-6, 3, 100.0, 3.0) == 8
    assert times.steps_until(0.0, 3, 100.0, 3.0) == 1
