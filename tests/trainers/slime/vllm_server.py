# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine behind the part of SGLang's HTTP interface that slime and the router use.

python -m tests.trainers.slime.vllm_server PORT
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

from aiohttp import web


class Engine:
    """vLLM's engine on a thread of this process: a second process would import everything once more.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 must be set.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outputs: dict[str, asyncio.Queue[Any]] = {}
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        mine = self._outputs[name] = asyncio.Queue()
        self._jobs.put(lambda: self._engine.add_request(name, prompt, params))
        try:
            while True:
                output = await mine.get()
                if output is None:
                    return
                yield output
                if output.finished:
                    return
        finally:
            del self._outputs[name]
            self._jobs.put(lambda: self._engine.abort_request([name]))

    def abort_all(self) -> None:
        for mine in self._outputs.values():
            mine.put_nowait(None)

    def _run(self) -> None:
        while True:
            idle = not self._engine.has_unfinished_requests()
            while idle or not self._jobs.empty():
                self._jobs.get()()
                idle = False
            for output in self._engine.step():
                self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: Any) -> None:
        mine = self._outputs.get(output.request_id)
        if mine is not None:
            mine.put_nowait(output)


class Server:
    def __init__(self, engine: Any, kv_tokens: int) -> None:
        self.engine = engine
        self.kv_tokens = kv_tokens
        self.running: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/server_info", self.info)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_post("/abort_request", self.abort)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        stream = bool(body.get("stream"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if stream:
            await response.prepare(request)
        answer: dict[str, Any] = {}
        name = uuid4().hex
        self.running.add(name)
        try:
            prompt = {"prompt_token_ids": body["input_ids"]}
            async for output in self.engine.generate(prompt, sampling(body["sampling_params"]), name):
                answer = as_sglang(name, output)
                if stream:
                    await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        finally:
            self.running.discard(name)
        if not stream:
            return web.json_response(answer)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"max_total_num_tokens": self.kv_tokens, "max_running_requests": 64, "dp_size": 1})

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": len(self.running), "num_waiting_reqs": 0}]})

    async def abort(self, request: web.Request) -> web.Response:
        self.engine.abort_all()
        return web.json_response({})


def sampling(params: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    top_k = params.get("top_k", -1)
    return SamplingParams(
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=0 if top_k in (-1, None) else top_k,
        max_tokens=params.get("max_new_tokens", 16),
        stop=params.get("stop"),
        stop_token_ids=params.get("stop_token_ids"),
        skip_special_tokens=params.get("skip_special_tokens", True),
        logprobs=0,
    )


def as_sglang(name: str, output: Any) -> dict[str, Any]:
    part = output.outputs[0]
    ids = list(part.token_ids)
    logprobs = [[entry[token].logprob, token, None] for entry, token in zip(part.logprobs or (), ids, strict=False)]
    meta = {
        "id": name,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(ids),
        "cached_tokens": output.num_cached_tokens or 0,
        "finish_reason": {"type": part.finish_reason} if part.finish_reason else None,
        "weight_version": "default",
        "output_token_logprobs": logprobs,
    }
    return {"text": part.text, "output_ids": ids, "meta_info": meta}


async def main(port: int) -> None:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from tests.support.tiny_model import tiny_model_dir

    args = EngineArgs(
        model=str(tiny_model_dir()),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        block_size=16,
        num_gpu_blocks_override=1024,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    engine = Engine(LLMEngine.from_engine_args(args))
    runner = web.AppRunner(Server(engine, 1024 * 16).app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
