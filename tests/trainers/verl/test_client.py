# SPDX-License-Identifier: Apache-2.0
"""The WAR client under agent loops of every habit: what the router and the engine are told, without either."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from uuid import uuid4

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.workers.rollout.replica import TokenOutput

from tests.support.remote import Remote
from war_rl.trainers.verl.client import WarClient
from war_rl.trainers.verl.episodes import announce_text, running_episode
from war_rl.trainers.verl.exchange import Answer, Ask, Grant, Release
from war_rl.trainers.verl.exchange import Server as ServerOfRouter
from war_rl.types import TrajectoryId, decode_feed, encode_request_id

IDENTITY = TrajectoryId("g", 1, 4, "17")
BLOCK = 16


class Server:
    """Answers each request with three tokens, once ``gate`` is open."""

    def __init__(self, error: Exception | None = None):
        self.requests: list[dict] = []
        self.fed = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._error = error
        self.generate = self
        self.war_feed = Remote(self._war_feed)

    def remote(self, **kwargs):
        return asyncio.ensure_future(self._generate(kwargs))

    async def _generate(self, kwargs):
        self.requests.append(kwargs)
        await self.gate.wait()
        if self._error:
            raise self._error
        start = 1000 + 3 * len(self.requests)
        return TokenOutput(
            token_ids=[start, start + 1, start + 2],
            log_probs=[-1.0] * 3,
            extra_fields={"global_steps": 3, "num_cached_tokens": 0},
        )

    async def _war_feed(self, blob):
        self.fed += decode_feed(blob)


class FakeRouter:
    """Places every turn at once and keeps what it was told."""

    def __init__(self, server):
        self.asked, self.released, self.finished = [], [], []

        async def exchange(client, version, events):
            grants = []
            for event in events:
                if isinstance(event, Ask):
                    self.asked.append(event.request)
                    grants.append(Grant(event.request.key, "s0", "test"))
                elif isinstance(event, Release):
                    self.released.append((event.key, event.result))
                else:
                    self.finished.append(event.trajectory)
            return Answer(1, {"s0": ServerOfRouter(server, True)}, grants)

        async def block_size():
            return BLOCK

        self.exchange, self.get_block_size = Remote(exchange), Remote(block_size)


def make(server, **rollout):
    config = OmegaConf.create(
        {
            "trainer": {"device": "cpu", "rollout": "war"},
            "actor_rollout_ref": {"rollout": {"name": "war", "full_determinism": False, **rollout}},
            "war": {"scheduler": {"lease_s": 0.0}, "spec": {"feed_interval_ms": 1.0}},
        }
    )
    router = FakeRouter(server)
    return WarClient(config=config, load_balancer_handle=router), router


async def play(client, request_ids, prompt=100):
    """A trajectory of one turn for each request id; each prompt holds all text before it. Returns its record."""
    with running_episode(IDENTITY, client) as episode:
        ids = list(range(prompt))
        for request_id in request_ids:
            output = await client.generate(request_id, prompt_ids=ids, sampling_params={"max_tokens": 8})
            ids = [*ids, *output.token_ids, 7, 7, 7]
        announce_text(client, episode, ids)
    await client.publisher.flush()
    await client.link.flush()
    return episode.record


@pytest.mark.parametrize("habit", ["one id for all turns", "a new id for each turn"])
def test_a_loops_request_ids_do_not_matter(habit):
    async def main():
        server = Server()
        client, router = make(server)
        one = uuid4().hex
        record = await play(client, [one if habit.startswith("one") else uuid4().hex for _ in range(3)])
        keys = [encode_request_id(IDENTITY, turn) for turn in range(3)]
        assert [request.key for request in router.asked] == [key for key, _ in router.released] == keys
        assert [request["request_id"] for request in server.requests] == keys
        assert [(r.trajectory, r.turn) for r in router.asked] == [(IDENTITY, turn) for turn in range(3)]
        assert [len(r.block_hashes) for r in router.asked] == [r.prompt_tokens // BLOCK for r in router.asked]
        assert router.asked[2].block_hashes[: len(router.asked[0].block_hashes)] == router.asked[0].block_hashes
        assert [turn.replica for turn in record.turns] == ["s0"] * 3
        assert router.finished == [IDENTITY]

    asyncio.run(main())


def test_turns_of_one_trajectory_at_once_with_one_id_are_told_apart():
    async def main():
        server = Server()
        server.gate.clear()
        client, router = make(server)
        with running_episode(IDENTITY, client) as episode:
            tasks = [
                asyncio.ensure_future(client.generate("same", prompt_ids=[1] * 20, sampling_params={}))
                for _ in range(3)
            ]
            while len(server.requests) < 3:
                await asyncio.sleep(0)
            server.gate.set()
            await asyncio.gather(*tasks)
        await client.link.flush()
        assert len({request["request_id"] for request in server.requests}) == 3
        assert sorted(turn.turn for turn in episode.record.turns) == [0, 1, 2]
        assert len({key for key, _ in router.released}) == 3

    asyncio.run(main())


def test_trajectories_that_share_an_id_are_told_apart():
    async def main():
        server = Server()
        client, _ = make(server)

        async def one(session):
            with running_episode(TrajectoryId("g", session, 4), client):
                await client.generate("same", prompt_ids=[1] * 20, sampling_params={})

        await asyncio.gather(one(0), one(1))
        expected = {encode_request_id(TrajectoryId("g", session, 4), 0) for session in (0, 1)}
        assert {request["request_id"] for request in server.requests} == expected

    asyncio.run(main())


def test_a_request_outside_of_any_trajectory_is_served_and_never_draws_on_one():
    async def main():
        server = Server()
        client, router = make(server)
        await asyncio.gather(*(client.generate("mine", prompt_ids=[1] * 40, sampling_params={}) for _ in range(2)))
        assert len({request["request_id"] for request in server.requests}) == 2
        assert len({request.key for request in router.asked}) == 2
        assert all(request.block_hashes == () and request.trajectory.step == -1 for request in router.asked)
        assert server.fed == []

    asyncio.run(main())


@pytest.mark.parametrize(("given", "expected"), [({}, {}), ({"priority": 3}, {"priority": 3})])
def test_a_priority_reaches_the_replica_as_with_the_stock_rollout(given, expected):
    async def main():
        server = Server()
        client, _ = make(server)
        await client.generate("r", prompt_ids=[1], sampling_params={}, **given)
        assert {k: v for k, v in server.requests[0].items() if k == "priority"} == expected

    asyncio.run(main())


def test_a_turn_that_fails_is_released_with_its_error_and_recorded():
    async def main():
        client, router = make(Server(error=ValueError("too long")))
        with pytest.raises(ValueError, match="too long"):
            await play(client, ["r"])
        await client.link.flush()
        ((_, result),) = router.released
        assert result.error == "ValueError: too long"
        assert router.finished == [IDENTITY]

    asyncio.run(main())


def test_every_token_is_fed_once_and_a_rewritten_history_is_counted():
    async def main():
        server = Server()
        client, _ = make(server)
        await play(client, ["a", "b"])
        assert sum(len(item.tokens) for item in server.fed) == 100 + 2 * 3 + 2 * 3
        assert server.fed[-1].final and client.publisher.counters["feed_rewritten"] == 0
        with running_episode(IDENTITY, client):
            for prompt in ([1] * 40, [2] * 30):  # the second is a summary of the first
                await client.generate("r", prompt_ids=prompt, sampling_params={})
        assert client.publisher.counters["feed_rewritten"] == 1

    asyncio.run(main())


def test_of_several_outputs_the_last_is_announced_and_all_count(monkeypatch):
    from war_rl.trainers.verl import agent_loop

    handed_on = []

    async def stock(self, output, validate, **kwargs):
        handed_on.append((output, validate, kwargs))

    monkeypatch.setattr(agent_loop._StockWorker, "_agent_loop_postprocess", stock)

    async def main():
        server = Server()
        client, _ = make(server)
        worker = object.__new__(agent_loop.WarAgentLoopWorker)
        worker.llm_client, worker._recorder = client, None
        with running_episode(IDENTITY, client) as episode:
            outputs = []
            for prompt in ([1] * 40, [2] * 60):  # each turn with a history of its own, and an output of its own
                out = await client.generate(uuid4().hex, prompt_ids=prompt, sampling_params={})
                outputs.append(
                    SimpleNamespace(
                        prompt_ids=prompt,
                        response_ids=[*out.token_ids, 8],
                        metrics=SimpleNamespace(tool_calls=0.5),
                        extra_fields={},
                        reward_score=None if not outputs else 0.25,
                    )
                )
            await worker._agent_loop_postprocess(outputs, False, uid="g", session_id=1)
        await client.publisher.flush()
        finals = [item for item in server.fed if item.final]
        assert [item.tokens.tolist() for item in finals] == [[8]]
        assert (episode.record.response_tokens, episode.record.env_seconds, episode.record.reward) == (8, 1.0, 0.25)
        assert handed_on == [(outputs, False, {"uid": "g", "session_id": 1})]

    asyncio.run(main())
