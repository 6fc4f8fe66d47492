# SPDX-License-Identifier: Apache-2.0
"""Are every replica and the router alive, and if not, what killed them?

A dead vLLM engine reaches the trainer only as failed trajectories; its cause stands in the engine's own log. The probe
below runs inside the server actor (War-RL's or verl's stock one alike) and brings the cause along.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from war_rl.trainers.verl.router import RESTARTED, RouterLost

T = TypeVar("T")


class ReplicaDead(RuntimeError):
    """Rollout replicas are dead, ``count`` of them. The message holds the engines' own errors."""

    def __init__(self, message: str, count: int = 1) -> None:
        super().__init__(message)
        self.count = count


@dataclass(frozen=True)
class ReplicaHealth:
    """One replica's state; ``cause`` says what is wrong with it, "" for a healthy one.

    ``silent``: it only has not answered, which a replica that is busy may not either.
    """

    server_id: str
    cause: str
    silent: bool = False


def probe(server: Any) -> str:
    """Runs inside the server actor: "" for a healthy engine, else what is known about its death."""
    engine = getattr(server, "engine", None)
    if engine is None or not getattr(engine, "errored", False):
        return ""
    manager = getattr(engine.engine_core.resources, "engine_manager", None)
    exits = []
    for process in getattr(manager, "processes", None) or ():
        code = process.exitcode
        if code is not None and code < 0:
            exits.append(f"{process.name} (pid {process.pid}) was killed by {signal.Signals(-code).name}")
        elif code is not None:
            exits.append(f"{process.name} (pid {process.pid}) exited with code {code}")
    text = "; ".join(exits) or "the engine stopped"
    last = _last_error()
    return f"{text}. Its last error: {last}" if last else text


def _last_error() -> str:
    """The last exception in this actor's log; "" where there is none or the log cannot be read."""
    try:
        lines = _log_lines()
    except (OSError, AttributeError):
        return ""
    # vLLM's clients report the death of the engine with EngineDeadError; the cause stands before it.
    errors = [line for line in lines if _ERROR.search(line) and "EngineDeadError" not in line]
    return _ERROR.search(errors[-1]).group(0).strip()[:500] if errors else ""  # type: ignore[union-attr]


_ERROR = re.compile(r"\b\w*(Error|Exception|Interrupt)\b: .*")


def _log_lines() -> list[str]:
    """The end of this actor's Ray log, where vLLM's engine process writes too."""
    folder = ray._private.worker._global_node.get_logs_dir_path()
    lines: list[str] = []
    for kind in ("out", "err"):
        for path in glob.glob(os.path.join(folder, f"worker-*-{os.getpid()}.{kind}")):
            with open(path, errors="replace") as file:
                lines += file.readlines()[-2000:]
    return lines


def check_replicas(servers: dict[str, Any], timeout_s: float) -> list[ReplicaHealth]:
    """Probe all replicas at once; one that does not answer in time, or whose actor died, counts as dead."""
    refs = {server_id: handle.__ray_call__.remote(probe) for server_id, handle in servers.items()}
    ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    result = []
    for server_id, ref in refs.items():
        silent = False
        try:
            cause = ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            cause, silent = f"no answer for {timeout_s:g} s", True
        except ray.exceptions.RayError as error:
            cause = f"its actor is gone: {error}"
        result.append(ReplicaHealth(server_id, cause, silent))
    return result


def _unfinished(server: Any) -> int:
    """Runs inside the server actor: requests that were handed to the engine and have not come back whole."""
    processor = getattr(getattr(server, "engine", None), "output_processor", None)
    return int(processor.get_num_unfinished_requests()) if processor is not None else 0


def unfinished_requests(servers: dict[str, Any], timeout_s: float) -> dict[str, int]:
    """How many requests each replica's engine has before it; 0 for one that does not answer."""
    counts = _ask_inside(servers, _unfinished, timeout_s)
    return {name: counts.get(name, 0) for name in servers}


def _ask_inside(servers: dict[str, Any], question: Callable[[Any], T], timeout_s: float) -> dict[str, T]:
    """What ``question`` returns inside each server actor; one that is gone, or does not answer in time, is left out."""
    refs = {name: server.__ray_call__.remote(question) for name, server in servers.items()}
    done, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
    answers: dict[str, T] = {}
    for name, ref in refs.items():
        if ref in done:
            with contextlib.suppress(ray.exceptions.RayError):
                answers[name] = ray.get(ref)
    return answers


def while_alive(call: Callable[[], T], check: Callable[[], None], every_s: float) -> T:
    """Result of ``call()``, run in a thread of its own, with ``check()`` called every ``every_s`` seconds meanwhile.

    For calls that wait without end when a replica dies: what ``check`` raises ends the wait. The call is then left
    behind; its thread keeps nobody from exiting.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="war-while-alive", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(every_s)
        if thread.is_alive():
            check()
    if errors:
        raise errors[0]
    return results[0]


class UpdateStuck(RuntimeError):
    """A weight update does not end although all that take part in it live."""


class UpdateWatch:
    """Called again and again while the weights of a step are on their way: does the update still get anywhere?

    Args:
        servers: actor handles of the replicas, by name.
        step: the training step whose weights they get.
        limit_s: ``war.fault.update_timeout_s``; 0 means no bound.
        clock: seconds, monotonic.
    """

    def __init__(self, servers: dict[str, Any], step: int, limit_s: float, clock: Callable[[], float]) -> None:
        self._servers = servers
        self._step = step
        self._limit = limit_s
        self._clock = clock
        self._began = clock()

    def __call__(self) -> None:
        """Raises:
        UpdateStuck: it has taken too long; names the replicas that have not got the weights.
        """
        if not self._limit or self._clock() - self._began < self._limit:
            return
        behind = self._behind()
        which = f"replicas without them: {', '.join(behind)}" if behind else "all replicas have them"
        raise UpdateStuck(
            f"the weights of step {self._step} have been on their way for {self._limit:g} s "
            f"(war.fault.update_timeout_s); {which}. All engines live: one hangs, or a training worker does"
        )

    def _behind(self) -> list[str]:
        versions = _ask_inside(self._servers, _version, _VERSION_TIMEOUT_S)
        return [name for name in self._servers if versions.get(name) != self._step]


_VERSION_TIMEOUT_S = 10.0


def _version(server: Any) -> Any:
    """Runs inside the server actor: the step that verl says its weights are of."""
    return server.global_steps


def check_router(router: Any, timeout_s: float) -> None:
    """Raises:
    RouterLost: War-RL's router actor is gone, was started again, or does not answer.
    """
    try:
        configured = ray.get(router.is_configured.remote(), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise RouterLost(f"the router actor has not answered for {timeout_s:g} s; the run cannot go on") from error
    except ray.exceptions.RayActorError as error:
        raise RouterLost(f"the router actor is gone ({error}); the run cannot go on") from error
    if not configured:
        raise RouterLost(RESTARTED)


def raise_if_dead(health: list[ReplicaHealth]) -> None:
    """Raises:
    ReplicaDead: naming each dead replica and its cause.
    """
    dead = [h for h in health if h.cause]
    if dead:
        raise ReplicaDead("; ".join(f"rollout replica {h.server_id} is dead: {h.cause}" for h in dead), len(dead))
