# SPDX-License-Identifier: Apache-2.0
"""The engines behind the router: registered and removed as SGLang's router does it, watched, lost and found again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp

from war_rl.rollout.scheduler import ReplicaInfo
from war_rl.trainers.shell import SchedulerShell

logger = logging.getLogger(__name__)

DESCRIBE_PATHS = ("/server_info", "/get_server_info")
"""Where an SGLang server describes itself; the second is the older name."""

REMOVED = "removed"
"""The reason of a loss that was asked for."""


@dataclass(slots=True)
class Worker:
    """One engine server. ``healthy``: it takes turns. ``failures``: health checks failed in a row."""

    id: str
    url: str
    worker_type: str = "regular"
    healthy: bool = False
    failures: int = 0
    info: dict[str, Any] = field(default_factory=dict)

    def as_json(self, load: int) -> dict[str, Any]:
        """The fields that slime reads (``id``, ``url``), and what SGLang's router shows beside them."""
        return {
            "id": self.id,
            "url": self.url,
            "model_id": str(self.info.get("served_model_name") or self.info.get("model_path") or "unknown"),
            "worker_type": self.worker_type,
            "is_healthy": self.healthy,
            "load": load,
            "connection_mode": "HTTP",
        }


class WorkerError(ValueError):
    """A registration that cannot work; the message says why and what would."""


class Workers:
    """The registry, and the loop that watches it.

    Args:
        shell: gets and loses the replicas.
        session: HTTP client.
        block_size: tokens per KV block that is assumed for every worker.
        health_path: cheap path that answers 200 while the server lives. Not one that generates: slime puts engines
            to sleep between rollouts.
        interval_s, timeout_s, threshold: seconds between checks, seconds each may take, failures in a row until a
            worker is lost.
        on_ready: called with each worker that starts to take turns, also when it comes back.
        abandon: failures in a row after which what still waits for the worker's answer is given up, too. Far more than
            ``threshold``: silence may be a busy machine, and to give up a turn loses what it has generated.
        on_lost: called with each worker that takes no turns any more.
        on_abandoned: called with each worker that has been silent for ``abandon`` checks.
    """

    def __init__(
        self,
        shell: SchedulerShell,
        session: aiohttp.ClientSession,
        *,
        block_size: int = 16,
        health_path: str = "/v1/models",
        interval_s: float = 5.0,
        timeout_s: float = 5.0,
        threshold: int = 3,
        abandon: int = 12,
        on_ready: Callable[[Worker], None] = lambda worker: None,
        on_lost: Callable[[Worker], None] = lambda worker: None,
        on_abandoned: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        self._shell = shell
        self._session = session
        self._block_size = block_size
        self._health_path = health_path
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._threshold = threshold
        self._abandon = max(abandon, threshold)
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._on_abandoned = on_abandoned
        self._by_url: dict[str, Worker] = {}
        self.lost_total = 0

    # ------------------------------------------------------------------ registry

    async def add(self, url: str, worker_type: str = "regular") -> Worker:
        """Register an engine; for a known URL, the same worker again (an engine that was restarted).

        A worker that does not answer yet is registered all the same and takes turns as soon as it does.

        Raises:
            WorkerError: not an HTTP address, or a kind of worker that is not served.
        """
        if worker_type != "regular":
            raise WorkerError(
                f"worker_type={worker_type!r} is not served: War-RL's router places whole requests. Use regular "
                "workers (no prefill/decode disaggregation), or SGLang's own router."
            )
        url = url.rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WorkerError(f"url={url!r} is not an HTTP address; expected for example http://10.0.0.1:30000")
        worker = self._by_url.get(url)
        if worker is None:
            worker = self._by_url[url] = Worker(uuid4().hex, url)
        await self._try_ready(worker)
        return worker

    def remove(self, worker_id: str) -> Worker | None:
        """Forget a worker, by its id. Turns that run there may end; those that its server breaks off fail over."""
        worker = next((w for w in self._by_url.values() if w.id == worker_id), None)
        if worker is not None:
            del self._by_url[worker.url]
            self._lose(worker, REMOVED)
        return worker

    def get(self, worker_id: str) -> Worker | None:
        return next((w for w in self._by_url.values() if w.id == worker_id), None)

    def all(self) -> list[Worker]:
        return list(self._by_url.values())

    def healthy(self) -> list[Worker]:
        return [w for w in self._by_url.values() if w.healthy]

    # ------------------------------------------------------------------ health

    def gone(self, url: str, reason: str) -> None:
        """A request found nobody at this address: the worker is lost until a health check finds it again."""
        worker = self._by_url.get(url)
        if worker is not None and worker.healthy:
            worker.failures = self._threshold
            self._lose(worker, reason)

    async def suspect(self, url: str, reason: str) -> None:
        """A connection broke in the middle of an answer: look at once whether the worker still lives.

        Silence is one failed check, not a loss: a busy machine is slow as well.
        """
        worker = self._by_url.get(url)
        if worker is None or not worker.healthy:
            return
        found = await self._probe(worker)
        if found == "refused":
            self.gone(url, reason)
        elif found == "silent":
            self._failed(worker)

    async def watch(self) -> None:
        """Check all workers for ever."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.check_all()

    async def check_all(self) -> None:
        """One round of health checks."""
        checks: list[Awaitable[None]] = [self._check(w) for w in self._by_url.values()]
        for result in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("a health check failed in an unexpected way: %r", result)

    async def _check(self, worker: Worker) -> None:
        if await self._probe(worker) != "alive":
            self._failed(worker)
            return
        worker.failures = 0
        if not worker.healthy:
            await self._try_ready(worker)

    def _failed(self, worker: Worker) -> None:
        worker.failures += 1
        if worker.failures >= self._threshold:
            self._lose(worker, f"{worker.failures} health checks failed")
        if worker.failures == self._abandon:
            self._on_abandoned(worker)

    async def _probe(self, worker: Worker) -> str:
        """``alive``, ``refused`` (nobody listens there) or ``silent`` (anything else)."""
        try:
            async with self._session.get(worker.url + self._health_path, timeout=self._timeout) as response:
                return "alive" if response.status == 200 else "silent"
        except aiohttp.ClientConnectorError:
            return "refused"
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return "silent"

    async def _try_ready(self, worker: Worker) -> None:
        if await self._probe(worker) != "alive":
            logger.warning("worker %s does not answer %s yet", worker.url, self._health_path)
            return
        worker.info = await self._describe(worker)
        # It may have been removed while it was asked.
        if self._by_url.get(worker.url) is not worker:
            return
        worker.failures = 0
        worker.healthy = True
        self._shell.add(replica_info(worker, self._block_size))
        logger.info("worker %s takes turns; KV tokens: %s", worker.url, kv_tokens(worker.info) or "unknown")
        self._on_ready(worker)

    async def _describe(self, worker: Worker) -> dict[str, Any]:
        for path in DESCRIBE_PATHS:
            try:
                async with self._session.get(worker.url + path, timeout=self._timeout) as response:
                    if response.status == 200:
                        info = await response.json(content_type=None)
                        return info if isinstance(info, dict) else {}
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
                continue
        logger.warning("worker %s does not describe itself: its KV capacity is unknown and not bounded", worker.url)
        return {}

    def _lose(self, worker: Worker, reason: str) -> None:
        if not worker.healthy:
            return
        worker.healthy = False
        lost = self._shell.lose(worker.url, reason)
        self._on_lost(worker)
        if reason == REMOVED:
            logger.info("worker %s is removed; %d turns ran there", worker.url, len(lost))
        else:
            self.lost_total += 1
            logger.error("worker %s is lost (%s); %d turns must run elsewhere", worker.url, reason, len(lost))


def kv_tokens(info: dict[str, Any]) -> int:
    """KV capacity in tokens from SGLang's description of a server; 0 where it does not say."""
    value = info.get("max_total_num_tokens") or 0
    return int(value) if isinstance(value, int | float) else 0


def replica_info(worker: Worker, block_size: int) -> ReplicaInfo:
    """The scheduler's description of a worker. Data-parallel ranks of one server count as one replica."""
    ranks = max(1, int(worker.info.get("dp_size") or 1))
    running = worker.info.get("max_running_requests") or 0
    return ReplicaInfo(
        id=worker.url,
        kv_tokens=kv_tokens(worker.info) * ranks,
        block_size=block_size,
        can_draft=worker.info.get("speculative_algorithm") == "NGRAM",
        max_running=int(running) or 256,
    )
