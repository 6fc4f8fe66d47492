# SPDX-License-Identifier: Apache-2.0
"""One modelled replica: vLLM's scheduler (running first, then waiting in order, chunked prefill under a token budget,
preemption by recomputation) over a :class:`BlockCache`, with many equal decode steps taken as one stretch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from war_rl.sim.cache import BlockCache
from war_rl.sim.times import StepTimes
from war_rl.sim.work import SimTrajectory

Floats = np.ndarray


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of every replica, with vLLM's names. Raises ValueError where nothing could ever run."""

    kv_tokens: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "block_size", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def blocks(self) -> int:
        return self.kv_tokens // self.block_size


@dataclass(slots=True, eq=False)
class Request:
    """One turn in an engine. ``computed`` and ``left`` live in the replica's arrays while it decodes."""

    key: str
    trajectory: SimTrajectory
    turn: int
    prompt: int
    target: int
    generated: int = 0
    computed: int = 0
    goal: int = 0
    """Tokens to compute before it decodes: the prompt, and after a preemption what it had generated."""
    depth: int = 0
    """Named blocks in use: the first ones of its path."""
    anonymous: int = 0
    """Further blocks in use."""
    arrived: float = 0.0
    began: float = -1.0
    """When it came to the engine, and when its first step began. Unit: simulated seconds."""
    cached: int = -1
    had: int = 0
    """Tokens that were computed when it was preempted."""
    preemptions: int = 0
    sampled: int = 0
    """Tokens committed in the last step."""
    draft: list[int] = field(default_factory=list)
    rate: tuple[float, float] = (1.0, 0.0)
    """Tokens committed and drafted per step where it drafts; for draws from a measured distribution."""
    kind: str = "own"
    """Whose text it could be drafted from, see :mod:`war_rl.sim.drafts`."""
    verified: int = 0
    """Decode steps, and the tokens drafted in them; only while a drafter looks at the text."""
    drafted: int = 0


@dataclass(slots=True)
class Tally:
    """What one replica has done. Tokens, engine steps, seconds of work."""

    computed_prompt: int = 0
    cached_prompt: int = 0
    recomputed: int = 0
    """Tokens computed again after preemptions."""
    generated: int = 0
    scheduled: float = 0.0
    steps: int = 0
    preemptions: int = 0
    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted: float = 0.0
    busy: float = 0.0


@dataclass(slots=True)
class Draft:
    """What the running requests commit per step, in running order, and what is drafted for all of them together."""

    commits: Floats
    tokens: float
    drafted: float
    """Requests with a draft."""
    most_steps: float = math.inf


class Drafts(Protocol):
    """A way of drafting for one replica."""

    def plan(self, requests: Sequence[Request], kv_tokens: float, times: StepTimes) -> Draft | None:
        """For the decode steps to come; None where nothing is drafted."""

    def after(self, decoding: Sequence[Request], prefilling: Sequence[Request], seconds: float, pure: bool) -> None:
        """A step or stretch is over, and these go on. ``pure``: nothing was prefilled in it."""


class Replica:
    """Times are simulated seconds. :meth:`arrive` and :meth:`finish_steps` say when to call the latter next."""

    def __init__(self, name: str, settings: EngineSettings, times: StepTimes, drafts: Drafts | None = None) -> None:
        self.name = name
        self.settings = settings
        self.times = times
        self.drafts = drafts
        self.cache = BlockCache(settings.blocks)
        self.tally = Tally()
        self.pace = 1.0
        """What the seconds of the steps to come are multiplied with, see :meth:`StepTimes.pace`."""
        self._pace = 1.0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        """Decoding requests, in the order in which they were scheduled first; as are the arrays."""
        self.prefilling: list[Request] = []
        self._left: Floats = np.zeros(0)
        self._computed: Floats = np.zeros(0)
        self._blocks: Floats = np.zeros(0)
        self._chunks: list[tuple[Request, int]] = []
        self._draft: Draft | None = None
        self._steps = 0
        self._began = 0.0
        self._ends = math.inf
        self._order: dict[str, int] = {}
        self._serial = 0

    @property
    def busy(self) -> bool:
        return self._steps > 0

    @property
    def ends(self) -> float:
        """When the step or stretch under way is over; infinite when idle."""
        return self._ends

    @property
    def in_engine(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.prefilling)

    def arrive(self, request: Request, now: float) -> None:
        """The request joins the queue. A stretch under way is cut at the end of its present step."""
        blocked = bool(self.waiting)
        request.arrived = now
        self.waiting.append(request)
        if not self.busy:
            self._plan(now)
        elif self._steps > 1 and not blocked:
            # Where others wait already, the first of them waits for a request to end, and this one behind it.
            self._cut(now)

    def set_pace(self, pace: float, now: float) -> None:
        """From the next step on. A stretch under way is cut at the end of its present step."""
        if pace != self.pace and self._steps > 1:
            self._cut(now)
        self.pace = pace

    def finish_steps(self, now: float) -> list[Request]:
        """The step or stretch is over (``now`` is :attr:`ends`). Returns the finished requests, and goes on."""
        finished = self._apply()
        self._plan(now)
        return finished

    # ---- one stretch

    def _tokens(self) -> float:
        return len(self.running) + (self._draft.tokens if self._draft else 0.0)

    def _growth(self) -> float:
        return float(self._draft.commits.sum()) if self._draft else float(len(self.running))

    def _cut(self, now: float) -> None:
        span = max(0.0, now - self._began) / self._pace
        tokens, kv = self._tokens(), float(self._computed.sum())
        if self.drafts is not None and self.times.draft_s:
            # The closed form knows no further term; a stretch is only ever cut a little too long by this.
            steps = max(1, math.ceil(span / (self.times.seconds(tokens, kv) + self.times.draft_s)))
        else:
            steps = self.times.steps_until(span, tokens, kv, self._growth())
        if steps < self._steps:
            self._steps = steps
            self._ends = self._began + self._seconds(steps)

    def _seconds(self, steps: int) -> float:
        """Seconds of the stretch: its decode part, and the prefill of its only step."""
        kv = float(self._computed.sum())
        seconds = self.times.stretch(steps, self._tokens(), kv, self._growth())
        for request, chunk in self._chunks:
            seconds += self.times.prefill(chunk, request.computed)
        return self._pace * (seconds + (steps * self.times.draft_s if self.drafts else 0.0))

    def _plan(self, now: float) -> None:
        """vLLM's ``schedule``, for one step with prefill in it or for as many as nothing changes in."""
        self._chunks, preempted = [], False
        self._pace = self.pace
        self._plan_drafts()
        while self.running and not self._fits(1):
            self._preempt()
            self._plan_drafts()
            preempted = True
        budget = self.settings.max_num_batched_tokens - int(self._tokens())
        for request in list(self.prefilling):
            if budget <= 0 or request not in self.prefilling:
                continue
            chunk = min(request.goal - request.computed, budget)
            preempted |= self._make_room(request, chunk)
            if request in self.prefilling:
                self._chunk(request, chunk)
                budget -= chunk
        if not preempted:
            self._admit(budget, now)
        if not self.running and not self._chunks:
            self._steps, self._ends = 0, math.inf
            return
        # After a preemption the next step may already let the queue in again.
        self._steps = 1 if self._chunks or preempted else self._stretch()
        self._began = now
        self._ends = now + self._seconds(self._steps)

    def _plan_drafts(self) -> None:
        self._draft = None
        if self.drafts is not None and self.running:
            self._draft = self.drafts.plan(self.running, float(self._computed.sum()), self.times)

    def _admit(self, budget: int, now: float) -> None:
        block = self.settings.block_size
        while self.waiting and budget > 0:
            if len(self.running) + len(self.prefilling) >= self.settings.max_num_seqs:
                return
            request = self.waiting[0]
            tokens = request.prompt + request.generated
            hit, idle = self.cache.match(request.trajectory.path, (tokens - 1) // block)
            # As with scheduler_reserve_full_isl: the whole prompt must fit, whatever of it is computed now.
            if not self._fits(1, -(-tokens // block) - hit + idle):
                return
            self.waiting.popleft()
            self.cache.take(request.trajectory.path, hit)
            request.depth, request.computed, request.goal = hit, hit * block, tokens
            if request.cached < 0:
                request.began = now
                request.cached = request.computed
                self.tally.cached_prompt += request.cached
                self.tally.computed_prompt += request.prompt - request.cached
            else:
                self.tally.recomputed += request.had - request.computed
            self._serial += 1
            self._order[request.key] = self._serial
            self.prefilling.append(request)
            chunk = min(tokens - request.computed, budget)
            self._chunk(request, chunk)
            budget -= chunk

    def _chunk(self, request: Request, tokens: int) -> None:
        """Schedule part of a prompt: its blocks are taken, and named as far as they are full, before it is computed."""
        block, end = self.settings.block_size, request.computed + tokens
        wanted = -(-end // block) - request.depth - request.anonymous
        self.cache.allocate(wanted)
        full = end // block
        fresh = full - request.depth
        self.cache.name(request.trajectory.path, request.depth, full, fresh)
        request.anonymous += wanted - fresh
        request.depth = full
        self._chunks.append((request, tokens))

    def _make_room(self, request: Request, tokens: int) -> bool:
        block, preempted = self.settings.block_size, False
        end = request.computed + tokens
        wanted = -(-end // block) - request.depth - request.anonymous
        while not self._fits(1, wanted):
            self._preempt()
            preempted = True
            if request not in self.prefilling:
                break
        return preempted

    def _fits(self, steps: int, others: int = 0) -> bool:
        """Whether the free blocks hold ``steps`` more decode steps of all that run, beside ``others`` blocks."""
        running = len(self.running)
        if not running:
            return others <= self.cache.free
        commits = self._draft.commits if self._draft else 1.0
        fastest = float(self._draft.commits.max()) if self._draft else 1.0
        if others + running * (steps * fastest / self.settings.block_size + 1.0) <= self.cache.free:
            return True
        most = np.minimum(steps * commits, self._left)
        return others + int((self._started(self._computed + most) - self._blocks).sum()) <= self.cache.free

    def _started(self, tokens: Floats) -> Floats:
        """Blocks that hold so many tokens: fractions where draws stand for drafts, whose rounding must not count."""
        return np.ceil(tokens / self.settings.block_size - 1e-6)

    def _stretch(self) -> int:
        """Decode steps until a request ends or the free blocks are used up."""
        if self._draft is None:
            steps = int(self._left.min())
        else:
            steps = int(min(np.ceil(self._left / self._draft.commits).min(), self._draft.most_steps))
        steps = max(1, steps)
        if self._fits(steps):
            return steps
        low, high = 1, steps
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _apply(self) -> list[Request]:
        """Everything the stretch has done."""
        steps, tally = self._steps, self.tally
        seconds = self._seconds(steps)
        tally.busy += seconds
        tally.steps += steps
        tally.scheduled += steps * self._tokens() + sum(chunk for _, chunk in self._chunks)
        finished = self._decoded(steps) if self.running else []
        pure = not self._chunks
        finished += self._prefilled()
        if self.drafts is not None:
            self.drafts.after(self.running, self.prefilling, seconds, pure)
        self._steps, self._ends, self._chunks = 0, math.inf, []
        return finished

    def _decoded(self, steps: int) -> list[Request]:
        draft, tally = self._draft, self.tally
        done = np.minimum(steps * draft.commits, self._left) if draft else np.full(len(self.running), float(steps))
        self._computed = self._computed + done
        self._left = self._left - done
        after = self._started(self._computed)
        self.cache.allocate(int((after - self._blocks).sum()))
        self._blocks = after
        if draft is not None:
            tally.drafts += steps * draft.drafted
            tally.draft_tokens += steps * draft.tokens
            tally.accepted += float(np.maximum(0.0, done - steps).sum())
        if self.drafts is not None:
            for request, left, count in zip(self.running, self._left.tolist(), done.tolist(), strict=True):
                request.generated, request.sampled = request.target - round(left), round(count)
                request.verified += steps
                request.drafted += len(request.draft)
        over = np.flatnonzero(self._left < 0.5)
        if not len(over):
            return []
        finished = [self.running[i] for i in over]
        for i, request in zip(over, finished, strict=True):
            self._leave(request, int(self._blocks[i]), request.prompt + request.target - 1)
            request.generated = request.target
            self._order.pop(request.key, None)
        self.running = [r for r, left in zip(self.running, self._left, strict=True) if left >= 0.5]
        self._keep(self._left >= 0.5)
        tally.generated += sum(r.target for r in finished)
        return finished

    def _prefilled(self) -> list[Request]:
        finished, ready = [], []
        for request, chunk in self._chunks:
            request.computed += chunk
            request.sampled = 0
            if request.computed < request.goal:
                continue
            request.sampled = 1
            self.prefilling.remove(request)
            request.generated += 1
            if request.generated >= request.target:
                self._leave(request, request.depth + request.anonymous, request.computed)
                self._order.pop(request.key, None)
                self.tally.generated += request.target
                finished.append(request)
            else:
                ready.append(request)
        if ready:
            self.running += ready
            self._left = np.concatenate([self._left, [float(r.target - r.generated) for r in ready]])
            self._computed = np.concatenate([self._computed, [float(r.computed) for r in ready]])
            self._blocks = np.concatenate([self._blocks, [float(r.depth + r.anonymous) for r in ready]])
        return finished

    def _leave(self, request: Request, blocks: int, computed: int) -> None:
        """The request's blocks are free again; the full ones keep their text."""
        path, full = request.trajectory.path, computed // self.settings.block_size
        self.cache.name(path, request.depth, full, full - request.depth)
        self.cache.release(path, full)
        self.cache.give_back(blocks - full)
        request.depth = request.anonymous = request.computed = 0

    def _preempt(self) -> None:
        """The request that was scheduled last goes back to the head of the queue and starts again."""
        newest = max([*self.prefilling, *self.running], key=lambda r: self._order[r.key])
        self.tally.preemptions += 1
        newest.preemptions += 1
        if newest in self.prefilling:
            self.prefilling.remove(newest)
            self._chunks = [c for c in self._chunks if c[0] is not newest]
            newest.had = newest.computed
            self._leave(newest, newest.depth + newest.anonymous, newest.computed)
        else:
            at = self.running.index(newest)
            newest.generated = newest.target - round(float(self._left[at]))
            newest.had = newest.prompt + newest.generated - 1
            self._leave(newest, int(self._blocks[at]), newest.had)
            del self.running[at]
            self._keep(np.arange(len(self._left)) != at)
            if self._draft is not None:
                self._draft.commits = np.delete(self._draft.commits, at)
        newest.draft, newest.sampled = [], 0
        self.waiting.appendleft(newest)

    def _keep(self, which: Floats) -> None:
        self._left, self._computed, self._blocks = self._left[which], self._computed[which], self._blocks[which]
