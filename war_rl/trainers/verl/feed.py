# SPDX-License-Identifier: Apache-2.0
"""The sending end of the feed: text of this process's trajectories on its way to every replica's drafter.

Messages are batched, at most one is under way to each replica, and what waits is bounded: when a replica cannot keep
up, the oldest text is dropped and counted, because drafting is only ever a help and must never delay a rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import ray

from war_rl.config import SpecConfig
from war_rl.types import FeedItem, encode_feed

logger = logging.getLogger(__name__)

# Above this a message goes through Ray's object store once for all replicas of a node instead of once for each call.
_SHARE_BYTES = 100_000


class FeedPublisher:
    """Collects items and sends them to all replicas. Lives on one asyncio loop."""

    def __init__(self, router: Any, config: SpecConfig, share: Callable[[bytes], Any] = ray.put) -> None:
        self._router = router
        self._share = share
        self._config = config
        self._enabled = config.feed and config.policy != "off"
        self._queue: deque[FeedItem] = deque()
        self._queued_bytes = 0
        self._sender: asyncio.Task[None] | None = None
        self._busy: dict[str, asyncio.Future[Any]] = {}
        self.counters = {"feed_items": 0.0, "feed_tokens": 0.0, "feed_dropped_tokens": 0.0, "feed_errors": 0.0}
        self.counters["feed_rewritten"] = 0.0

    def publish(self, item: FeedItem) -> None:
        """Queue one item; returns at once."""
        if not self._enabled or not len(item.tokens):
            return
        self._queue.append(item)
        self._queued_bytes += item.tokens.nbytes
        while self._queued_bytes > self._config.feed_max_mb << 20:
            dropped = self._queue.popleft()
            self._queued_bytes -= dropped.tokens.nbytes
            self.counters["feed_dropped_tokens"] += len(dropped.tokens)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send_all())

    def count_rewritten(self) -> None:
        """An agent loop changed text that had been fed already."""
        self.counters["feed_rewritten"] += 1

    async def _send_all(self) -> None:
        while self._queue:
            await asyncio.sleep(self._config.feed_interval_ms / 1000)
            items = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
            try:
                await self._send(items)
            except Exception as error:
                # A dead replica is the trainer's business; the feed only says that it could not send.
                self.counters["feed_errors"] += 1
                if self.counters["feed_errors"] == 1:
                    logger.warning("War-RL feed could not be sent (said once): %s: %s", type(error).__name__, error)

    async def _send(self, items: list[FeedItem]) -> None:
        # Asked each time: replicas come and go, and a message costs more than this small call.
        servers: dict[str, Any] = await self._router.get_server_handles.remote()
        blob = encode_feed(items)
        payload: Any = self._share(blob) if len(blob) > _SHARE_BYTES and len(servers) > 1 else blob
        tokens = sum(len(item.tokens) for item in items)
        self.counters["feed_items"] += len(items)
        self.counters["feed_tokens"] += tokens
        for server_id in list(self._busy):
            if server_id not in servers or self._busy[server_id].done():
                _retrieve(self._busy.pop(server_id))
        for server_id, server in servers.items():
            if server_id in self._busy:
                # Still taking in the last message: this one is dropped for that replica only.
                self.counters["feed_dropped_tokens"] += tokens
                continue
            self._busy[server_id] = asyncio.ensure_future(server.war_feed.remote(payload))


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take a finished future's error, so that asyncio does not report it as never retrieved."""
    if future.done() and not future.cancelled():
        future.exception()
