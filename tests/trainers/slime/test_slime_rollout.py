# SPDX-License-Identifier: Apache-2.0
"""The rollout function over slime (the real one where it is installed, else the stand-in) and fake engines."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import threading
import types

import pytest

from tests.trainers.slime import fake_slime
from tests.trainers.slime.engines import FakeEngine, cluster, until
from tests.trainers.slime.seams import Prompts, arguments
from war_rl.config import ConfigError
from war_rl.metrics_registry import missing, undocumented
from war_rl.trainers.slime import rollout

HAS_SLIME = importlib.util.find_spec("slime") is not None


@pytest.fixture
def slime(monkeypatch):
    """slime's modules, real or stand-in, as fresh as can be."""
    if HAS_SLIME:
        from slime.rollout import sglang_rollout
        from slime.utils import http_utils
        from slime.utils.misc import SingletonMeta

        SingletonMeta._instances.clear()
        monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda *a, **k: _Bytes())
        monkeypatch.setattr(sglang_rollout, "load_processor", lambda *a, **k: None)
        monkeypatch.setattr(sglang_rollout, "abort_servers_until_idle", _nothing)
        monkeypatch.setattr(http_utils, "_http_client", None)
        yield
    else:
        fake_slime.install()
        yield
        fake_slime.uninstall()


class _Bytes:
    def encode(self, text, **kwargs):
        return list(text.encode())


async def _nothing(urls):
    pass


class Background:
    """Engines and router on a loop of their own: slime's functions block the calling thread."""

    def __init__(self, *engines, **settings):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._context = cluster(*engines, **settings)
        self.cluster = self.run(self._context.__aenter__())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    @property
    def address(self):
        return self.cluster.client.host, self.cluster.client.port

    def close(self):
        self.run(self._context.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def background():
    started = []

    def start(*engines, **settings):
        started.append(Background(*engines, **settings))
        return started[-1]

    yield start
    for one in started:
        one.close()


def sample_dicts(output):
    plain = []
    for group in output.samples:
        for sample in group:
            values = {k: v for k, v in vars(sample).items() if k not in ("session_id", "trace")}
            values["status"] = sample.status.value
            plain.append({k: vars(v) if hasattr(v, "__dict__") else v for k, v in values.items()})
    return plain


def test_samples_are_those_of_slime_itself(slime, background):
    """The engines' answers follow from the prompts, so both functions see the same ones."""
    from slime.rollout import sglang_rollout

    back = background(FakeEngine(), FakeEngine())
    args = arguments(back.address)
    stock = sglang_rollout.generate_rollout(args, 0, Prompts(args), evaluation=False)
    ours = rollout.generate_rollout(args, 0, Prompts(args))
    assert sample_dicts(ours) == sample_dicts(stock)
    assert type(ours) is type(stock)
    assert args.custom_generate_function_path is None, "slime's arguments are as they were"


def test_trajectories_are_announced_with_their_groups_and_metrics_join_slimes(slime, background):
    engines = [FakeEngine(corpora="on"), FakeEngine(corpora="on")]
    back = background(*engines)
    args = arguments(back.address, custom_generate_function_path="tests.trainers.slime.seams.two_turns")
    output = rollout.generate_rollout(args, 4, Prompts(args))
    assert [len(g) for g in output.samples] == [args.n_samples_per_prompt] * args.rollout_batch_size
    metrics, total = output.metrics, args.n_samples_per_prompt * args.rollout_batch_size
    assert metrics["war/rollout/trajectories"] == total and metrics["war/rollout/turns"] == 2 * total
    assert metrics["war/rollout/failed"] == 0 and metrics["war/rollout/unannounced"] == 0
    assert metrics["war/sched/sticky_rate"] == 1.0
    # Every value is documented; of those that each step has, only what slime cannot know is left out.
    assert not undocumented(metrics) and missing(metrics) == ["war/rollout/preemptions"]
    router = back.cluster.router
    # Custom functions send no routing key: the header alone must have told the trajectories apart.
    assert router.sessions.counts["header"] == 2 * total and router.sessions.step == 4
    assert len(router.sessions) == 0 and router.stats()["sched/trajectories"] == 0
    assert all("X-War-Trajectory" not in h for e in engines for h in e.headers)
    assert metrics["war/router/requests"] == 2 * total and metrics["war/router/workers_healthy"] == 2
    assert metrics["war/corpus/servers_supported"] == 2 and metrics["war/corpus/servers_unsupported"] == 0
    back.run(_flush(router))
    written = {d for e in engines for docs in e.corpora.values() for d in docs}
    assert written == {s.response for g in output.samples for s in g}


async def _flush(router):
    router.corpus.flush()
    for _ in range(200):
        await asyncio.sleep(0.01)
        if router.stats()["corpus/added"] >= 2:
            return


def test_the_header_stays_between_slime_and_the_router(slime, background):
    back, other = background(FakeEngine()), background(FakeEngine())
    elsewhere = FakeEngine()
    tool = background(elsewhere)
    args = arguments(back.address, custom_generate_function_path="tests.trainers.slime.seams.asks_elsewhere")
    args.elsewhere = tool.cluster.urls[0]
    rollout.generate_rollout(args, 0, Prompts(args))
    assert elsewhere.headers and all("X-War-Trajectory" not in h for h in elsewhere.headers)
    del other


def test_a_failing_sample_gives_back_what_it_held(slime, background):
    back = background(FakeEngine())
    args = arguments(back.address, custom_generate_function_path="tests.trainers.slime.seams.fails")
    with pytest.raises(RuntimeError, match="the tool broke"):
        rollout.generate_rollout(args, 0, Prompts(args))
    assert args.custom_generate_function_path == "tests.trainers.slime.seams.fails"
    with pytest.raises(RuntimeError, match="only inside"):
        asyncio.run(rollout.generate(args, None, {}))


def test_evaluation_is_slimes_own(slime, monkeypatch):
    from slime.rollout import sglang_rollout

    seen = []
    monkeypatch.setattr(sglang_rollout, "generate_rollout", lambda *a, **k: seen.append((a, k)) or "result")
    args = types.SimpleNamespace(partial_rollout=True)
    assert rollout.generate_rollout(args, 3, "source", evaluation=True) == "result"
    assert seen == [((args, 3, "source"), {"evaluation": True})]


def test_what_cannot_work_is_refused_with_a_way_out(slime, background):
    args = arguments(("127.0.0.1", 1), partial_rollout=True)
    with pytest.raises(ConfigError, match=r"--partial-rollout.*sglang_rollout"):
        rollout.generate_rollout(args, 0, None)
    with pytest.raises(ConfigError, match=r"--sglang-router-ip=None.*war_rl\.trainers\.slime\.router"):
        rollout.generate_rollout(arguments((None, None)), 0, None)
    engine = background(FakeEngine())
    host, port = engine.cluster.urls[0].removeprefix("http://").split(":")
    with pytest.raises(ConfigError, match="is not War-RL's router"):
        rollout.generate_rollout(arguments((host, int(port))), 0, None)


def test_samples_that_go_past_the_rollout_function_are_counted(slime, background):
    back = background(FakeEngine())
    args = arguments(back.address)

    class Own(Prompts):
        def get_samples(self, count):
            groups = super().get_samples(count)
            for sample in groups[0]:
                sample.generate_function_path = "tests.trainers.slime.seams.two_turns"
            return groups

    metrics = rollout.generate_rollout(args, 0, Own(args)).metrics
    n = args.n_samples_per_prompt
    assert metrics["war/rollout/unannounced"] == n
    assert metrics["war/rollout/trajectories"] == n * (args.rollout_batch_size - 1)


def test_after_a_rollout_that_slime_aborted_an_evaluation_is_answered():
    async def main():
        async with cluster(FakeEngine()) as c:
            url = f"http://{c.client.host}:{c.client.port}"
            run = rollout._Rollout(0, url, None)
            watcher = await rollout._start(rollout._free_waiting_turns(run, types.SimpleNamespace(aborted=True)))
            await until(lambda: c.router.proxy.aborting)
            assert (await c.generate([1]))[1]["meta_info"]["finish_reason"]["type"] == "abort"
            await rollout._stop(watcher, run)
            assert (await c.generate([1]))[1]["meta_info"]["finish_reason"]["type"] == "stop"

    asyncio.run(main())


def test_documents_leave_out_texts_that_begin_another():
    texts = ["ab", "abc", "", "x", "abc"]
    samples = [types.SimpleNamespace(response=t) for t in texts]
    assert sorted(rollout.documents(copy.copy(samples))) == ["abc", "x"]
