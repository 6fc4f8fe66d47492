# SPDX-License-Identifier: Apache-2.0
"""One generation request: whose turn it is, which worker runs it, and its bytes passed through unchanged."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram
from yarl import URL

from war_rl.trainers.shell import NoReplicaError, SchedulerShell
from war_rl.trainers.slime.answers import Answer, LastEvent, loads, read_answer
from war_rl.trainers.slime.sessions import (
    ROUTING_HEADER,
    TRAJECTORY_HEADER,
    SessionTable,
    read_prompt,
)
from war_rl.trainers.slime.turns import Aborted, Lost, Turn, aborted_response, error_response
from war_rl.trainers.slime.workers import Workers
from war_rl.types import TurnRecord, TurnRequest, TurnResult

logger = logging.getLogger(__name__)

GONE_STATUSES = (502, 503, 504)
"""Answers that say that the engine behind the address is not there."""
LOCAL_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a connection that say nothing about the other end: this process is out of files, ports or memory."""
DROPPED_HEADERS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length", "expect"}
    | {"proxy-authorization", "proxy-authenticate", "content-encoding", "accept-encoding"}
    | {TRAJECTORY_HEADER.lower(), ROUTING_HEADER.lower()}
)
"""Headers of one connection, those that the HTTP library sets itself, and those meant for this router."""
RETRY_PAUSE_S = 0.05
"""Pause before a turn is placed again; doubled each time. Unit: seconds."""
COUNTS = (
    "requests",
    "retries",
    "no_worker",
    "turned_away",
    "client_gone",
    "timeouts",
    "broken_streams",
    "bad_requests",
)
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0)
"""Bounds of the histograms. Unit: seconds."""


class Proxy:
    """Places requests with the shell and forwards them.

    Args:
        retries: how often a request that lost its worker is placed again.
        registry: receives the histograms of latency and of the router's own share in it.
    """

    def __init__(
        self,
        shell: SchedulerShell,
        workers: Workers,
        sessions: SessionTable,
        client: aiohttp.ClientSession,
        *,
        retries: int = 3,
        registry: CollectorRegistry | None = None,
        on_weight_version: Callable[[str], None] = lambda version: None,
    ) -> None:
        self._shell = shell
        self._workers = workers
        self._sessions = sessions
        self._client = client
        self._retries = retries
        self._on_weight_version = on_weight_version
        self._keys = itertools.count()
        self._seen_version = ""
        self._waiting: dict[str, Turn] = {}
        self._running: dict[str, set[Turn]] = {}
        self.aborting = False
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0.0)
        registry = registry or CollectorRegistry()
        self._latency = Histogram(
            "war_rl_router_request_seconds", "From request to answer", buckets=BUCKETS, registry=registry
        )
        self._overhead = Histogram(
            "war_rl_router_dispatch_seconds",
            "From request to the worker, without waiting for a place",
            buckets=BUCKETS,
            registry=registry,
        )

    def abort(self) -> int:
        """Answer waiting and coming turns as aborted until :meth:`resume`. Returns how many waited."""
        self.aborting = True
        return self._shell.turn_away(Aborted())

    def resume(self) -> None:
        """Turns are placed again."""
        self.aborting = False

    def abort_waiting(self, rid: str = "") -> int:
        """SGLang's abort for the turns that wait here: those whose request id starts with ``rid``, all for "".

        Returns how many there were; coming turns are not concerned.
        """
        found = [t for t in self._waiting.values() if t.rid.startswith(rid) and self._shell.home(t.key) is None]
        for turn in found:
            turn.aborted = True
            self._shell.release(turn.key, None)
        return len(found)

    def abandon(self, url: str) -> None:
        """Nobody has answered there for long: turns that wait for an answer from it are placed again.

        A machine that vanishes closes no connection; without this they would wait until ``request_timeout_s``.
        """
        for turn in self._running.get(url, ()):
            if turn.task is not None and not turn.lost:
                turn.lost = f"{url} is lost and has been silent for long"
                turn.task.cancel()

    # ------------------------------------------------------------------ the handler

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """``/generate`` and the OpenAI paths."""
        began = time.perf_counter()
        self.counts["requests"] += 1
        raw = await request.read()
        try:
            body = loads(raw)
            if not isinstance(body, dict):
                raise ValueError("the body must be a JSON object")
            prompt = read_prompt(body)
        except ValueError as error:
            self.counts["bad_requests"] += 1
            return error_response(400, "BAD_REQUEST", str(error))
        session, hashes = self._sessions.find(request.headers, prompt, self._shell.clock())
        number = self._sessions.started(session, self._shell.clock())
        turn = Turn(session, prompt, hashes, number, raw, began, bool(body.get("stream")))
        turn.rid = body["rid"] if isinstance(body.get("rid"), str) else ""
        try:
            return await self._run(request, turn)
        except asyncio.CancelledError:
            self.counts["client_gone"] += 1
            turn.error = turn.error or "the client went away"
            raise
        except BaseException as error:
            turn.error = turn.error or f"{type(error).__name__}: {error}"
            raise
        finally:
            if not turn.settled:
                self._settle(turn, Answer(error=turn.error), None)
            self._latency.observe(time.perf_counter() - began)

    async def _run(self, request: web.Request, turn: Turn) -> web.StreamResponse:
        for attempt in range(self._retries + 1):
            try:
                if self.aborting:
                    raise Aborted
                await self._place(turn, attempt)
            except NoReplicaError as error:
                self.counts["no_worker"] += 1
                turn.error = str(error)
                return error_response(503, "no_available_workers", "no worker is registered and healthy")
            except Aborted:
                self.counts["turned_away"] += 1
                turn.error = "aborted"
                return aborted_response(turn)
            try:
                return await self._forward(request, turn)
            except Lost as error:
                turn.error = str(error)
                self.counts["retries"] += 1
                self._shell.release(turn.key, TurnResult(error=turn.error))
                logger.warning("turn %s of %s: %s", turn.number, turn.session.trajectory, error)
                await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
            except BaseException:
                self._shell.release(turn.key, None)
                raise
        self.counts["no_worker"] += 1
        return error_response(503, "no_available_workers", f"{self._retries + 1} attempts failed, last: {turn.error}")

    async def _place(self, turn: Turn, attempt: int) -> None:
        turn.key = f"{next(self._keys)}"
        wanted = TurnRequest(
            key=turn.key,
            trajectory=turn.session.trajectory,
            turn=turn.number,
            prompt_tokens=turn.prompt.tokens,
            max_tokens=turn.prompt.max_tokens,
            block_hashes=turn.hashes,
            attempt=attempt,
        )
        asked = time.perf_counter()
        self._waiting[turn.key] = turn
        try:
            turn.url, turn.reason = await self._shell.acquire(wanted)
        except asyncio.CancelledError:
            if turn.aborted:
                raise Aborted from None
            raise
        finally:
            del self._waiting[turn.key]
        turn.placed = time.perf_counter()
        turn.queue_seconds += turn.placed - asked

    # ------------------------------------------------------------------ bytes through

    async def _forward(self, request: web.Request, turn: Turn) -> web.StreamResponse:
        self._overhead.observe(time.perf_counter() - turn.began - turn.queue_seconds)
        try:
            return await self._exchange(request, turn)
        except aiohttp.ClientConnectorError as error:
            if error.os_error.errno in LOCAL_ERRORS:
                logger.error("no connection to %s: the fault is here, not there: %s", turn.url, error)
            else:
                self._workers.gone(turn.url, str(error))
            raise Lost(f"{turn.url} cannot be reached: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            await self._workers.suspect(turn.url, f"{type(error).__name__}: {error}")
            raise Lost(f"{turn.url} broke off: {type(error).__name__}: {error}") from error
        except Lost as error:
            if not turn.lost:
                await self._workers.suspect(turn.url, str(error))
            raise
        except asyncio.TimeoutError:
            # Placing it again would only load the engines twice with a request that is too long.
            self.counts["timeouts"] += 1
            turn.error = "timeout"
            self._shell.release(turn.key, TurnResult(error="timeout"))
            return error_response(504, "timeout", "the worker did not answer within --request-timeout-s")

    async def _exchange(self, request: web.Request, turn: Turn) -> web.StreamResponse:
        """Request to the worker, answer to the client. While it lasts, the worker's loss interrupts it."""
        headers = {k: v for k, v in request.headers.items() if k.lower() not in DROPPED_HEADERS}
        target = URL(turn.url + request.path_qs, encoded=True)
        running = self._running.setdefault(turn.url, set())
        turn.task, turn.lost = asyncio.current_task(), ""
        running.add(turn)
        try:
            async with self._client.request(request.method, target, data=turn.raw, headers=headers) as upstream:
                if upstream.status in GONE_STATUSES:
                    raise Lost(f"{turn.url} answered HTTP {upstream.status}")
                if upstream.content_type == "text/event-stream":
                    return await self._stream(request, turn, upstream)
                data = await upstream.read()
        except asyncio.CancelledError:
            if not turn.lost:
                raise
            _take_back_cancellation(turn.task)
            raise Lost(turn.lost) from None
        finally:
            running.discard(turn)
        response = web.Response(body=data, status=upstream.status)
        response.headers["Content-Type"] = upstream.headers.get("Content-Type", "application/json")
        # The answer leaves first; reading it for the statistics comes after.
        turn.settled = True
        asyncio.get_running_loop().call_soon(self._read, turn, data, response.status)
        return response

    async def _stream(self, request: web.Request, turn: Turn, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        last = LastEvent()
        # Until the first bytes are here, another worker could still do it.
        chunk = await upstream.content.readany()
        response = web.StreamResponse(status=upstream.status)
        response.headers["Content-Type"] = upstream.headers["Content-Type"]
        try:
            await response.prepare(request)
            while chunk:
                last.feed(chunk)
                await response.write(chunk)
                try:
                    chunk = await upstream.content.readany()
                except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                    await self._break_off(request, turn, str(error) or type(error).__name__)
                    return response
            await response.write_eof()
        except asyncio.CancelledError:
            if not turn.lost:
                raise
            _take_back_cancellation(turn.task)
            await self._break_off(request, turn, turn.lost)
            return response
        except ConnectionError:
            # The client went away; closing the connection to the engine makes it stop, too.
            self.counts["client_gone"] += 1
            turn.error = "the client went away"
            self._shell.release(turn.key, None)
            return response
        turn.settled = True
        self._read(turn, last.data, upstream.status)
        return response

    async def _break_off(self, request: web.Request, turn: Turn, error: str) -> None:
        """Half an answer is out. Ending it properly would pass it off as a whole one."""
        self.counts["broken_streams"] += 1
        turn.error = f"the stream broke: {error}"
        # The look below may find the worker lost; this turn needs no interruption any more.
        turn.task = None
        self._shell.release(turn.key, TurnResult(error=turn.error))
        if request.transport is not None:
            request.transport.close()
        await self._workers.suspect(turn.url, turn.error)

    # ------------------------------------------------------------------ what is learned

    def _read(self, turn: Turn, data: bytes, status: int) -> None:
        answer = read_answer(data, status, turn.prompt)
        seconds = time.perf_counter() - turn.placed
        result = TurnResult(
            generated_tokens=answer.generated, cached_tokens=answer.cached, seconds=seconds, error=answer.error
        )
        self._settle(turn, answer, result)
        before, version = self._seen_version, answer.weight_version
        self._seen_version = version or before
        if before and version and version != before:
            self._on_weight_version(version)

    def _settle(self, turn: Turn, answer: Answer, result: TurnResult | None) -> None:
        turn.settled = True
        now = self._shell.clock()
        self._shell.release(turn.key, result)
        self._sessions.ended(turn.session, turn.prompt, answer.output, now)
        seconds = time.perf_counter() - turn.placed if turn.placed else 0.0
        turn.session.records.append(
            TurnRecord(
                turn=turn.number,
                replica=turn.url,
                prompt_tokens=answer.prompt_tokens if answer.prompt_tokens is not None else turn.prompt.tokens,
                cached_tokens=answer.cached,
                generated_tokens=answer.generated,
                started=now - seconds,
                queue_seconds=turn.queue_seconds,
                seconds=seconds,
                reason=turn.reason,
                error=answer.error,
            )
        )


def _take_back_cancellation(task: asyncio.Task[Any] | None) -> None:
    """The cancellation was ours and is dealt with. Python 3.10 keeps no count of them."""
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()
