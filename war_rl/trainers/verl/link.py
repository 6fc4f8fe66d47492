# SPDX-License-Identifier: Apache-2.0
"""A client process's line to the router: see :mod:`war_rl.trainers.verl.exchange` for what is said on it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from contextvars import Context
from typing import Any

from ray.exceptions import RayActorError

from war_rl.trainers.verl.exchange import Answer, Ask, Event, Finish, Grant, Release
from war_rl.trainers.verl.router import RouterLost
from war_rl.types import TrajectoryId, TurnRequest, TurnResult

COUNTERS = ("router_calls", "router_messages", "router_message_seconds", "router_events", "router_asks")
"""What a link counts: Ray calls in all, those that are messages and do not wait for a held turn, the seconds until they
were answered, the events in them, and the turns asked for."""


async def answer(call: Any) -> Any:
    """The router's answer to a call.

    Raises:
        RouterLost: it does not live.
    """
    try:
        return await call
    except RayActorError as error:
        raise RouterLost(f"the router actor is gone ({error}); the run cannot go on") from error


class RouterLink:
    """Sends this process's events in the order in which they happen, and hands out what the router grants.

    What happens while a message is under way makes up the next one: the busier the router, the fewer and larger the
    messages. Lives on one asyncio loop.

    Args:
        router: handle of the router actor.
        client: this process's name, see :func:`war_rl.trainers.verl.lease.client_name`.
    """

    def __init__(self, router: Any, client: str) -> None:
        self.client = client
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self._router = router
        self._out: list[Event] = []
        self._asked: dict[str, asyncio.Future[Grant]] = {}
        self._handles: dict[str, Any] = {}
        self._drafting: dict[str, Any] = {}
        self._version = -1
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None

    async def acquire(self, request: TurnRequest) -> tuple[str, Any, str]:
        """Wait until the turn may start. Returns (server id, server handle, reason).

        The caller must :meth:`release` the turn whatever comes of it, also when it is cancelled here.

        Raises:
            RouterLost: the router does not live, or was started again in the middle of a run.
            NoReplicaError: there is no replica left.
            LeaseExpired: this process was taken for dead; it may ask again.
            ValueError: a turn with this key waits or runs already.
        """
        if request.key in self._asked:
            raise ValueError(f"turn {request.key!r} was asked for before")
        while True:
            grant = await self._ask(request)
            handle = self._handles.get(grant.server)
            if handle is not None:
                return grant.server, handle, grant.reason
            # Lost a moment ago: the router has forgotten the turn, which may be asked for again.

    def release(self, key: str, result: TurnResult | None) -> None:
        """The turn is over; None when it was cancelled. Returns at once."""
        self._post(Release(key, result))

    def finish(self, trajectory: TrajectoryId) -> None:
        """No further turn of this trajectory will come. Returns at once."""
        self._post(Finish(trajectory))

    async def drafting_servers(self) -> dict[str, Any]:
        """Handles by id of the servers that can draft, as of the last answer."""
        if self._version < 0:
            self._take(await self._call("exchange", []))
        return self._drafting

    async def flush(self) -> None:
        """Wait until the router has been told everything."""
        while self._sender is not None and not self._sender.done():
            await asyncio.wait({self._sender})

    # ------------------------------------------------------------------ inside

    async def _ask(self, request: TurnRequest) -> Grant:
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._asked[request.key] = future
        self.counters["router_asks"] += 1
        self._post(Ask(request))
        try:
            return await future
        finally:
            if self._asked.get(request.key) is future:
                del self._asked[request.key]

    def _post(self, event: Event) -> None:
        self._out.append(event)
        if self._sender is None or self._sender.done():
            # The task begins when this pass of the loop is over: what else happens in it goes along.
            self._sender = _task(self._send())

    async def _send(self) -> None:
        while self._out:
            events, self._out = self._out, []
            asks = [event.request.key for event in events if isinstance(event, Ask)]
            began = time.monotonic()
            try:
                told = await self._call("exchange", events)
            except RouterLost as error:
                self._fail(list(self._asked), error)
            except Exception as error:
                self._fail(asks, error)
            else:
                self.counters["router_messages"] += 1
                self.counters["router_message_seconds"] += time.monotonic() - began
                self.counters["router_events"] += len(events)
                self._take(told)
                if any(key in self._asked for key in asks):
                    self._listen()

    def _listen(self) -> None:
        """Some turns are held: have a call wait for them."""
        if self._listener is None or self._listener.done():
            self._listener = _task(self._collect())

    async def _collect(self) -> None:
        while self._asked:
            try:
                self._take(await self._call("collect"))
            except Exception as error:
                self._fail(list(self._asked), error)

    async def _call(self, method: str, *args: Any) -> Answer:
        self.counters["router_calls"] += 1
        told: Answer = await answer(getattr(self._router, method).remote(self.client, self._version, *args))
        return told

    def _take(self, told: Answer) -> None:
        if told.servers is not None and told.version > self._version:
            self._version = told.version
            self._handles = {i: server.handle for i, server in told.servers.items()}
            self._drafting = {i: server.handle for i, server in told.servers.items() if server.can_draft}
        for grant in told.grants:
            future = self._asked.pop(grant.key, None)
            if future is None or future.done():
                # Its turn was cancelled; the release is on its way.
                continue
            if grant.error is not None:
                future.set_exception(grant.error)
            else:
                future.set_result(grant)

    def _fail(self, keys: Iterable[str], error: Exception) -> None:
        for key in keys:
            future = self._asked.pop(key, None)
            if future is not None and not future.done():
                future.set_exception(error)


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that belongs to no trajectory: it would keep alive what it found in the context of the one it serves."""
    return Context().run(asyncio.get_running_loop().create_task, work)
