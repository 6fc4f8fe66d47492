# SPDX-License-Identifier: Apache-2.0
"""Fake SGLang servers: what the router sees of an engine, without an engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from war_rl.trainers.slime.router import SlimeRouter
from war_rl.trainers.slime.settings import RouterConfig


class FakeEngine:
    """Answers ``/generate`` with tokens that follow from the prompt alone; speaks n-gram corpora if ``corpora``."""

    def __init__(self, *, delay: float = 0.0, corpora: str = "missing", kv_tokens: int = 100_000) -> None:
        self.delay = delay
        self.corpora_mode = corpora
        self.kv_tokens = kv_tokens
        self.corpora: dict[str, list[str]] = {}
        self.calls: list[tuple[str, Any]] = []
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.statuses: list[int] = []
        self.break_after: int | None = None
        self.stall_after: int | None = None
        self.deaf = False
        self.running = 0
        self.cancelled = 0
        self.version = "1"
        self.transports: set[Any] = set()
        self.hold = asyncio.Event()
        self.hold.set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/abort_request", self._models)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/server_info", self._info)
        if self.corpora_mode != "missing":
            app.router.add_post("/add_external_corpus", self._add)
            app.router.add_post("/remove_external_corpus", self._remove)
            app.router.add_get("/list_external_corpora", self._list)
        app.router.add_post("/flush_cache", self._models)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, None))
        if self.deaf:
            return web.Response(status=503)
        return web.json_response({"data": []})

    async def _info(self, request: web.Request) -> web.Response:
        ngram = {"speculative_algorithm": "NGRAM"} if self.corpora_mode == "on" else {}
        return web.json_response({"max_total_num_tokens": self.kv_tokens, "dp_size": 1, "model_path": "m", **ngram})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.transports.add(request.transport)
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        if self.statuses:
            return web.json_response({"error": "no"}, status=self.statuses.pop(0))
        self.running += 1
        try:
            await asyncio.sleep(self.delay)
            await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        ids = body.get("input_ids") or list(str(body.get("text")).encode())
        wanted = int(body["sampling_params"].get("max_new_tokens", 4))
        digest = hashlib.sha256(json.dumps(ids).encode()).digest()
        new = [digest[i % 32] for i in range(wanted)]
        if not body.get("stream"):
            return web.json_response(self._answer(ids, new))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for count in range(1, wanted + 1):
            await response.write(b"data: " + json.dumps(self._answer(ids, new[:count])).encode() + b"\n\n")
            if self.stall_after == count:
                await asyncio.Event().wait()
            if self.break_after == count:
                assert request.transport is not None
                await asyncio.sleep(0.01)
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        return response

    def _answer(self, ids: list[int], new: list[int]) -> dict[str, Any]:
        meta = {
            "id": "x",
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(ids),
            "completion_tokens": len(new),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": [[-0.5, t, None] for t in new],
        }
        return {"text": "".join(chr(97 + t % 26) for t in new), "output_ids": new, "meta_info": meta}

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("add", body))
        if self.corpora_mode == "off":
            return _refused("Ngram speculative decoding is not enabled.")
        if self.corpora_mode == "busy":
            self.corpora_mode = "on"
            return _refused("Another corpus load is already in progress.")
        if self.corpora_mode == "full":
            return _refused("External corpus exceeds the remaining token budget.")
        if body["corpus_id"] in self.corpora:
            return _refused(f"External corpus '{body['corpus_id']}' already exists.")
        self.corpora[body["corpus_id"]] = body["documents"]
        loaded = sum(len(d) for d in body["documents"])
        return web.json_response({"success": True, "corpus_id": body["corpus_id"], "loaded_token_count": loaded})

    async def _remove(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(("remove", body))
        self.corpora.pop(body["corpus_id"], None)
        return web.json_response({"success": True, "message": "removed"})

    async def _list(self, request: web.Request) -> web.Response:
        self.calls.append(("list", None))
        if self.corpora_mode == "off":
            return _refused("Ngram speculative decoding is not enabled.")
        counts = {k: sum(len(d) for d in v) for k, v in self.corpora.items()}
        return web.json_response({"success": True, "corpus_token_counts": counts, "message": ""})


def _refused(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)


class Cluster:
    """A router in front of fake engines."""

    def __init__(
        self, client: TestClient[Any, Any], router: SlimeRouter, servers: list[TestServer], engines: Any
    ) -> None:
        self.client = client
        self.engines = engines
        self.router = router
        self.servers = servers
        self.urls = [f"http://{s.host}:{s.port}" for s in servers]

    async def generate(self, ids: list[int], headers: dict[str, str] | None = None, **extra: Any) -> Any:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, **extra}
        async with self.client.post("/generate", json=body, headers=headers) as response:
            return response.status, await response.json()

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        async with self.client.request(method, path, json=body) as response:
            return response.status, await response.json()

    async def stop(self, index: int) -> None:
        """The engine dies: connections break, and nobody listens any more."""
        for transport in self.engines[index].transports:
            if transport is not None:
                transport.abort()
        await self.servers[index].close()


@asynccontextmanager
async def cluster(*engines: FakeEngine, register: bool = True, **settings: Any) -> AsyncIterator[Cluster]:
    """Engines, router and a client of it; engines register as slime's do."""
    servers = [TestServer(e.app()) for e in engines]
    for server in servers:
        await server.start_server(shutdown_timeout=0.0)
    router = SlimeRouter(RouterConfig(**settings), run="test")
    async with TestClient(TestServer(router.app()), timeout=None) as client:
        made = Cluster(client, router, servers, engines)
        for url in made.urls if register else ():
            status, _ = await made.call("POST", "/workers", {"url": url, "worker_type": "regular"})
            assert status == 202
        yield made
    for server in servers:
        await server.close()


async def until(condition: Any, rounds: int = 500) -> None:
    """Let the loop run until the condition holds."""
    for _ in range(rounds):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never held")
