# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the slime package where it is not installed: its seams as contract.json records them, nothing more.

Groups, per-sample generation through the custom function's path, rewards, the order of the output, the HTTP client:
enough that War-RL's rollout function runs end to end. test_slime_contract.py holds it to the record.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import importlib
import inspect
import sys
import threading
import types
import uuid
from typing import Any

import httpx

from tests.trainers.slime.contract import recorded

PACKAGES = ("slime", "slime.rollout", "slime.utils")


def build() -> dict[str, types.ModuleType]:
    """The modules, by name."""
    modules = {name: types.ModuleType(name) for name in (*PACKAGES, *_FILLERS)}
    for name in PACKAGES:
        modules[name].__path__ = []  # type: ignore[attr-defined]
    for name, fill in _FILLERS.items():
        modules[name].__dict__.update(fill(modules))
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


def install() -> None:
    sys.modules.update(build())


def uninstall() -> None:
    for name in [n for n in sys.modules if n == "slime" or n.startswith("slime.")]:
        del sys.modules[name]


def _dataclass(name: str, path: str, namespace: dict[str, Any], **known: Any) -> type:
    fields: list[Any] = []
    for field, default in recorded()["dataclasses"][path].items():
        if field in known:
            fields.append((field, Any, known[field]))
        elif default.endswith("()"):
            fields.append((field, Any, dataclasses.field(default_factory=eval(default[:-2]))))
        elif default == "":
            fields.append((field, Any))
        else:
            fields.append((field, Any, dataclasses.field(default=eval(default))))
    return dataclasses.make_dataclass(name, fields, namespace=namespace)


def _types(modules: Any) -> dict[str, Any]:
    status = enum.Enum("Status", recorded()["status"])
    spec = _dataclass("SpecInfo", "slime.utils.types.Sample.SpecInfo", {})
    cache = dataclasses.make_dataclass("PrefixCacheInfo", [("cached_tokens", int, 0), ("total_prompt_tokens", int, 0)])

    def append_response_tokens(
        self: Any, args: Any = None, *, tokens: Any = None, log_probs: Any = None, trainable: bool = True,
        meta_info: Any = None, text: Any = None, update_terminal_info: bool = True,
    ) -> None:  # fmt: skip
        tokens = list(tokens or [])
        self.response += text or ""
        self.tokens = self.tokens + tokens
        self.response_length += len(tokens)
        self.loss_mask = (self.loss_mask or []) + [int(trainable)] * len(tokens)
        self.rollout_log_probs = (self.rollout_log_probs or []) + list(log_probs or [0.0] * len(tokens))
        kind = ((meta_info or {}).get("finish_reason") or {}).get("type")
        if kind:
            self.status = {"length": status.TRUNCATED, "abort": status.ABORTED, "stop": status.COMPLETED}[kind]

    extra = {"Status": status, "SpecInfo": spec, "append_response_tokens": append_response_tokens}
    sample = _dataclass(
        "Sample",
        "slime.utils.types.Sample",
        extra,
        status=dataclasses.field(default=status.PENDING),
        spec_info=dataclasses.field(default_factory=spec),
        prefix_cache_info=dataclasses.field(default_factory=cache),
    )
    return {"Sample": sample}


def _base_types(modules: Any) -> dict[str, Any]:
    train = _dataclass("RolloutFnTrainOutput", "slime.rollout.base_types.RolloutFnTrainOutput", {})
    evaluated = _dataclass("RolloutFnEvalOutput", "slime.rollout.base_types.RolloutFnEvalOutput", {})

    def call_rollout_fn(fn, *args, evaluation, **kwargs):  # type: ignore[no-untyped-def]
        return fn(*args, **kwargs, evaluation=evaluation)

    return {"RolloutFnTrainOutput": train, "RolloutFnEvalOutput": evaluated, "call_rollout_fn": call_rollout_fn}


def _async_utils(modules: Any) -> dict[str, Any]:
    loops: list[asyncio.AbstractEventLoop] = []

    def run(coro):  # type: ignore[no-untyped-def]
        if not loops:
            loops.append(asyncio.new_event_loop())
            threading.Thread(target=loops[0].run_forever, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coro, loops[0]).result()

    return {"run": run}


def _misc(modules: Any) -> dict[str, Any]:
    @functools.cache
    def load_function(path):  # type: ignore[no-untyped-def]
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)

    return {"load_function": load_function}


def _http_utils(modules: Any) -> dict[str, Any]:
    module = modules["slime.utils.http_utils"]

    def init_http_client(args):  # type: ignore[no-untyped-def]
        if module._http_client is None:
            module._http_client = httpx.AsyncClient(timeout=None, trust_env=False)

    async def post(url, payload, max_retries=60, headers=None):  # type: ignore[no-untyped-def]
        for attempt in range(max_retries):
            try:
                response = await module._http_client.post(url, json=payload, headers=headers)
                response.raise_for_status()
                return response.json()
            except httpx.HTTPError:
                if attempt == max_retries - 1:
                    raise
                await asyncio.sleep(1)

    return {"_http_client": None, "init_http_client": init_http_client, "post": post}


def _sglang_rollout(modules: Any) -> dict[str, Any]:
    out = modules["slime.rollout.sglang_rollout"].__dict__
    run = modules["slime.utils.async_utils"].__dict__
    misc = modules["slime.utils.misc"].__dict__
    http = modules["slime.utils.http_utils"].__dict__
    base = modules["slime.rollout.base_types"].__dict__
    states: list[Any] = []

    def state_of(args):  # type: ignore[no-untyped-def]
        if not states:
            states.append(types.SimpleNamespace(args=args, aborted=False, semaphore=asyncio.Semaphore(1000)))
        return states[0]

    async def generate(args, sample, sampling_params):  # type: ignore[no-untyped-def]
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        ids = sample.tokens or list(sample.prompt.encode())
        sample.tokens = ids
        body = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
        answer = await http["post"](url, body)
        pairs = answer["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[p[1] for p in pairs],
            log_probs=[p[0] for p in pairs],
            meta_info=answer["meta_info"],
            text=answer["text"],
        )
        return sample

    async def generate_and_rm(args, sample, sampling_params, evaluation=False):  # type: ignore[no-untyped-def]
        path = sample.generate_function_path or args.custom_generate_function_path
        function = out["generate"] if path is None else misc["load_function"](path)
        extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        sample = await function(args, sample, sampling_params, **extra)
        for one in sample if isinstance(sample, list) else [sample]:
            one.reward = await misc["load_function"](args.custom_rm_path)(args, one)
        return sample

    async def generate_and_rm_group(args, group, sampling_params, evaluation=False):  # type: ignore[no-untyped-def]
        for sample in group:
            sample.session_id = sample.session_id or str(uuid.uuid4())
        tasks = [out["generate_and_rm"](args, s, dict(sampling_params), evaluation=evaluation) for s in group]
        return await asyncio.gather(*tasks)

    async def all_groups(args, groups):  # type: ignore[no-untyped-def]
        params = {
            "temperature": args.rollout_temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": args.rollout_max_response_len,
        }
        state = state_of(args)
        tasks = [out["generate_and_rm_group"](state.args, g, params) for g in groups]
        return await asyncio.gather(*tasks)

    def generate_rollout(args, rollout_id, data_source, evaluation=False):  # type: ignore[no-untyped-def]
        if evaluation:
            return base["RolloutFnEvalOutput"](data={})
        done = run["run"](all_groups(args, data_source.get_samples(args.rollout_batch_size)))
        done.sort(key=lambda g: (g[0][0] if isinstance(g[0], list) else g[0]).index)
        return base["RolloutFnTrainOutput"](samples=done, metrics={})

    return {
        "GenerateState": state_of,
        "generate": generate,
        "generate_and_rm": generate_and_rm,
        "generate_and_rm_group": generate_and_rm_group,
        "generate_rollout": generate_rollout,
    }


_FILLERS = {
    "slime.utils.types": _types,
    "slime.rollout.base_types": _base_types,
    "slime.utils.async_utils": _async_utils,
    "slime.utils.misc": _misc,
    "slime.utils.http_utils": _http_utils,
    "slime.rollout.sglang_rollout": _sglang_rollout,
}
