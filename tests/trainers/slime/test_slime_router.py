# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import errno
import json

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from tests.trainers.slime.engines import FakeEngine, cluster, until
from war_rl.config import ConfigError
from war_rl.trainers.slime.settings import parse_args
from war_rl.types import TrajectoryId, encode_request_id

PROMPT = list(range(100, 140))
KEY = ConnectionKey("engine", 1, False, True, None, None, None)


def test_answers_pass_unchanged_and_the_worker_gets_the_same_body():
    async def main():
        engine = FakeEngine()
        async with cluster(engine) as c:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "odd_key": [1, {"x": None}]}
            async with c.client.post("/generate", json=body) as response:
                through = await response.read()
            async with c.client.session.post(c.urls[0] + "/generate", json=body) as response:
                direct = await response.read()
            assert through == direct
            assert engine.seen[0] == engine.seen[1] == body

    asyncio.run(main())


def test_a_stream_passes_unchanged():
    async def main():
        async with cluster(FakeEngine()) as c:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
            async with c.client.post("/generate", json=body) as response:
                through, kind = await response.read(), response.content_type
            async with c.client.session.post(c.urls[0] + "/generate", json=body) as response:
                direct = await response.read()
            assert kind == "text/event-stream" and through == direct and through.endswith(b"data: [DONE]\n\n")
            # The last event tells the router what was written: the continuation finds its session.
            new = json.loads(through.split(b"\n\n")[-3][6:])["output_ids"]
            await c.generate([*PROMPT, *new, 1])
            assert c.router.sessions.counts["prompt"] == 1

    asyncio.run(main())


def test_workers_register_and_leave_as_with_sglangs_router():
    async def main():
        engines = [FakeEngine(), FakeEngine()]
        async with cluster(*engines, register=False) as c:
            status, body = await c.call("GET", "/readiness")
            assert (status, body["healthy_workers"]) == (503, 0)
            status, body = await c.generate(PROMPT)
            assert status == 503 and body["error"]["code"] == "no_available_workers"
            _, first = await c.call("POST", "/workers", {"url": c.urls[0], "worker_type": "regular"})
            _, again = await c.call("POST", "/workers", {"url": c.urls[0] + "/", "worker_type": "regular"})
            assert first["worker_id"] == again["worker_id"]
            await c.call("POST", "/workers", {"url": c.urls[1]})
            _, listed = await c.call("GET", "/workers")
            # slime's engine reads these two when it leaves, its abort reads the URL.
            assert [w["url"] for w in listed["workers"]] == c.urls and listed["total"] == 2
            assert all(w["is_healthy"] for w in listed["workers"])
            status, _ = await c.call("DELETE", f"/workers/{listed['workers'][0]['id']}")
            assert status == 202
            _, listed = await c.call("GET", "/workers")
            assert [w["url"] for w in listed["workers"]] == c.urls[1:]
            answers = await asyncio.gather(*(c.generate([i]) for i in range(4)))
            assert [a[0] for a in answers] == [200] * 4 and not engines[0].seen
            assert (await c.call("DELETE", "/workers/nobody"))[0] == 404
            status, body = await c.call("POST", "/workers", {"url": c.urls[0], "worker_type": "prefill"})
            assert status == 400 and "prefill/decode disaggregation" in body["error"]
            assert (await c.call("POST", "/workers", {"url": "nonsense"}))[0] == 400

    asyncio.run(main())


@pytest.mark.parametrize("by", ["header", "routing_key", "prompt"])
def test_the_turns_of_a_trajectory_stay_on_one_worker(by):
    async def main():
        engines = [FakeEngine(), FakeEngine(), FakeEngine()]
        async with cluster(*engines) as c:

            async def episode(number: int) -> None:
                # All trajectories have one prompt: only what they wrote, or their name, tells them apart.
                names = {
                    "header": {"X-War-Trajectory": encode_request_id(TrajectoryId("g", number, 0), 0)},
                    "routing_key": {"X-SMG-Routing-Key": f"s{number}"},
                    "prompt": {},
                }
                ids = [*PROMPT, number] if by == "prompt" else list(PROMPT)
                for _ in range(4):
                    _, body = await c.generate(ids, names[by])
                    ids = [*ids, *body["output_ids"], 7, number]

            await asyncio.gather(*(episode(n) for n in range(12)))
            counters = c.router.stats()
            assert counters["router/sessions"] == 12
            assert counters[f"router/session_by/{by}"] == (36 if by == "prompt" else 48)
            assert c.router.shell.scheduler.take_step_stats(False)["sched/sticky_rate"] == 1.0
            assert min(len(e.seen) for e in engines) >= 12, "twelve trajectories spread over three workers"
            assert c.router.shell.inflight == 0

    asyncio.run(main())


def test_siblings_with_one_prompt_are_different_trajectories_of_one_group():
    async def main():
        async with cluster(FakeEngine(delay=0.02), FakeEngine(delay=0.02)) as c:
            await asyncio.gather(*(c.generate(PROMPT) for _ in range(4)))
            names = [s.trajectory for s in c.router.sessions.idle_since(float("inf"))]
            assert len(names) == 4 and len({t.uid for t in names}) == 1

    asyncio.run(main())


def test_a_worker_that_dies_costs_no_request():
    async def main():
        engines = [FakeEngine(delay=0.05), FakeEngine(delay=0.05)]
        async with cluster(*engines) as c:
            tasks = [asyncio.create_task(c.generate([*PROMPT, i])) for i in range(20)]
            await until(lambda: engines[0].running > 3)
            await c.stop(0)
            answers = await asyncio.gather(*tasks)
            assert [status for status, _ in answers] == [200] * 20
            # The fake dies gently and may still have answered the look that followed the broken connections.
            for _ in range(3):
                await c.router.workers.check_all()
            values = c.router.stats()
            assert values["router/workers_healthy"] == 1 and values["router/workers_lost"] == 1
            assert values["router/retries"] >= 1 and values["router/inflight"] == 0
            _, listed = await c.call("GET", "/workers")
            assert [w["is_healthy"] for w in listed["workers"]] == [False, True]

    asyncio.run(main())


def test_a_worker_that_comes_back_takes_turns_again():
    async def main():
        engine = FakeEngine()
        async with cluster(engine, FakeEngine()) as c:
            c.router.workers.gone(c.urls[0], "test")
            assert (await c.generate(PROMPT))[0] == 200 and not engine.seen
            await c.router.workers.check_all()
            assert len(c.router.workers.healthy()) == 2
            await asyncio.gather(*(c.generate([i]) for i in range(4)))
            assert engine.seen

    asyncio.run(main())


def test_health_checks_lose_a_worker_only_after_several_failures():
    async def main():
        async with cluster(FakeEngine(), health_failures=2) as c:
            await c.stop(0)
            await c.router.workers.check_all()
            assert len(c.router.workers.healthy()) == 1
            await c.router.workers.check_all()
            assert not c.router.workers.healthy()
            assert (await c.generate(PROMPT))[0] == 503

    asyncio.run(main())


def test_turns_on_a_machine_that_vanishes_run_elsewhere():
    """No connection closes, nothing answers: only the health checks notice."""

    async def main():
        engines = [FakeEngine(), FakeEngine()]
        engines[0].hold.clear()
        async with cluster(*engines, health_failures=1, health_abandon_failures=2) as c:
            tasks = [asyncio.create_task(c.generate([*PROMPT, i])) for i in range(8)]
            await until(lambda: len(engines[0].seen) + len(engines[1].seen) == 8 and engines[0].running >= 1)
            engines[0].deaf = True
            stuck = engines[0].running
            await c.router.workers.check_all()
            await asyncio.sleep(0.05)
            # Lost, but it may yet answer what it has.
            assert len(c.router.workers.healthy()) == 1 and engines[0].running == stuck
            await c.router.workers.check_all()
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 30)
            assert [status for status, _ in answers] == [200] * 8
            await until(lambda: engines[0].cancelled == stuck)
            assert c.router.stats()["router/retries"] == stuck and c.router.shell.inflight == 0

    asyncio.run(main())


def test_a_stream_of_a_machine_that_vanishes_breaks_visibly():
    async def main():
        engine = FakeEngine()
        engine.stall_after = 2
        async with cluster(engine, health_failures=1, health_abandon_failures=1) as c:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
            async with c.client.post("/generate", json=body) as response:
                await response.content.readuntil(b"\n\n")
                engine.deaf = True
                await c.router.workers.check_all()
                with pytest.raises(Exception, match=r"[Pp]ayload|disconnect|closed"):
                    await asyncio.wait_for(response.read(), 30)
            await until(lambda: c.router.shell.inflight == 0)
            values = c.router.stats()
            assert values["router/broken_streams"] == 1 and values["router/client_gone"] == 0

    asyncio.run(main())


def test_a_router_without_files_left_blames_no_worker(monkeypatch):
    async def main():
        async with cluster(FakeEngine()) as c:
            real, calls = c.router.client.request, []

            def request(*args, **kwargs):
                calls.append(args)
                if len(calls) < 3:
                    raise aiohttp.ClientConnectorError(KEY, OSError(errno.EMFILE, "Too many open files"))
                return real(*args, **kwargs)

            monkeypatch.setattr(c.router.client, "request", request)
            assert (await c.generate(PROMPT))[0] == 200
            assert c.router.stats()["router/workers_lost"] == 0 and c.router.stats()["router/retries"] == 2

    asyncio.run(main())


def test_an_engine_that_is_unavailable_is_tried_elsewhere_and_other_errors_pass():
    async def main():
        engine = FakeEngine()
        async with cluster(engine) as c:
            engine.statuses = [503, 503]
            assert (await c.generate(PROMPT))[0] == 200
            engine.statuses = [400]
            assert await c.generate(PROMPT) == (400, {"error": "no"})
            engine.statuses = [500]
            assert (await c.generate(PROMPT))[0] == 500
            engine.statuses = [503] * 4
            assert (await c.generate(PROMPT))[0] == 503
            assert len(c.router.workers.healthy()) == 1 and c.router.shell.inflight == 0

    asyncio.run(main())


def test_half_a_stream_is_not_passed_off_as_a_whole_one():
    async def main():
        engine = FakeEngine()
        engine.break_after = 2
        async with cluster(engine) as c:
            body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}, "stream": True}
            with pytest.raises(Exception, match=r"[Pp]ayload|disconnect|closed"):
                async with c.client.post("/generate", json=body) as response:
                    await response.read()
            await until(lambda: c.router.shell.inflight == 0)
            assert c.router.stats()["router/broken_streams"] == 1

    asyncio.run(main())


def test_a_client_that_leaves_stops_the_engine_and_frees_the_turn():
    async def main():
        engine = FakeEngine()
        engine.hold.clear()
        async with cluster(engine) as c:
            task = asyncio.create_task(c.generate(PROMPT))
            await until(lambda: engine.running == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: c.router.shell.inflight == 0 and engine.cancelled == 1)
            assert c.router.sessions.idle_since(float("inf")) and c.router.stats()["router/client_gone"] == 1

    asyncio.run(main())


def test_waiting_turns_are_answered_as_aborted_until_the_next_step():
    async def main():
        engine = FakeEngine(kv_tokens=200)
        engine.hold.clear()
        async with cluster(engine, scheduler=parse_args(["--policy", "cost"]).scheduler) as c:
            tasks = [asyncio.create_task(c.generate([*PROMPT, *([i] * 100)])) for i in range(6)]
            await until(lambda: engine.running >= 1 and c.router.shell.waiting >= 1)
            waiting = c.router.shell.waiting
            assert (await c.call("POST", "/war/abort", {}))[1] == {"turned_away": waiting}
            engine.hold.set()
            kinds = [b["meta_info"]["finish_reason"]["type"] for _, b in await asyncio.gather(*tasks)]
            assert sorted(kinds) == ["abort"] * waiting + ["stop"] * (6 - waiting)
            assert (await c.generate(PROMPT))[1]["meta_info"]["finish_reason"]["type"] == "abort"
            await c.call("POST", "/war/step", {"step": 1})
            assert (await c.generate(PROMPT))[1]["meta_info"]["finish_reason"]["type"] == "stop"

    asyncio.run(main())


def test_sglangs_abort_reaches_turns_that_no_engine_knows_yet():
    async def main():
        engine = FakeEngine(kv_tokens=200)
        engine.hold.clear()
        async with cluster(engine, scheduler=parse_args(["--policy", "cost"]).scheduler) as c:
            tasks = [asyncio.create_task(c.generate([*PROMPT, *([i] * 100)], rid=f"r{i}")) for i in range(6)]
            await until(lambda: engine.running >= 1 and c.router.shell.waiting >= 2)
            seen = {body["rid"] for body in engine.seen}
            victim = next(i for i in range(6) if f"r{i}" not in seen)
            waiting = c.router.shell.waiting
            assert (await c.call("POST", "/abort_request", {"rid": f"r{victim}"}))[0] == 200
            _, body = await asyncio.wait_for(asyncio.shield(tasks[victim]), 30)
            assert body["meta_info"]["finish_reason"]["type"] == "abort" and c.router.shell.waiting == waiting - 1
            await c.call("POST", "/abort_request", {"abort_all": True})
            assert c.router.shell.waiting == 0 and ("/abort_request", None) in engine.calls
            engine.hold.set()
            kinds = [b["meta_info"]["finish_reason"]["type"] for _, b in await asyncio.gather(*tasks)]
            assert kinds.count("abort") == waiting
            # Unlike the end of a rollout, it says nothing about the turns that come.
            assert (await c.generate(PROMPT))[1]["meta_info"]["finish_reason"]["type"] == "stop"
            assert c.router.shell.inflight == 0

    asyncio.run(main())


def test_a_step_ends_earlier_trajectories_and_announced_ones_report_their_turns():
    async def main():
        async with cluster(FakeEngine()) as c:
            await c.generate(PROMPT)
            await c.call("POST", "/war/step", {"step": 3})
            assert c.router.stats()["router/sessions"] == 0
            who = {"uid": "3-0", "session": 1, "step": 3, "index": "p", "validate": False}
            await c.call("POST", "/war/begin", {"trajectory": who, "routing_key": "k"})
            await c.generate(PROMPT, {"X-SMG-Routing-Key": "k"})
            await c.generate([*PROMPT, 5], {"X-War-Trajectory": encode_request_id(TrajectoryId(**who), 0)})
            _, body = await c.call("POST", "/war/finish", {"trajectory": who, "documents": []})
            assert [t["turn"] for t in body["turns"]] == [0, 1]
            assert [t["generated_tokens"] for t in body["turns"]] == [4, 4]
            assert {t["replica"] for t in body["turns"]} == set(c.urls)
            assert c.router.stats()["sched/trajectories"] == 0

    asyncio.run(main())


def test_new_weights_are_noticed_where_nobody_announces_steps():
    async def main():
        engine = FakeEngine()
        async with cluster(engine) as c:
            await c.generate(PROMPT)
            before = c.router.sessions.step
            await c.generate([1])
            assert c.router.sessions.step == before
            engine.version = "2"
            await c.generate([2])
            assert c.router.sessions.step == before + 1

    asyncio.run(main())


def test_statistics_as_json_and_for_prometheus():
    async def main():
        async with cluster(FakeEngine()) as c:
            await c.generate(PROMPT)
            _, body = await c.call("GET", "/war/stats")
            assert body["policy"] == "cost" and body["values"]["router/requests"] == 1
            async with c.client.get("/metrics") as response:
                text = await response.text()
            assert "war_rl_router_requests 1.0" in text
            assert f'war_sched_running_turns{{replica="{c.urls[0]}"}} 0.0' in text
            assert 'war_sched_placements_total{reason="first"} 1.0' in text and "war_rl_sched" not in text
            assert "war_rl_router_request_seconds_count 1.0" in text

    asyncio.run(main())


def test_a_step_is_told_what_grew_since_the_last_one():
    async def main():
        async with cluster(FakeEngine()) as c:
            for requests in (2, 1):
                for i in range(requests):
                    await c.generate([i])
                _, body = await c.call("POST", "/war/take_stats", {"validate": False})
                assert body["own"]["router/requests"] == requests == body["sched"]["sched/submitted"]
                assert body["own"]["router/workers"] == 1

    asyncio.run(main())


def test_bodies_that_are_not_requests_are_refused():
    async def main():
        async with cluster(FakeEngine()) as c:
            for data in (b"{", b"[1]", b'{"input_ids": ["x"]}'):
                async with c.client.post("/generate", data=data) as response:
                    assert response.status == 400

    asyncio.run(main())


def test_text_batches_and_openai_requests_pass_too():
    async def main():
        engine = FakeEngine()
        async with cluster(engine) as c:
            text = "a long enough prompt " * 10
            body = {"text": text, "sampling_params": {"max_new_tokens": 3}}
            async with c.client.post("/generate", json=body) as response:
                wrote = (await response.json())["text"]
            body["text"] = f"{text}{wrote} and a tool's answer"
            async with c.client.post("/generate", json=body) as response:
                assert response.status == 200
            assert c.router.sessions.counts["prompt"] == 1
            batch = {"input_ids": [[1, 2], [3]], "sampling_params": {}}
            async with c.client.post("/generate", json=batch) as response:
                assert response.status == 200
            assert c.router.sessions.counts["batch"] == 1
            async with c.client.post("/v1/chat/completions", json={"messages": [{"role": "user"}]}) as response:
                # The fake engine has no such path: its answer passes as it is.
                assert response.status == 404

    asyncio.run(main())


def test_flags_reach_the_settings_and_nonsense_is_refused():
    config = parse_args(
        ["--policy", "war", "--scheduler", "migrate_max=0", "--port", "0", "--corpus-window-steps", "2"]
    )
    assert config.scheduler.policy == "war" and config.scheduler.migrate_max == 0
    assert config.host == "127.0.0.1" and config.corpus.window_steps == 2
    with pytest.raises(ConfigError, match="migrate_maxx"):
        parse_args(["--scheduler", "migrate_maxx=0"])
    with pytest.raises(ConfigError, match="engine_priority"):
        parse_args(["--scheduler", "engine_priority=true"])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_args(["--scheduler", "migrate_max"])
