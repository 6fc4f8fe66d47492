# SPDX-License-Identifier: Apache-2.0
"""The HTTP router for slime: stands where SGLang's router stands, places turns with :class:`GlobalScheduler`.

    python -m war_rl.trainers.slime.router --host 127.0.0.1 --port 30000 --policy cost

slime's engines register themselves (``POST /workers``), slime's rollout posts to ``/generate``. War-RL's own calls lie
below ``/war/``; docs/slime.md lists them all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from war_rl.config import ConfigError
from war_rl.rollout.scheduler import GlobalScheduler
from war_rl.trainers.prometheus import SchedulerCollector, look
from war_rl.trainers.shell import SchedulerShell
from war_rl.trainers.slime.corpus import CorpusPlan, CorpusPublisher
from war_rl.trainers.slime.exposition import StatsCollector, StepValues, exposition
from war_rl.trainers.slime.proxy import Proxy
from war_rl.trainers.slime.sessions import SessionTable
from war_rl.trainers.slime.settings import RouterConfig, parse_args
from war_rl.trainers.slime.turns import error_response
from war_rl.trainers.slime.workers import Worker, WorkerError, Workers
from war_rl.types import TrajectoryId

logger = logging.getLogger(__name__)

BACKLOG = 4096
"""Connections that may wait to be accepted: a step's trajectories all arrive at once."""
WANTED_FILES = 16_384
"""Below this many open files the log says so."""


class SlimeRouter:
    """The application: handlers, registry, scheduler and feed, on one event loop."""

    def __init__(self, config: RouterConfig, run: str = "") -> None:
        self.config = config
        self._run = run or f"{id(self) & 0xFFFFFF:x}"
        self.registry = CollectorRegistry()
        self.shell = SchedulerShell(GlobalScheduler(config.scheduler, seed=config.seed))
        self.sessions = SessionTable(config.block_size)
        self.announced_step: int | None = None
        self.expired_sessions = 0
        self._taken = StepValues()
        self._tasks: list[asyncio.Task[None]] = []

    def app(self) -> web.Application:
        """The web application; the HTTP client and the background tasks live between its start and its end."""
        app = web.Application(client_max_size=self.config.max_body_mb * 2**20)
        app.cleanup_ctx.append(self._life)
        add = app.router.add_route
        for path in ("/generate", "/v1/chat/completions", "/v1/completions"):
            add("POST", path, self._generate)
        add("PUT", "/generate", self._generate)
        add("POST", "/workers", self._add_worker)
        add("GET", "/workers", self._list_workers)
        add("GET", "/workers/{id}", self._get_worker)
        add("DELETE", "/workers/{id}", self._remove_worker)
        for path in ("/health", "/liveness"):
            add("GET", path, self._alive)
        add("GET", "/readiness", self._ready)
        for path in ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            add("GET", path, self._ask_one)
        for path in ("/flush_cache", "/abort_request"):
            add("POST", path, self._ask_all)
        add("GET", "/metrics", self._metrics)
        add("GET", "/war/stats", self._stats)
        add("POST", "/war/take_stats", self._take_stats)
        add("POST", "/war/step", self._step)
        add("POST", "/war/begin", self._begin)
        add("POST", "/war/finish", self._finish)
        add("POST", "/war/abort", self._abort)
        add("POST", "/war/resume", self._resume)
        return app

    async def _life(self, app: web.Application) -> Any:
        config = self.config
        total = config.request_timeout_s or None
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=config.connect_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=config.keepalive_s)
        # Requests go to the engines and nowhere else: no proxy of the environment, no cookies, no compression.
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        ) as client:
            self.client = client
            self.corpus = CorpusPublisher(CorpusPlan(config.corpus, self._run), client)
            self.workers = Workers(
                self.shell,
                client,
                block_size=config.block_size,
                health_path=config.health_path,
                interval_s=config.health_interval_s,
                timeout_s=config.health_timeout_s,
                threshold=config.health_failures,
                on_ready=lambda w: self.corpus.server_ready(w.url),
                abandon=config.health_abandon_failures,
                on_lost=lambda w: self.corpus.server_lost(w.url),
                on_abandoned=lambda w: self.proxy.abandon(w.url),
            )
            self.proxy = Proxy(
                self.shell,
                self.workers,
                self.sessions,
                client,
                retries=config.retries,
                registry=self.registry,
                on_weight_version=self._new_weights,
            )
            self.registry.register(StatsCollector(self._own_stats))
            self.registry.register(SchedulerCollector(lambda: look(self.shell.scheduler)))
            self.corpus.start()
            for url in config.worker_urls:
                await self.workers.add(url)
            self._tasks = [asyncio.create_task(self.workers.watch()), asyncio.create_task(self._sweep())]
            yield
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.corpus.close()

    # ------------------------------------------------------------------ requests

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self.proxy.handle(request)

    async def _ask_one(self, request: web.Request) -> web.Response:
        workers = self.workers.healthy()
        if not workers:
            return error_response(503, "no_available_workers", "no worker is registered and healthy")
        return (await self._ask(workers[:1], request))[0]

    async def _ask_all(self, request: web.Request) -> web.Response:
        workers = self.workers.all()
        if request.path == "/abort_request":
            await self._abort_waiting(request)
            workers = self.workers.healthy()
        answers = await self._ask(workers, request)
        if request.path == "/flush_cache":
            self.shell.weights_updated(self.sessions.step)
        failed = {w.url: a.status for w, a in zip(workers, answers, strict=True) if a.status != 200}
        body = {"status": "error" if failed else "success", "workers": len(workers), "failed": failed}
        return web.json_response(body, status=502 if failed else 200)

    async def _abort_waiting(self, request: web.Request) -> None:
        """Turns that no engine knows yet are aborted here, by SGLang's rule: all, or those with the request id."""
        body = await _json_object(request)
        rid = str(body.get("rid") or "")
        if rid or body.get("abort_all"):
            self.proxy.abort_waiting("" if body.get("abort_all") else rid)

    async def _ask(self, workers: Sequence[Worker], request: web.Request) -> list[web.Response]:
        data = await request.read()
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")} if data else {}

        async def one(worker: Worker) -> web.Response:
            url = worker.url + request.path_qs
            try:
                async with self.client.request(request.method, url, data=data or None, headers=headers) as answer:
                    body = await answer.read()
                    return web.Response(body=body, status=answer.status, content_type=answer.content_type)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                return error_response(502, "bad_gateway", f"{worker.url}: {error}")

        return list(await asyncio.gather(*(one(w) for w in workers)))

    # ------------------------------------------------------------------ workers, as SGLang's router has them

    async def _add_worker(self, request: web.Request) -> web.Response:
        body = await _json_object(request)
        try:
            worker = await self.workers.add(str(body.get("url", "")), str(body.get("worker_type") or "regular"))
        except WorkerError as error:
            logger.error("a worker was not registered: %s", error)
            return web.json_response({"error": str(error), "code": "BAD_REQUEST"}, status=400)
        answer = {
            "status": "accepted",
            "worker_id": worker.id,
            "url": worker.url,
            "location": f"/workers/{worker.id}",
            "message": "registered" if worker.healthy else "registered; takes turns once it answers health checks",
        }
        return web.json_response(answer, status=202)

    async def _list_workers(self, request: web.Request) -> web.Response:
        running = self.shell.running()
        workers = self.workers.all()
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)}
        listed = [w.as_json(running.get(w.url, 0)) for w in workers]
        return web.json_response({"workers": listed, "total": len(listed), "stats": stats})

    async def _get_worker(self, request: web.Request) -> web.Response:
        worker = self.workers.get(request.match_info["id"])
        if worker is None:
            return _no_worker(request.match_info["id"])
        return web.json_response(worker.as_json(self.shell.running().get(worker.url, 0)))

    async def _remove_worker(self, request: web.Request) -> web.Response:
        worker = self.workers.remove(request.match_info["id"])
        if worker is None:
            return _no_worker(request.match_info["id"])
        return web.json_response({"status": "accepted", "worker_id": worker.id, "message": "removed"}, status=202)

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _ready(self, request: web.Request) -> web.Response:
        healthy, total = len(self.workers.healthy()), len(self.workers.all())
        body = {"status": "ready" if healthy else "not ready", "healthy_workers": healthy, "total_workers": total}
        return web.json_response(body, status=200 if healthy else 503)

    # ------------------------------------------------------------------ War-RL's own calls

    async def _step(self, request: web.Request) -> web.Response:
        """A step's rollout begins: earlier trajectories are over, and so is all KV."""
        step = int((await _json_object(request))["step"])
        self.announced_step = step
        self._begin_step(step)
        return web.json_response({"step": step, "policy": self.config.scheduler.policy})

    async def _begin(self, request: web.Request) -> web.Response:
        body = await _json_object(request)
        trajectory = TrajectoryId(**body["trajectory"])
        self.sessions.begin(trajectory, str(body.get("routing_key") or ""), self.shell.clock())
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.Response:
        """A trajectory is over; its text may be drafted from. Answers with its turns."""
        body = await _json_object(request)
        trajectory = TrajectoryId(**body["trajectory"])
        session = self.sessions.finish(trajectory)
        self.shell.finish(trajectory)
        self.corpus.publish(str(d) for d in body.get("documents") or ())
        turns = [asdict(r) for r in session.records] if session is not None else []
        return web.json_response({"turns": turns})

    async def _abort(self, request: web.Request) -> web.Response:
        """What waits, and what comes until the rollout is over, is answered as aborted."""
        return web.json_response({"turned_away": self.proxy.abort()})

    async def _resume(self, request: web.Request) -> web.Response:
        """The rollout is over; an evaluation may follow."""
        self.proxy.resume()
        return web.json_response({})

    async def _take_stats(self, request: web.Request) -> web.Response:
        """Values since the last call: the scheduler's of one kind of trajectory, the router's and the feed's own."""
        validate = bool((await _json_object(request)).get("validate"))
        sched = self.shell.scheduler.take_step_stats(validate)
        return web.json_response({"sched": sched, "own": self._taken.take(self._own_stats())})

    async def _stats(self, request: web.Request) -> web.Response:
        body = {
            "policy": self.config.scheduler.policy,
            "step": self.sessions.step,
            "values": self.stats(),
            "workers": [w.as_json(self.shell.running().get(w.url, 0)) for w in self.workers.all()],
            "corpora_unsupported": self.corpus.unsupported(),
        }
        return web.json_response(body)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=exposition(self.registry), content_type="text/plain", charset="utf-8")

    def stats(self) -> dict[str, float]:
        """All values, flat names."""
        return {**self.shell.scheduler.counters(), **self._own_stats()}

    def _own_stats(self) -> dict[str, float]:
        return {
            **{f"router/{k}": v for k, v in self.proxy.counts.items()},
            **{f"router/session_by/{k}": float(v) for k, v in self.sessions.counts.items()},
            "router/sessions": float(len(self.sessions)),
            "router/sessions_expired": float(self.expired_sessions),
            "router/inflight": float(self.shell.inflight),
            "router/workers": float(len(self.workers.all())),
            "router/workers_healthy": float(len(self.workers.healthy())),
            "router/workers_lost": float(self.workers.lost_total),
            **self.corpus.stats(),
        }

    # ------------------------------------------------------------------ inside

    def _begin_step(self, step: int) -> None:
        self.sessions.step = step
        self.proxy.resume()
        for session in self.sessions.older_than(step):
            self._end(session.trajectory)
        self.shell.weights_updated(step)
        self.corpus.begin_step(step)

    def _new_weights(self, version: str) -> None:
        """An answer came from other weights than the last: the step boundary, where nobody announces it."""
        if self.announced_step is None:
            logger.info("weights %s: what the engines had cached is gone", version)
            self._begin_step(self.sessions.step + 1)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(30.0, self.config.session_ttl_s / 4))
            for session in self.sessions.idle_since(self.shell.clock() - self.config.session_ttl_s):
                self.expired_sessions += 1
                self._end(session.trajectory)

    def _end(self, trajectory: TrajectoryId) -> None:
        self.sessions.finish(trajectory)
        self.shell.finish(trajectory)


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise web.HTTPBadRequest(text=f"not JSON: {error}") from error
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text="the body must be a JSON object")
    return body


def _no_worker(worker_id: str) -> web.Response:
    return web.json_response({"error": f"Worker {worker_id} not found", "code": "WORKER_NOT_FOUND"}, status=404)


async def serve(config: RouterConfig, started: asyncio.Event | None = None) -> None:
    """Serve until SIGTERM or SIGINT; running requests get ``shutdown_grace_s`` to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        SlimeRouter(config).app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=config.shutdown_grace_s,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=BACKLOG)
        await site.start()
        logger.info("policy %s; listening on %s", config.scheduler.policy, runner.addresses)
        print(json.dumps({"listening": runner.addresses}), flush=True)
        if started is not None:
            started.set()
        await stop.wait()
        logger.info("stopping; running requests have %g s", config.shutdown_grace_s)
    finally:
        await runner.cleanup()


def allow_many_connections() -> None:
    """Each running request holds two connections: take all the open files that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < WANTED_FILES:
        logger.warning("at most %d open files (ulimit -n): about %d requests at once", hard, hard // 2)


def main(argv: Sequence[str] | None = None) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = parse_args(argv)
        GlobalScheduler(config.scheduler)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    allow_many_connections()
    try:
        import uvloop
    except ImportError:
        logger.info("uvloop is not installed: the standard event loop serves, somewhat slower")
        asyncio.run(serve(config))
    else:
        uvloop.run(serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
