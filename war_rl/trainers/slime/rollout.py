# SPDX-License-Identifier: Apache-2.0
"""Drop-in for slime's default rollout function.

    --rollout-function-path war_rl.trainers.slime.rollout.generate_rollout

slime's own rollout runs, with all its filters, hooks and checks; only the function that makes one sample is wrapped.
The wrapper says to War-RL's router which trajectory the sample's requests belong to, when it starts and ends, and what
it wrote. So samples hold exactly what slime would have put there.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from war_rl.config import ConfigError
from war_rl.metrics import step_metrics
from war_rl.trainers.slime.sessions import TRAJECTORY_HEADER
from war_rl.types import TrajectoryId, TrajectoryRecord, TurnRecord, encode_request_id

logger = logging.getLogger(__name__)

GENERATE_PATH = "war_rl.trainers.slime.rollout.generate"
ATTEMPTS = 5
"""How often a call to the router is tried, with a growing pause, before the rollout fails or goes on without it."""
ABORT_POLL_S = 0.2
"""How often the end of slime's rollout is looked for, to free turns that wait in the router. Unit: seconds."""

_HEADER: ContextVar[str] = ContextVar("war_trajectory_header", default="")


@dataclass
class _Rollout:
    """One call of :func:`generate_rollout`."""

    rollout_id: int
    router: str
    inner: Callable[..., Awaitable[Any]]
    client: httpx.AsyncClient | None = None
    sessions: dict[Any, int] = field(default_factory=dict)
    records: list[TrajectoryRecord] = field(default_factory=list)
    accepted: dict[str, float] = field(default_factory=dict)
    unannounced: int = 0
    warned: bool = False
    aborted: bool = False

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One of the router's own calls.

        Raises:
            httpx.HTTPError: the router did not answer.
        """
        if self.client is None:
            # trust_env: the router is inside; a proxy of the environment is not for it.
            self.client = httpx.AsyncClient(base_url=self.router, timeout=30.0, trust_env=False)
        for attempt in range(ATTEMPTS):
            try:
                response = await self.client.post(path, json=body)
                response.raise_for_status()
                return dict(response.json())
            except httpx.TransportError:
                if attempt == ATTEMPTS - 1:
                    raise
                await asyncio.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    async def tell(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Like :meth:`call`, but a sample must not fail because its announcement did: said once, counted."""
        try:
            return await self.call(path, body)
        except (httpx.HTTPError, ValueError) as error:
            self.unannounced += 1
            if not self.warned:
                self.warned = True
                logger.error("War-RL's router does not take %s (%s): the rollout goes on without it", path, error)
            return {}


_ACTIVE: _Rollout | None = None


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's ``generate_rollout``: the same arguments, the same samples; ``war/...`` values join its metrics.

    Evaluation is slime's own, untouched.

    Raises:
        ConfigError: partial rollout is on, or the router's address is missing or not War-RL's router.
    """
    from slime.rollout import sglang_rollout
    from slime.utils.async_utils import run

    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    check_arguments(args)
    rollout = _Rollout(rollout_id, router_address(args), _inner_generate(args))
    run(_begin(rollout))
    _install_header_hook(args, rollout.router)
    began = time.monotonic()
    with _wrapped(args, rollout):
        watcher = run(_start(_free_waiting_turns(rollout, sglang_rollout.GenerateState(args))))
        try:
            output = sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=False)
        finally:
            run(_stop(watcher, rollout))
    rollout.unannounced += _went_past(output.samples)
    metrics = run(_end(rollout, time.monotonic() - began))
    output.metrics = {**(output.metrics or {}), **metrics}
    _define_wandb_axis(args)
    return output


def check_arguments(args: Any) -> None:
    """Refuse what contradicts synchronous rollouts.

    Raises:
        ConfigError: ``--partial-rollout``.
    """
    if getattr(args, "partial_rollout", False):
        raise ConfigError(
            "--partial-rollout continues samples of an older policy; War-RL keeps every step on one policy. Leave the "
            "flag out, or use --rollout-function-path slime.rollout.sglang_rollout.generate_rollout"
        )


def router_address(args: Any) -> str:
    """The router's base URL from slime's arguments.

    Raises:
        ConfigError: slime has no router address.
    """
    ip, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    if not ip or not port:
        raise ConfigError(
            f"--sglang-router-ip={ip!r} --sglang-router-port={port!r}: no router. Start `python -m "
            "war_rl.trainers.slime.router --host IP --port 30000` and pass its address with these two flags"
        )
    return f"http://{ip}:{port}"


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """slime's custom generate function: the user's own (or slime's default) inside an announced trajectory."""
    rollout = _ACTIVE
    if rollout is None:
        raise RuntimeError(f"{GENERATE_PATH} runs only inside War-RL's generate_rollout; do not set it yourself")
    extra = {"evaluation": evaluation} if "evaluation" in inspect.signature(rollout.inner).parameters else {}
    trajectory = identify(sample, rollout)
    record = TrajectoryRecord(trajectory, started=time.time())
    await rollout.tell(
        "/war/begin", {"trajectory": asdict(trajectory), "routing_key": getattr(sample, "session_id", None) or ""}
    )
    token = _HEADER.set(encode_request_id(trajectory, 0))
    result: Any = None
    try:
        result = await rollout.inner(args, sample, sampling_params, **extra)
        return result
    except BaseException as error:
        record.status, record.error = "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        _HEADER.reset(token)
        # Shielded: a cancelled sample, too, must give back what it holds in the router.
        await asyncio.shield(_finish(rollout, record, result))


def identify(sample: Any, rollout: _Rollout) -> TrajectoryId:
    """The sample's trajectory: its group, its place in it, this rollout as the step, and a name of the prompt."""
    group = sample.group_index
    if group is None:
        # Without a group of its own, each sample is one.
        group = f"sample-{sample.index if sample.index is not None else id(sample)}"
    session = rollout.sessions.get(group, 0)
    rollout.sessions[group] = session + 1
    name = hashlib.blake2b(repr(sample.prompt).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return TrajectoryId(uid=f"{rollout.rollout_id}-{group}", session=session, step=rollout.rollout_id, index=name)


async def _finish(rollout: _Rollout, record: TrajectoryRecord, result: Any) -> None:
    samples = result if isinstance(result, list) else [result] if result is not None else []
    kinds = {getattr(s.status, "value", str(s.status)) for s in samples}
    if kinds & {"aborted", "failed"}:
        record.status, record.error = "failed", record.error or ", ".join(sorted(kinds))
    elif "truncated" in kinds:
        record.status = "truncated"
    record.finished = time.time()
    record.response_tokens = sum(s.response_length for s in samples)
    record.env_seconds = sum(getattr(s, "non_generation_time", 0.0) for s in samples)
    whole = kinds and not kinds & {"aborted", "failed", "pending"}
    body = {"trajectory": asdict(record.trajectory), "documents": documents(samples) if whole else []}
    answer = await rollout.tell("/war/finish", body)
    record.turns = [TurnRecord(**turn) for turn in answer.get("turns", ())]
    rollout.records.append(record)
    for sample in samples:
        for name, counter in _SPEC_FIELDS.items():
            count = getattr(getattr(sample, "spec_info", None), name, 0)
            rollout.accepted[counter] = rollout.accepted.get(counter, 0.0) + count


_SPEC_FIELDS = {
    "spec_verify_ct": "spec_decode_num_drafts",
    "spec_draft_token_num": "spec_decode_num_draft_tokens",
    "spec_accept_token_num": "spec_decode_num_accepted_tokens",
}
"""Counts of slime's ``Sample.SpecInfo`` under the names of :data:`war_rl.metrics.ENGINE_COUNTERS`."""


def documents(samples: list[Any]) -> list[str]:
    """The responses' texts, without those that begin another: samples of one trajectory often share their start."""
    texts = sorted({s.response for s in samples if s.response}, key=len, reverse=True)
    kept: list[str] = []
    for text in texts:
        if not any(k.startswith(text) for k in kept):
            kept.append(text)
    return kept


# ---------------------------------------------------------------------- around the rollout


async def _begin(rollout: _Rollout) -> None:
    try:
        await rollout.call("/war/step", {"step": rollout.rollout_id})
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"--sglang-router-ip/--sglang-router-port: {rollout.router} is not War-RL's router ({error}). Start it "
            "with `python -m war_rl.trainers.slime.router`, or use slime's own --rollout-function-path"
        ) from error
    # What happened between the steps (an evaluation) does not belong to this one.
    await rollout.tell("/war/take_stats", {"validate": False})


async def _end(rollout: _Rollout, seconds: float) -> dict[str, float]:
    taken = await rollout.tell("/war/take_stats", {"validate": False})
    sched = taken.get("sched", {})
    values = step_metrics(rollout.records, seconds=seconds, engine=rollout.accepted, sched=sched, spec={})
    values |= {f"war/{name}": float(value) for name, value in taken.get("own", {}).items()}
    if rollout.client is not None:
        await rollout.client.aclose()
    # Nobody counts preemptions here; 0 would be taken for a measurement.
    values.pop("war/rollout/preemptions", None)
    return values | {"war/rollout/unannounced": float(rollout.unannounced)}


def _went_past(groups: list[Any]) -> int:
    """How many samples have a generate function of their own: slime prefers it to ours, so nobody announced them."""
    flat = [s for group in groups for entry in group for s in (entry if isinstance(entry, list) else [entry])]
    count = sum(1 for s in flat if getattr(s, "generate_function_path", None))
    if count:
        _say_once(
            "samples with a generate_function_path of their own go past War-RL's rollout function: their requests are "
            "scheduled by routing key or prompt, and nothing is drafted from them. Use --custom-generate-function-path"
        )
    return count


async def _free_waiting_turns(rollout: _Rollout, state: Any) -> None:
    """slime ends a rollout by aborting on the engines; turns that still wait in the router must end as well."""
    while not state.aborted:
        await asyncio.sleep(ABORT_POLL_S)
    rollout.aborted = True
    await rollout.tell("/war/abort", {})


async def _start(coroutine: Any) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(coroutine)


async def _stop(task: asyncio.Task[None], rollout: _Rollout) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    if rollout.aborted:
        # Whatever comes before the next step, an evaluation say, is not part of the rollout that was aborted.
        await rollout.tell("/war/resume", {})


@contextmanager
def _wrapped(args: Any, rollout: _Rollout) -> Iterator[None]:
    """slime's loop calls :func:`generate`; afterwards the arguments are as they were."""
    global _ACTIVE
    from slime.rollout.sglang_rollout import GenerateState

    # slime keeps the arguments of its first rollout or evaluation; ours may be another object.
    holders = {id(a): a for a in (args, GenerateState(args).args)}.values()
    before = [(a, a.custom_generate_function_path) for a in holders]
    for holder in holders:
        holder.custom_generate_function_path = GENERATE_PATH
    _ACTIVE = rollout
    try:
        yield
    finally:
        _ACTIVE = None
        for holder, path in before:
            holder.custom_generate_function_path = path


def _inner_generate(args: Any) -> Callable[..., Awaitable[Any]]:
    from slime.rollout import sglang_rollout
    from slime.utils.misc import load_function

    path = args.custom_generate_function_path
    return sglang_rollout.generate if path is None else load_function(path)  # type: ignore[no-any-return]


_HOOKED = "_war_trajectory_hook"


def _install_header_hook(args: Any, router: str) -> None:
    """Requests of slime's HTTP client to the router carry the trajectory of the sample they were made for.

    Custom generate functions post without any routing key; the header is what tells their requests apart.
    """
    from slime.utils import http_utils

    if getattr(args, "use_distributed_post", False):
        _say_once(
            "--use-distributed-post sends requests from other processes, which do not know the trajectory: the router "
            "goes by routing keys (--router-policy consistent_hashing) and prompts"
        )
    client = http_utils._http_client
    if client is None or getattr(client, _HOOKED, "") == router:
        return
    target = httpx.URL(router)

    async def add_header(request: httpx.Request) -> None:
        header = _HEADER.get()
        if header and (request.url.host, request.url.port) == (target.host, target.port):
            request.headers[TRAJECTORY_HEADER] = header

    hooks = client.event_hooks
    hooks["request"] = [*hooks["request"], add_header]
    client.event_hooks = hooks
    setattr(client, _HOOKED, router)


_SAID: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        logger.error(text)


def _define_wandb_axis(args: Any) -> None:
    """``war/...`` values are drawn over slime's own step axis."""
    if not getattr(args, "use_wandb", False) or "axis" in _SAID:
        return
    import wandb

    if wandb.run is not None:
        wandb.define_metric("war/*", step_metric="rollout/step")
        _SAID.add("axis")
