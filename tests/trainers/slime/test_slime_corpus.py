# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainers.slime.engines import FakeEngine, cluster, until
from war_rl.trainers.slime.corpus import CorpusConfig, CorpusPlan, estimate_tokens

FAST = CorpusConfig(interval_s=0.01)


def who(step: int, session: int = 0) -> dict:
    return {"uid": f"{step}-0", "session": session, "step": step, "index": "", "validate": False}


async def finish(c, step: int, *documents: str, session: int = 0) -> None:
    await c.call("POST", "/war/finish", {"trajectory": who(step, session), "documents": list(documents)})


def test_finished_trajectories_reach_every_server_and_leave_with_their_step():
    async def main():
        engines = [FakeEngine(corpora="on"), FakeEngine(corpora="on")]
        async with cluster(*engines, corpus=FAST) as c:
            await c.call("POST", "/war/step", {"step": 1})
            await finish(c, 1, "the first text")
            await until(lambda: all(len(e.corpora) == 1 for e in engines))
            assert all("-1-" in name for e in engines for name in e.corpora)
            await c.call("POST", "/war/step", {"step": 2})
            await finish(c, 2, "the second text")
            await until(lambda: all(len(e.corpora) == 2 for e in engines))
            await c.call("POST", "/war/step", {"step": 3})
            await until(lambda: all(list(e.corpora.values()) == [["the second text"]] for e in engines))
            values = c.router.stats()
            assert values["corpus/added"] == 4 and values["corpus/removed"] == 2
            assert values["corpus/servers_supported"] == 2

    asyncio.run(main())


def test_corpora_of_an_earlier_run_are_removed_and_those_of_others_are_left():
    async def main():
        engine = FakeEngine(corpora="on")
        engine.corpora = {"war-old-7-1": ["x"], "mine": ["y"]}
        async with cluster(engine, corpus=FAST):
            await until(lambda: list(engine.corpora) == ["mine"])

    asyncio.run(main())


def test_a_server_that_returns_empty_is_filled_again():
    async def main():
        engine = FakeEngine(corpora="on")
        async with cluster(engine, corpus=FAST) as c:
            await finish(c, 0, "text")
            await until(lambda: engine.corpora)
            c.router.workers.gone(c.urls[0], "test")
            engine.corpora.clear()
            await c.router.workers.check_all()
            await until(lambda: engine.corpora)

    asyncio.run(main())


@pytest.mark.parametrize(("mode", "why"), [("missing", "HTTP 404"), ("off", "not enabled")])
def test_a_server_without_corpora_is_named_once_and_scheduling_goes_on(mode, why, caplog):
    async def main():
        async with cluster(FakeEngine(corpora=mode), corpus=FAST) as c:
            for step in range(3):
                await finish(c, step, "text")
                await asyncio.sleep(0.03)
            assert (await c.generate([1, 2]))[0] == 200
            _, body = await c.call("GET", "/war/stats")
            assert why in body["corpora_unsupported"][c.urls[0]]

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    said = [r for r in caplog.records if "takes no n-gram corpora" in r.getMessage()]
    assert len(said) == 1 and "--speculative-ngram-external-sam-budget" in said[0].getMessage()


def test_a_busy_server_is_asked_again_and_a_full_one_is_not():
    async def main():
        busy, full = FakeEngine(corpora="busy"), FakeEngine(corpora="full")
        async with cluster(busy, full, corpus=FAST) as c:
            await finish(c, 0, "text")
            await until(lambda: busy.corpora)
            await until(lambda: c.router.stats()["corpus/rejected"] == 1)
            c.router.corpus.begin_step(0)
            await asyncio.sleep(0.05)
            assert sum(name == "add" for name, _ in full.calls) == 1

    asyncio.run(main())


@given(
    batches=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 60), max_size=4)), max_size=40),
    max_tokens=st.integers(1, 80),
    max_corpora=st.integers(1, 5),
    window=st.integers(0, 3),
)
def test_the_plan_stays_within_its_bounds_and_loses_nothing_uncounted(batches, max_tokens, max_corpora, window):
    plan = CorpusPlan(CorpusConfig(max_tokens=max_tokens, max_corpora=max_corpora, window_steps=window), "r")
    step, serial, given_out, expired = 0, 0, {}, 0
    for new_step, sizes in batches:
        if new_step:
            step += 1
            kept = sum(len(c.documents) for c in plan.wanted.values() if c.step >= step - window)
            expired += sum(len(c.documents) for c in plan.wanted.values()) - kept
            plan.begin_step(step)
        for size in sizes:
            serial += 1
            document = f"{serial:04d}" + "x" * size
            given_out[document] = step
            plan.add([document])
        plan.flush()
        held = [d for c in plan.wanted.values() for d in c.documents]
        assert len(held) == len(set(held))
        assert all(given_out[d] == c.step for c in plan.wanted.values() for d in c.documents)
        assert all(step - window <= c.step <= step for c in plan.wanted.values())
        assert len(plan.wanted) <= max_corpora
        assert sum(c.tokens for c in plan.wanted.values()) <= max_tokens
        assert all(c.tokens == sum(map(estimate_tokens, c.documents)) for c in plan.wanted.values())
        assert len(held) + plan.dropped_documents + expired == serial
