# SPDX-License-Identifier: Apache-2.0
"""Random event sequences against every policy, with an injected clock. What must hold is checked after each event."""

import math

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from war_rl.config import SchedulerConfig
from war_rl.rollout.context import UPROOTED
from war_rl.rollout.policies import POLICIES
from war_rl.rollout.scheduler import GlobalScheduler, ReplicaInfo
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

BLOCK = 16
ADMITTING = ("first", "aged", "home_gone", "migrated")


def hashes(trajectory, tokens):
    """The first 64 tokens are the group's, the rest the trajectory's own."""
    group, own = int(trajectory.uid[1:]) + 1, trajectory.session + 1
    return tuple((group << 20) + i if i < 4 else (own << 36) + i for i in range(tokens // BLOCK))


class Book:
    """The test's own account of one trajectory."""

    def __init__(self, trajectory):
        self.id = trajectory
        self.turn = 0
        self.tokens = 70
        self.waiting = {}
        self.running = {}
        self.home = None


class SchedulerMachine(RuleBasedStateMachine):
    policy = "cost"

    @initialize(seed=st.integers(0, 5), growth=st.sampled_from([0.0, 0.5, 1.0]), threshold=st.sampled_from([0, 4, 64]))
    def start(self, seed, growth, threshold):
        self.config = SchedulerConfig(
            policy=self.policy,
            admission_growth=growth,
            prior_context_tokens=300.0,
            prior_turn_tokens=20.0,
            migrate_margin_s=0.01,
            migrate_ratio=1.1,
            war_threshold=threshold,
            war_wait_s=1.0,
            max_wait_s=20.0,
            explain=10,
        )
        self.seed = seed
        self.scheduler = GlobalScheduler(self.config, seed=seed)
        self.twin = GlobalScheduler(self.config, seed=seed)
        self.now = 100.0
        self.books = {}
        self.serial = 0
        self.alive = {}
        self.draining = set()
        self.decided = {}
        self.both("add_replica", ReplicaInfo("r0", 800, BLOCK, max_running=8))
        self.alive["r0"] = 800

    # ---- driving

    def both(self, method, *args):
        """One event for the scheduler and for a twin that must stay in the same state."""
        a = getattr(self.scheduler, method)(*args, self.now)
        b = getattr(self.twin, method)(*args, self.now)
        assert a == b
        return a

    def settle(self):
        before = self._before = self.fingerprint()
        placements = self.scheduler.decide(self.now)
        assert placements == self.scheduler.decide(self.now), "decide changed something"
        assert placements == self.twin.decide(self.now), "same events, same seed, other decisions"
        assert self.fingerprint() == before, "decide changed something"
        for placement in placements:
            self.check(placement)
            replica = self.scheduler._replicas[placement.replica_id]
            spared = replica.spare_idle(self.scheduler.tool_seconds)
            self.both("reserve", placement)
            self.check_bound(placement, replica, spared)
        # What is left must wait for an event, or for idle promises to decay, which next_wakeup announces.
        assert self.scheduler.decide(self.now) == [] or self.scheduler.next_wakeup(self.now) is not None

    def fingerprint(self):
        return [
            (r.id, r.numbers(), r.shared.tokens, len(r.resumed), r.residency.resident_blocks, r.prefill_free_at)
            for r in self.scheduler._replicas.values()
        ]

    def check(self, placement):
        book = next(b for b in self.books.values() if placement.key in b.waiting)
        assert self.decided.get(placement.key) is None, "decided twice"
        assert placement.replica_id in self.alive and placement.replica_id not in self.draining
        if book.home is not None and book.home != placement.replica_id:
            assert not book.running, "moved without a tool gap"
            if self.policy not in ("cost", "cache_aware", "war"):
                assert book.home not in self.alive or book.home in self.draining, "moved although its home is there"
            elif self.policy == "cost" and book.home in self.alive and book.home not in self.draining:
                assert placement.reason in ("migrated", UPROOTED)
        self.decided[placement.key] = placement.replica_id
        book.running[placement.key] = book.waiting.pop(placement.key)
        book.home = placement.replica_id

    def check_bound(self, placement, replica, spared):
        """``spared``: idle text was worth nothing to the decision; with one trajectory more it may be."""
        if self.policy != "cost":
            return
        within_running = replica.kv_running + replica.shared.tokens <= replica.kv_capacity
        if placement.reason == "sticky":
            assert within_running or replica.running == 1, "resumed above the bound beside another"
        elif placement.reason in ADMITTING:
            idle = replica.idle.total(self.scheduler._theta)
            held = replica.kv_running + replica.kv_growth + replica.shared.tokens + (0.0 if spared else idle)
            # Idle promises are read at most one twentieth of a tool time late.
            slack = 1.0 + idle * 0.06
            assert held <= replica.kv_capacity + slack or replica.running == 1, "admitted above the bound"

    # ---- events

    @rule(group=st.integers(0, 3), validate=st.booleans())
    def new_trajectory(self, group, validate):
        self.serial += 1
        self.books[self.serial] = Book(TrajectoryId(f"g{group}", self.serial, 1, f"i{group}", validate))
        self.submit(self.books[self.serial])

    def submit(self, book):
        book.turn += 1
        key = f"{book.id.session}/{book.turn}"
        request = TurnRequest(key, book.id, book.turn - 1, book.tokens, 64, hashes(book.id, book.tokens))
        book.waiting[key] = request
        self.both("submit", request)
        self.settle()

    @precondition(lambda self: self.books)
    @rule(data=st.data(), heard=st.integers(0, 60))
    def next_turn(self, data, heard):
        # Now and then two at once: an agent may run turns in parallel.
        ready = [b for b in self.books.values() if len(b.waiting) + len(b.running) < 2]
        if ready:
            book = data.draw(st.sampled_from(ready))
            book.tokens += heard
            self.submit(book)

    @precondition(lambda self: any(b.running for b in self.books.values()))
    @rule(data=st.data(), generated=st.integers(1, 80), seen=st.sampled_from([None, 0.0, 0.5, 1.0]))
    def turn_ends(self, data, generated, seen):
        book = data.draw(st.sampled_from([b for b in self.books.values() if b.running]))
        key, request = sorted(book.running.items())[0]
        cached = None if seen is None else int(seen * request.prompt_tokens) // BLOCK * BLOCK
        del book.running[key]
        book.tokens = max(book.tokens, request.prompt_tokens + generated)
        self.both("release", key, TurnResult(generated, cached, 0, 0.5))
        self.settle()

    @precondition(lambda self: any(b.running or b.waiting for b in self.books.values()))
    @rule(data=st.data())
    def cancel(self, data):
        book = data.draw(st.sampled_from([b for b in self.books.values() if b.running or b.waiting]))
        key = sorted(book.running | book.waiting)[0]
        book.running.pop(key, None)
        book.waiting.pop(key, None)
        self.both("release", key, None)
        self.settle()

    @precondition(lambda self: self.books)
    @rule(data=st.data())
    def finish(self, data):
        serial = data.draw(st.sampled_from(sorted(self.books)))
        self.both("finish", self.books.pop(serial).id)
        self.settle()

    @rule(tokens=st.sampled_from([160, 800, 3000]))
    def add(self, tokens):
        name = f"r{len(self.alive) % 4}"
        if name in self.alive and name not in self.draining:
            name = next((n for n in sorted(self.draining)), f"x{self.serial}")
        known = self.alive.get(name, tokens)
        self.both("add_replica", ReplicaInfo(name, known, BLOCK, max_running=8))
        self.alive[name] = known
        self.draining.discard(name)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drain(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        self.both("drain_replica", name)
        self.draining.add(name)
        self.settle()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def lose(self, data):
        name = data.draw(st.sampled_from(sorted(self.alive)))
        lost = self.both("remove_replica", name)
        expected = {k for b in self.books.values() for k in b.running if self.decided[k] == name}
        assert set(lost) == expected
        del self.alive[name]
        self.draining.discard(name)
        for book in self.books.values():
            if book.home == name:
                book.home = None
            for key in [k for k in book.running if k in expected]:
                # The client asks again, under the same key: losing a replica loses no turn.
                request = book.running.pop(key)
                del self.decided[key]
                book.waiting[key] = request
                self.both("submit", request)
        self.settle()

    @rule(seconds=st.sampled_from([0.01, 0.3, 2.0, 30.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.settle()

    @rule()
    def weights(self):
        self.both("weights_updated", 2)
        for book in self.books.values():
            if not book.waiting and not book.running:
                book.home = None  # a trajectory of an earlier step: over, whether or not anybody says so
        self.settle()

    # ---- what must hold

    @invariant()
    def books_agree(self):
        if not hasattr(self, "scheduler"):
            return
        waiting = {k for b in self.books.values() for k in b.waiting}
        running = {k for b in self.books.values() for k in b.running}
        assert set(self.scheduler.queue.all) == waiting
        assert set(self.scheduler._turns) == waiting | running
        queued = list(self.scheduler.queue.homeless) + list(self.scheduler.queue._fresh)
        for replica in self.scheduler._replicas.values():
            queued += list(replica.resumed)
            turns = [t for t in self.scheduler._turns.values() if t.replica is replica]
            lives = [t for t in self.scheduler._trajectories.values() if t.home is replica]
            assert replica.running == len(turns)
            assert replica.running_train == sum(not t.request.trajectory.validate for t in turns)
            assert replica.kv_running == sum(t.need for t in turns)
            assert replica.admitted == len(lives)
            assert replica.tokens == sum(t.footprint for t in lives)
            assert replica.work == sum(t.work for t in lives)
            assert replica.kv_growth == sum(t.growth for t in lives if t.running)
            assert len(replica.idle) == sum(not t.running for t in lives)
            assert len(replica.residency._held) <= len(turns)
            assert replica.idle_taken == 0.0
        assert sorted(queued) == sorted(waiting), "every waiting turn stands in exactly one line"

    @invariant()
    def nothing_waits_without_reason(self):
        if not hasattr(self, "scheduler"):
            return
        open_replicas = [n for n in self.alive if n not in self.draining]
        if not open_replicas or self.policy in ("cost", "war"):
            return
        for book in self.books.values():
            assert not book.waiting or (book.running and book.home in self.draining)

    def teardown(self):
        """Let everything run out: each waiting turn must start, and nothing may be left held."""
        if not hasattr(self, "scheduler"):
            return
        self.both("add_replica", ReplicaInfo("last", 800, BLOCK, max_running=8))
        self.alive["last"] = 800
        self.settle()
        for _ in range(len(self.scheduler._turns) + 2):
            if not any(b.waiting for b in self.books.values()):
                break
            for serial, book in sorted(self.books.items()):
                if book.running and not book.waiting:
                    self.both("finish", book.id)
                    del self.books[serial]
                    self.settle()
                elif book.running:
                    key = sorted(book.running)[0]
                    del book.running[key]
                    self.both("release", key, TurnResult(5, 0, 0, 0.1))
                    self.settle()
            # Trajectories in tool calls that never come back hold their promise for a while, not for ever.
            self.now += 40.0 * self.scheduler.tool_seconds
            self.settle()
        assert not any(b.waiting for b in self.books.values()), "a turn was starved"
        for book in self.books.values():
            self.both("finish", book.id)
        for replica in self.scheduler._replicas.values():
            assert replica.numbers()[:5] == (0, 0, 0, 0, 0) and replica.work == 0
            assert replica.shared.tokens == replica.shared.busy == 0 and not replica.shared._groups
            assert replica.kv_admitted(math.inf, 0.0) == 0.0 and not replica.residency._held
            assert not replica.residency._unnamed
        assert not self.scheduler._turns and not self.scheduler._trajectories and not self.scheduler._groups
        assert len(self.scheduler.queue) == 0
        for validate in (False, True):
            assert self.scheduler.take_step_stats(validate)["sched/waiting"] == 0.0


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_random_events(policy):
    machine = type("Machine", (SchedulerMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            # Shrinking long event sequences takes minutes; a failure prints its sequence as it is.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )
