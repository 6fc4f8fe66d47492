# SPDX-License-Identifier: Apache-2.0
"""How long vLLM let a request wait before its first engine step, which verl's server does not pass on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

ENGINE_QUEUE_SECONDS = "war_engine_queue_seconds"
"""Under this name a server tells it to its client."""
LAST_WAIT: ContextVar[float | None] = ContextVar("war_last_wait", default=None)
"""Seconds that this task's last request waited in its engine; None before there was one, or where vLLM does not say."""


class WatchedEngine:
    """vLLM's engine client, everything passed on; what :meth:`generate` ends with sets :data:`LAST_WAIT`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """As vLLM's. Closed with it, so that a caller who leaves aborts the request as before."""
        LAST_WAIT.set(None)
        async with aclosing(self._engine.generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                LAST_WAIT.set(waited(output))
                yield output


def waited(output: Any) -> float | None:
    """Seconds from arrival in the engine core to the first step, by vLLM's ``RequestStateStats``; None without them."""
    stats = output.metrics
    if stats is None or not stats.scheduled_ts:
        return None
    return max(0.0, float(stats.scheduled_ts - stats.queued_ts))
