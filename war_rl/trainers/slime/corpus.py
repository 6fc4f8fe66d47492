# SPDX-License-Identifier: Apache-2.0
"""Drafting on SGLang: finished trajectories become external corpora of its n-gram speculation.

Checked against SGLang 0.5.15.post1. A server takes documents as text and tokenises them itself, loads one corpus at a
time, refuses an id it has and a load beyond its token budget, and keeps a corpus until it is removed. So every corpus
has an id that names its step, each server is brought to the wanted set by one task of its own, and the set is bounded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

PREFIX = "war-"
"""Ids of War-RL's corpora start with this; corpora of others are never touched."""
CHARS_PER_TOKEN = 2
"""Text counts as at least this dense, so that the bound in tokens errs on the safe side for ordinary text."""
BUSY = "already in progress"
TAKEN = "already exists"
DISABLED = "not enabled"
"""Parts of SGLang's messages: another load runs; the id is loaded; the server does not draft from n-grams."""


@dataclass(frozen=True)
class CorpusConfig:
    """Bounds of the feed."""

    enabled: bool = True
    """Whether finished trajectories are published at all."""
    max_tokens: int = 4_000_000
    """Most tokens of all corpora together, oldest dropped first; stay below the server's
    ``--speculative-ngram-external-corpus-max-tokens``. Unit: tokens (estimated from the text)."""
    max_corpora: int = 16
    """Most corpora at once; neighbours of one step are merged beyond it. Unit: corpora."""
    window_steps: int = 1
    """How many past steps' text stays draftable; 0 keeps the current step only. Unit: steps."""
    interval_s: float = 2.0
    """How long finished trajectories are collected into one corpus. Unit: seconds."""
    request_timeout_s: float = 120.0
    """Longest time one call to a server may take. Unit: seconds."""


@dataclass(slots=True)
class Corpus:
    """Documents under one id. ``tokens`` is estimated from the text."""

    id: str
    step: int
    documents: list[str]
    tokens: int


class CorpusPlan:
    """Which corpora every server should hold. No I/O.

    Args:
        config: bounds.
        run: names this run, so that a server that outlives it is cleaned by the next.
    """

    def __init__(self, config: CorpusConfig, run: str) -> None:
        self.config = config
        self.run = run
        self.step = 0
        self.wanted: dict[str, Corpus] = {}
        """By id, oldest text first."""
        self.dropped_documents = 0
        self.merged = 0
        self._pending: list[str] = []
        self._serial = 0

    def add(self, documents: Iterable[str]) -> None:
        """Text of finished trajectories; empty documents are left out."""
        self._pending += [d for d in documents if d]

    def begin_step(self, step: int) -> None:
        """Text from here on belongs to ``step``; steps out of the window go."""
        self.flush()
        self.step = step
        for corpus in [c for c in self.wanted.values() if c.step < step - self.config.window_steps or c.step > step]:
            del self.wanted[corpus.id]

    def flush(self) -> bool:
        """Make one corpus of what was added. Returns whether the wanted set changed."""
        if not self._pending:
            return False
        kept, size = [], 0
        # The newest text is the most useful: when one batch exceeds the bound, its oldest part goes.
        for document in reversed(self._pending):
            tokens = estimate_tokens(document)
            if size + tokens > self.config.max_tokens:
                break
            kept.append(document)
            size += tokens
        self.dropped_documents += len(self._pending) - len(kept)
        self._pending = []
        if not kept:
            return False
        self._put(self.step, kept[::-1], size)
        self._shrink()
        if len(self.wanted) > self.config.max_corpora:
            self._merge()
        return True

    def gauges(self) -> dict[str, float]:
        return {
            "corpus/wanted": float(len(self.wanted)),
            "corpus/wanted_tokens": float(sum(c.tokens for c in self.wanted.values())),
            "corpus/wanted_documents": float(sum(len(c.documents) for c in self.wanted.values())),
            "corpus/dropped_documents": float(self.dropped_documents),
            "corpus/merges": float(self.merged),
        }

    def _put(self, step: int, documents: list[str], tokens: int) -> None:
        self._serial += 1
        name = f"{PREFIX}{self.run}-{step}-{self._serial}"
        self.wanted[name] = Corpus(name, step, documents, tokens)

    def _shrink(self) -> None:
        while sum(c.tokens for c in self.wanted.values()) > self.config.max_tokens and len(self.wanted) > 1:
            oldest = next(iter(self.wanted))
            self.dropped_documents += len(self.wanted.pop(oldest).documents)

    def _merge(self) -> None:
        """One corpus of the older half of the step that has most of them; every match looks at every corpus."""
        steps: dict[int, list[Corpus]] = {}
        for corpus in self.wanted.values():
            steps.setdefault(corpus.step, []).append(corpus)
        step, crowd = max(steps.items(), key=lambda item: len(item[1]))
        if len(crowd) < 2:
            oldest = next(iter(self.wanted))
            self.dropped_documents += len(self.wanted.pop(oldest).documents)
            return
        old = crowd[: max(2, len(crowd) // 2)]
        before = dict(self.wanted)
        self.wanted.clear()
        for corpus in before.values():
            if corpus is old[0]:
                self._put(step, [d for c in old for d in c.documents], sum(c.tokens for c in old))
            elif corpus not in old:
                self.wanted[corpus.id] = corpus
        self.merged += 1


def estimate_tokens(document: str) -> int:
    """Tokens of a document plus its separator, estimated from its length."""
    return len(document) // CHARS_PER_TOKEN + 1


@dataclass(slots=True)
class _Server:
    url: str
    wake: asyncio.Event
    task: asyncio.Task[None] | None = None
    present: dict[str, int] | None = None
    supported: bool | None = None
    why: str = ""
    rejected: set[str] = field(default_factory=set)


class Unsupported(Exception):
    """The server has no external corpora, or does not draft from n-grams."""


class CorpusPublisher:
    """Brings every server to the plan's wanted set, one task per server.

    A server that lacks the interface is named once, loudly, and left alone; scheduling goes on.
    """

    def __init__(self, plan: CorpusPlan, session: aiohttp.ClientSession) -> None:
        self.plan = plan
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=plan.config.request_timeout_s)
        self._servers: dict[str, _Server] = {}
        self._flusher: asyncio.Task[None] | None = None
        self.counts: dict[str, float] = dict.fromkeys(("added", "removed", "rejected", "errors", "loaded_tokens"), 0.0)

    def start(self) -> None:
        if self.plan.config.enabled:
            self._flusher = asyncio.create_task(self._flush_often())

    async def close(self) -> None:
        """Stop. What the servers hold stays; the next run removes it."""
        tasks = [t for t in (self._flusher, *(s.task for s in self._servers.values())) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def server_ready(self, url: str) -> None:
        """A server is there, new or restarted: what it holds is asked afresh."""
        if not self.plan.config.enabled:
            return
        self.server_lost(url)
        server = self._servers[url] = _Server(url, asyncio.Event())
        server.wake.set()
        server.task = asyncio.create_task(self._serve(server))

    def server_lost(self, url: str) -> None:
        server = self._servers.pop(url, None)
        if server is not None and server.task is not None:
            server.task.cancel()

    def publish(self, documents: Iterable[str]) -> None:
        """Finished trajectories' text; sent within ``interval_s``."""
        if self.plan.config.enabled:
            self.plan.add(documents)

    def begin_step(self, step: int) -> None:
        self.plan.begin_step(step)
        self._wake_all()

    def flush(self) -> None:
        """Send what was published now."""
        if self.plan.flush():
            self._wake_all()

    def stats(self) -> dict[str, float]:
        """Cumulative counts and gauges, names below ``corpus/``."""
        servers = self._servers.values()
        return {
            **self.plan.gauges(),
            **{f"corpus/{k}": v for k, v in self.counts.items()},
            "corpus/servers_supported": float(sum(s.supported is True for s in servers)),
            "corpus/servers_unsupported": float(sum(s.supported is False for s in servers)),
            "corpus/server_tokens_max": float(max((sum((s.present or {}).values()) for s in servers), default=0)),
        }

    def unsupported(self) -> dict[str, str]:
        """Why, by server, for those that are left alone."""
        return {s.url: s.why for s in self._servers.values() if s.supported is False}

    # ------------------------------------------------------------------ inside

    def _wake_all(self) -> None:
        for server in self._servers.values():
            server.wake.set()

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(self.plan.config.interval_s)
            self.flush()

    async def _serve(self, server: _Server) -> None:
        delay = 0.5
        while True:
            await server.wake.wait()
            server.wake.clear()
            try:
                await self._reconcile(server)
                delay = 0.5
            except Unsupported as error:
                server.supported, server.why = False, str(error)
                logger.error(
                    "server %s takes no n-gram corpora (%s): it drafts nothing from finished trajectories; scheduling "
                    "goes on. To draft, start it with --speculative-algorithm NGRAM "
                    "--speculative-ngram-external-sam-budget 8 (docs/slime.md)",
                    server.url,
                    error,
                )
                return
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
                self.counts["errors"] += 1
                logger.warning("corpus of server %s: %s; again in %.1f s", server.url, error or repr(error), delay)
                server.present = None
                await asyncio.sleep(delay)
                delay = min(30.0, 2 * delay)
                server.wake.set()

    async def _reconcile(self, server: _Server) -> None:
        """Remove what is not wanted, then add what is missing, newest first."""
        if server.present is None:
            answer = await self._call(server, "GET", "/list_external_corpora")
            counts = answer.get("corpus_token_counts")
            server.present = {str(k): int(v) for k, v in counts.items()} if isinstance(counts, dict) else {}
            server.supported = True
        for name in [n for n in server.present if n.startswith(PREFIX) and n not in self.plan.wanted]:
            await self._call(server, "POST", "/remove_external_corpus", {"corpus_id": name})
            del server.present[name]
            self.counts["removed"] += 1
        for corpus in list(self.plan.wanted.values())[::-1]:
            if corpus.id in server.present or corpus.id in server.rejected or corpus.id not in self.plan.wanted:
                continue
            await self._add(server, corpus)

    async def _add(self, server: _Server, corpus: Corpus) -> None:
        body = {"corpus_id": corpus.id, "documents": corpus.documents}
        answer = await self._call(server, "POST", "/add_external_corpus", body)
        message = str(answer.get("message", ""))
        assert server.present is not None
        if answer.get("success") or TAKEN in message:
            loaded = int(answer.get("loaded_token_count") or 0)
            server.present[corpus.id] = loaded
            self.counts["added"] += 1
            self.counts["loaded_tokens"] += loaded
        elif BUSY in message:
            raise ValueError("another corpus is being loaded")
        else:
            # Most likely its token budget. Repeating would fail again: this corpus stays out, on this server.
            server.rejected = {r for r in server.rejected if r in self.plan.wanted} | {corpus.id}
            self.counts["rejected"] += 1
            logger.warning("server %s refused corpus %s: %s", server.url, corpus.id, message)

    async def _call(
        self, server: _Server, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        async with self._session.request(method, server.url + path, json=body, timeout=self._timeout) as response:
            if response.status in (404, 405, 501):
                raise Unsupported(f"HTTP {response.status} on {path}")
            answer = await response.json(content_type=None)
        if not isinstance(answer, dict):
            raise ValueError(f"{path} answered {answer!r}")
        message = str(answer.get("message", ""))
        if not answer.get("success") and DISABLED in message:
            raise Unsupported(message)
        if response.status >= 500:
            raise ValueError(f"HTTP {response.status} on {path}: {message}")
        return answer
