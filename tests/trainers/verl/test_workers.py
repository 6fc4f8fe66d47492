# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import threading

import pytest
import ray

from war_rl.trainers.verl import workers
from war_rl.trainers.verl.loopwatch import LoopWatch
from war_rl.trainers.verl.workers import Stall, Stuck, WorkerLost, WorkerSilent, WorkerWatch


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Worker:
    """Answers ``war_progress.remote()`` with a reference that the stand-in for Ray below understands."""

    def __init__(self, answer):
        self.answer, self.asked = answer, 0
        self.war_progress = self

    def remote(self):
        self.asked += 1
        return self


@pytest.fixture
def fake_ray(monkeypatch):
    """An answer of None is one that has not come yet; an exception is raised by ``get``."""

    def wait(refs, num_returns, timeout):
        assert num_returns == len(refs) and timeout < 1.0
        return [ref for ref in refs if ref.answer is not None], []

    def get(ref):
        if isinstance(ref.answer, Exception):
            raise ref.answer
        return ref.answer

    monkeypatch.setattr(workers.ray, "wait", wait)
    monkeypatch.setattr(workers.ray, "get", get)


def state(finished=0, tokens=0, running=2, oldest=()):
    return {"finished": finished, "generated_tokens": tokens, "running": running, "oldest": list(oldest)}


def test_a_busy_worker_holds_nobody_up_and_is_asked_one_question_at_a_time(fake_ray):
    clock, fast, busy = Clock(), Worker(state(1)), Worker(None)
    watch = WorkerWatch([fast, busy], 100.0, clock)
    for clock.now in (1.0, 2.0, 3.0):
        assert watch.look() == [state(1)]
    assert (fast.asked, busy.asked) == (3, 1)
    busy.answer = state(2)
    assert watch.look() == [state(1), state(2)]
    watch.forget()
    busy.answer = None
    assert watch.look() == [state(1)]


def test_a_worker_that_is_silent_for_too_long_is_lost(fake_ray):
    clock = Clock()
    watch = WorkerWatch([Worker(state()), Worker(None)], 100.0, clock)
    watch.look()
    clock.now = 100.0
    watch.look()
    clock.now = 101.0
    with pytest.raises(WorkerSilent, match=r"agent-loop worker 1 has not answered for 100 s .*blocks its event loop"):
        watch.look()


def test_a_dead_worker_is_lost_at_once(fake_ray):
    watch = WorkerWatch([Worker(ray.exceptions.RayActorError()), Worker(None)], 100.0, Clock())
    with pytest.raises(
        WorkerLost, match=r"agent-loop worker 0 is gone, and with it its trajectories: .* before finishing"
    ):
        watch.look()


def test_a_stall_names_whom_the_step_waits_for_once():
    stall = Stall(100.0)
    stall.begin(0.0)
    waiting = [state(3, 50, oldest=[(90.0, "g/1 for 90 s")]), state(oldest=[(400.0, "h/0 for 400 s"), (1.0, "h/1")])]
    assert stall.look(5.0, waiting) == ""
    assert stall.look(104.0, waiting) == ""
    text = stall.look(105.0, waiting)
    assert "nothing has come in for 100 s; 4 trajectories" in text and "h/0 for 400 s; g/1 for 90 s; h/1" in text
    assert stall.look(500.0, waiting) == ""
    assert stall.look(501.0, [state(3, 51)]) == ""  # a turn has ended: the wait begins anew
    assert stall.look(601.0, [state(3, 51)]) != ""
    silent = Stall(0.0)
    silent.begin(0.0)
    assert silent.look(1e6, waiting) == ""


def test_an_engine_hangs_when_its_counters_stand_still_while_nothing_comes_in():
    work = {"a": [2, {"generated": 10.0}], "b": [0, {"generated": 7.0}]}
    reads = []

    def read():
        reads.append(1)
        return {name: (unfinished, dict(page)) for name, (unfinished, page) in work.items()}

    stuck = Stuck(100.0, read)
    assert [stuck.look(s) for s in (0.0, 99.0)] == [[], []]
    assert not reads  # while all goes well nobody is asked
    assert [stuck.look(s) for s in (100.0, 150.0)] == [[], []]
    work["a"][1]["generated"] = 11.0  # slow, but alive
    assert stuck.look(200.0) == []
    work["a"][0] = 3  # a turn more that it does not begin
    assert stuck.look(300.0) == ["a"]
    assert len(reads) == 3


def test_what_stood_still_in_an_earlier_wait_is_not_held_against_an_engine():
    stuck = Stuck(100.0, lambda: {"a": (1, {"generated": 10.0})})
    assert stuck.look(100.0) == []
    assert stuck.look(0.0) == []  # something came in
    assert stuck.look(100.0) == []
    assert stuck.look(200.0) == ["a"]


def test_engines_that_are_silent_or_not_to_be_looked_at_do_not_hang():
    silent = Stuck(100.0, dict)
    assert [silent.look(s) for s in (100.0, 200.0)] == [[], []]
    never = Stuck(0.0, lambda: pytest.fail("was asked"))
    assert never.look(1e6) == []


def test_code_that_blocks_the_event_loop_is_named():
    said: list[str] = []
    told = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        told.set()

    def the_users_own_call():
        while not any("the_users_own_call" in text for text in said):
            assert told.wait(60.0)
            told.clear()

    async def main():
        watch = LoopWatch(say, blocked_s=0.05)
        await asyncio.sleep(0)
        the_users_own_call()
        watch.stop()

    asyncio.run(main())
    assert "blocked for 0.05 s" in said[-1] and "asyncio.to_thread" in said[-1]
