# SPDX-License-Identifier: Apache-2.0
"""What a client process and the router say to each other, and the router's end of it.

A call between processes costs far more than a decision. So a client sends all that has happened to its turns since
its last call as one message, one message at a time, and the answer names the turns that start at once. What is held
comes later: in the answer to one further call that waits for it, whichever turns it will be. Since the next message
leaves only when the last one is answered, events arrive in the order in which they happened, which a Ray actor with
coroutines does not promise for calls. The client's end is :mod:`war_rl.trainers.verl.link`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from war_rl.trainers.shell import SchedulerShell
from war_rl.types import TrajectoryId, TurnRequest, TurnResult


class Ask(NamedTuple):
    """A turn wants to run. A :class:`Release` follows some time, whatever comes of it."""

    request: TurnRequest


class Release(NamedTuple):
    """The turn is over; None when it was cancelled, whether it waited or ran."""

    key: str
    result: TurnResult | None


class Finish(NamedTuple):
    """No further turn of the trajectory will come."""

    trajectory: TrajectoryId


Event = Ask | Release | Finish


class Grant(NamedTuple):
    """The turn ``key`` may start on ``server``, or why it never will."""

    key: str
    server: str = ""
    reason: str = ""
    error: BaseException | None = None


class Server(NamedTuple):
    """A replica's actor handle, and whether drafting is possible there."""

    handle: Any
    can_draft: bool


class Answer(NamedTuple):
    """``version``: of the servers. ``servers``: all of them by id, where the caller knows another version."""

    version: int
    servers: dict[str, Server] | None
    grants: list[Grant]


@dataclass(slots=True)
class _Box:
    """Grants on their way to one client, and the call of it that waits for them."""

    grants: list[Grant] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None


class Exchange:
    """The router's end. Lives on the shell's loop."""

    def __init__(self, shell: SchedulerShell) -> None:
        self._shell = shell
        self._boxes: dict[str, _Box] = {}

    def apply(self, client: str, events: Sequence[Event]) -> list[Grant]:
        """Carry out what has happened, in order, and decide once. Returns what is known of the turns asked for."""
        asked: dict[str, asyncio.Future[tuple[str, str]]] = {}
        grants: list[Grant] = []
        with self._shell.together():
            for event in events:
                if isinstance(event, Ask):
                    key = event.request.key
                    try:
                        asked[key] = self._shell.submit(event.request, client)
                    except Exception as error:
                        # One turn that cannot be asked for must not take the others' events with it.
                        grants.append(Grant(key, error=error))
                elif isinstance(event, Release):
                    self._shell.release(event.key, event.result)
                else:
                    self._shell.finish(event.trajectory)
        for key, future in asked.items():
            if not future.done():
                future.add_done_callback(partial(self._deliver, client, key))
            elif not future.cancelled():
                grants.append(_grant(key, future))
        return grants

    async def collect(self, client: str) -> list[Grant]:
        """Wait until turns of this client that were held may start (or never will).

        A second call of the same client takes the first one's place, which then answers nothing.
        """
        box = self._boxes.setdefault(client, _Box())
        if box.waiter is not None and not box.waiter.done():
            box.waiter.set_result(None)
        waiter = box.waiter = asyncio.get_running_loop().create_future()
        if box.grants:
            waiter.set_result(None)
        await waiter
        if box.waiter is not waiter:
            return []
        del self._boxes[client]
        return box.grants

    def _deliver(self, client: str, key: str, future: asyncio.Future[tuple[str, str]]) -> None:
        if future.cancelled():
            # Released by its client, which does not wait for it any more.
            return
        box = self._boxes.setdefault(client, _Box())
        box.grants.append(_grant(key, future))
        if box.waiter is not None and not box.waiter.done():
            box.waiter.set_result(None)


def _grant(key: str, future: asyncio.Future[tuple[str, str]]) -> Grant:
    error = future.exception()
    if error is not None:
        return Grant(key, error=error)
    server, reason = future.result()
    return Grant(key, server, reason)
