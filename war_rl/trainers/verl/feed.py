# SPDX-License-Identifier: Apache-2.0
"""The sending end of the feed: text of this process's trajectories on its way to every replica's drafter.

Items wait in one log; each replica has a cursor into it and at most one message under way, so a slow replica gets
larger messages, not more of them. What waits is bounded: when a replica cannot keep up, the oldest text is dropped and
counted, because drafting is only ever a help and must never delay a rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import ray

from war_rl.config import SpecConfig
from war_rl.types import FeedItem, encode_feed

logger = logging.getLogger(__name__)

# Above this a message goes through Ray's object store once for all replicas of a node instead of once for each call.
_SHARE_BYTES = 100_000


class FeedPublisher:
    """Collects items and sends them to all replicas. Lives on one asyncio loop.

    Args:
        servers: handles by id of the servers that draft, as they are now.
        share: puts a large message where all of them can read it.
    """

    def __init__(
        self,
        servers: Callable[[], Awaitable[dict[str, Any]]],
        config: SpecConfig,
        share: Callable[[bytes], Any] = ray.put,
    ) -> None:
        self._servers = servers
        self._share = share
        self._config = config
        self._enabled = config.feed and config.drafts_on(0)
        self._log: deque[FeedItem] = deque()
        self._first = 0  # sequence number of the log's first item
        self._bytes = 0
        self._cursors: dict[str, int] = {}
        self._busy: dict[str, asyncio.Future[Any]] = {}
        self._payload: tuple[int, int, Any] = (0, 0, None)
        self._sender: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.counters = dict.fromkeys(
            ("feed_items", "feed_tokens", "feed_dropped_tokens", "feed_errors", "feed_rewritten"), 0.0
        )

    def publish(self, item: FeedItem) -> None:
        """Queue one item; returns at once."""
        if not self._enabled or not len(item.tokens):
            return
        self._log.append(item)
        self._bytes += item.tokens.nbytes
        self.counters["feed_items"] += 1
        self.counters["feed_tokens"] += len(item.tokens)
        while self._bytes > self._config.feed_max_mb << 20:
            self._drop_oldest()
        self._news.set()
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    def count_rewritten(self) -> None:
        """An agent loop changed text that had been fed already."""
        self.counters["feed_rewritten"] += 1

    async def flush(self) -> None:
        """Wait until everything published so far has been taken in by all replicas, or could not be sent."""
        if self._sender is not None:
            await self._sender
        if self._busy:
            await asyncio.wait(self._busy.values())

    def _drop_oldest(self) -> None:
        dropped = self._log.popleft()
        self._first += 1
        self._bytes -= dropped.tokens.nbytes
        missed = sum(cursor < self._first for cursor in self._cursors.values())
        self.counters["feed_dropped_tokens"] += len(dropped.tokens) * max(1, missed)

    async def _send_all(self) -> None:
        while self._log:
            await asyncio.sleep(self._config.feed_interval_ms / 1000)
            try:
                # Asked each time: replicas come and go.
                servers = await self._servers()
                self._settle(servers)
                self._send(servers)
                await self._something_happens()
                self._settle(servers)
            except Exception as error:
                self._count_error(error)
                # Nobody to send to: what waits stays until there is, within its bound.
                return

    async def _something_happens(self) -> None:
        """A message has arrived, or there is new text."""
        self._news.clear()
        news = asyncio.ensure_future(self._news.wait())
        await asyncio.wait({*self._busy.values(), news}, return_when=asyncio.FIRST_COMPLETED)
        news.cancel()

    def _send(self, servers: dict[str, Any]) -> None:
        end = self._first + len(self._log)
        for server_id, server in servers.items():
            start = max(self._cursors.get(server_id, self._first), self._first)
            if server_id in self._busy or start == end:
                continue
            self._cursors[server_id] = end
            payload = self._encoded(start, end, len(servers))
            self._busy[server_id] = asyncio.ensure_future(server.war_feed.remote(payload))

    def _encoded(self, start: int, end: int, replicas: int) -> Any:
        """Replicas that are at the same place in the log share one message."""
        if self._payload[:2] != (start, end):
            items = [self._log[i - self._first] for i in range(start, end)]
            blob = encode_feed(items)
            shared = self._share(blob) if len(blob) > _SHARE_BYTES and replicas > 1 else blob
            self._payload = (start, end, shared)
        return self._payload[2]

    def _settle(self, servers: dict[str, Any]) -> None:
        """Forget finished messages and what every replica has been sent."""
        for server_id, message in list(self._busy.items()):
            if message.done():
                del self._busy[server_id]
                if not message.cancelled() and (error := message.exception()) is not None:
                    self._count_error(error)
            elif server_id not in servers:
                # Its actor is gone; the call will fail some time.
                del self._busy[server_id]
                message.cancel()
        self._cursors = {server_id: c for server_id, c in self._cursors.items() if server_id in servers}
        reached = min((self._cursors.get(server_id, self._first) for server_id in servers), default=self._first)
        while self._first < reached:
            self._bytes -= self._log.popleft().tokens.nbytes
            self._first += 1

    def _count_error(self, error: BaseException) -> None:
        # A dead replica is the trainer's business; the feed only says that it could not send.
        self.counters["feed_errors"] += 1
        if self.counters["feed_errors"] == 1:
            logger.warning("War-RL feed could not be sent (said once): %s: %s", type(error).__name__, error)
