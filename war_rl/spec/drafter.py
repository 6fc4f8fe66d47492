# SPDX-License-Identifier: Apache-2.0
"""The one object an engine adapter talks to: called on every engine step by one thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from war_rl.config import SpecConfig
from war_rl.spec import kernels
from war_rl.spec.budget import FITTED_STEPS, Budget, StepTime
from war_rl.spec.calibration import Calibration
from war_rl.spec.corpus import Corpus, Entry, IndexFactory
from war_rl.spec.index import Predictions
from war_rl.steptime import StepTimeModel
from war_rl.types import SOURCES, FeedItem, GroupId, TokenArray, TrajectoryId

LOOK_AHEAD = 1
"""Tokens predicted beyond what may be drafted, so that calibration sees what was not drafted too."""
REACH_FLOOR = 0.02
"""A prediction ends where the chance to get that far falls below this: no step-time model makes it worth a token."""
SLICE_SHARE = 0.4
"""Share of ``war.spec.ingest_ms`` after which no new piece of text is begun: the last one begun must end within it."""
BEST_EVERY = 64
"""Steps between two looks at the best chance that calibration could give at all."""


@dataclass(slots=True)
class RequestView:
    """One running request as the engine sees it after a step.

    Attributes:
        key: engine request id, unique.
        trajectory: None for anonymous requests, which are drafted from their own text and the window only.
        tokens: int32 [n], prompt and everything committed so far, this step's tokens included. Only read.
        prompt_tokens: length of the prompt part.
        sampled: tokens committed for it in this step; 0 while it is still prefilling.
        draftable: its sampling parameters are ones the verifier honours.
        max_draft: clamp from context length and max_tokens.
        stops: end-of-turn tokens of its own, beside the drafter's.
    """

    key: str
    trajectory: TrajectoryId | None
    tokens: TokenArray
    prompt_tokens: int
    sampled: int
    draftable: bool
    max_draft: int
    stops: frozenset[int] = frozenset()


class _Running:
    """What the drafter remembers of a running request between two steps."""

    __slots__ = ("drafted", "entry", "guess", "prefix", "row", "told")

    def __init__(self, entry: Entry, prefix: str) -> None:
        self.entry = entry
        self.prefix = prefix
        self.drafted = 0
        self.guess: Predictions | None = None
        self.row = 0
        self.told = False


class Drafter:
    """Keeps the text, decides how much to draft, and counts what came of it.

    Args:
        config: ``war.spec``.
        index_factory: makes the index from a bound in bytes.
        stop_token_ids: end-of-turn tokens; nothing is drafted past one.
        clock: monotonic seconds.
        unix_time: seconds since the epoch, only for the feed-lag metric; None leaves it out.
        step_time: fixed step times instead of the fitted model; for replays.
        trust_prior: whether the step-time model's prior, measured on CPUs, is this machine's too. Elsewhere policy
            ``budget`` drafts only after some steps have been measured.
    """

    def __init__(
        self,
        config: SpecConfig,
        *,
        index_factory: IndexFactory | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], float],
        unix_time: Callable[[], float] | None = None,
        step_time: StepTime | None = None,
        trust_prior: bool = False,
    ) -> None:
        self._config = config
        self._on = config.policy != "off"
        self._stops = np.array(sorted(stop_token_ids), np.int64)
        self._clock = clock
        self._unix_time = unix_time
        self._slice_s = SLICE_SHARE * config.ingest_ms / 1000.0
        # With drafting off nothing is kept, so nothing is allocated either.
        memory = config.memory_mb << 20 if self._on else 1 << 20
        self._corpus = Corpus(memory, config.window_steps, clock, index_factory)
        self.calibration = Calibration()
        self.budget = Budget()
        self.model = StepTimeModel()
        self._step_time = step_time
        self._trust_prior = trust_prior or step_time is not None
        self._best = 1.0
        self._running: dict[str, _Running] = {}
        self._serial = 0
        self._scheduled: dict[str, int] = {}
        """Tokens that each request has in the step to come, if it is a decode step."""
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._sources: dict[tuple[str, str], str] = {}
        if self._on and index_factory is None:
            self._warm_up()

    @staticmethod
    def _warm_up() -> None:
        """Compile (or load) the kernels now rather than within the first engine steps."""
        corpus = Corpus(1 << 20, 0, lambda: 0.0)
        entry = corpus.enter("warm", None, np.zeros(0, np.int32))
        tokens = np.array([1, 2, 3, 1, 2], np.int32)
        corpus.extend(entry, tokens, 0.0)
        corpus.index.publish(entry.slot, 8)
        cells = Calibration().cells
        found = corpus.index.predict([entry.slot], [1], cells, np.zeros(0, np.int64), 0.0, 2)
        kernels.learn(cells, found.tokens[0], found.info[0], 1, tokens)
        corpus.index.truncate(entry.slot, 0)
        kernels.migrate(kernels.Heads(np.zeros((2, 4), np.int32), np.zeros((2, 2), np.int32)), 0, 1)

    # -- every engine step --------------------------------------------------------------------------------------

    def propose(self, requests: Sequence[RequestView], step_seconds: float | None = None) -> list[list[int]]:
        """Drafts for the next engine step, one list per request, in order; an empty list drafts nothing.

        Args:
            requests: everything that runs, prefilling requests included.
            step_seconds: how long the engine step before this call took; None when not measured.
        """
        if not self._on:
            return [[] for _ in requests]
        self._serial += 1
        # First, so that a trajectory's next turn finds its text free even when it starts in the very next step.
        self._retire({request.key for request in requests})
        began = self._clock()
        until = began + self._slice_s
        ready = [self._take_in(request, until) for request in requests]
        self._observe(requests, step_seconds)
        self._corpus.ingest(until, self._unix_time)
        drafts = self._drafts(requests, ready)
        self._scheduled = {r.key: 1 + len(draft) for r, draft in zip(requests, drafts, strict=True)}
        self._counts[self._prefix(requests) + "propose_seconds"] += self._clock() - began
        return drafts

    def _take_in(self, request: RequestView, until: float) -> _Running | None:
        """Bring the text up to date; the request's record when it can be drafted for in this step."""
        running = self._running.get(request.key)
        if running is None:
            try:
                running = self._start(request)
            except MemoryError:
                self._counts["unplaced_steps"] += 1
                return None
        guess = running.guess
        if guess is not None:
            if request.sampled:
                self._settle(request, running, guess)
            running.guess = None
            running.drafted = 0
        complete = self._corpus.extend(running.entry, request.tokens, until)
        if not request.draftable:
            if not running.told:
                running.told = True
                self._counts[running.prefix + "unsupported_requests"] += 1
            return None
        return running if complete and request.sampled and request.max_draft > 0 else None

    @staticmethod
    def _prefix(requests: Sequence[RequestView]) -> str:
        """Whose rollout the requests' counts belong to, by the first: training and validation do not overlap."""
        trajectory = requests[0].trajectory if requests else None
        return "val/" if trajectory is not None and trajectory.validate else ""

    def _start(self, request: RequestView) -> _Running:
        entry = self._corpus.enter(request.key, request.trajectory, request.tokens)
        running = _Running(entry, self._prefix([request]))
        self._running[request.key] = running
        return running

    def _settle(self, request: RequestView, running: _Running, guess: Predictions) -> None:
        """Learn from what came after the last prediction, and count the accepted part of the draft."""
        row = running.row
        came = np.array(request.tokens[len(request.tokens) - request.sampled :], np.int32)
        right = int(
            kernels.learn(self.calibration.cells, guess.tokens[row], guess.info[row], int(guess.counts[row]), came)
        )
        if not running.drafted:
            return
        # The step's last token is the bonus (or the correction), never a draft token.
        accepted = min(right, running.drafted, request.sampled - 1)
        counts, prefix = self._counts, running.prefix
        counts[prefix + "accepted_tokens"] += accepted
        for i in range(accepted):
            counts[prefix + "accepted_tokens_" + SOURCES[int(guess.info[row, i, 3])]] += 1

    def _retire(self, present: Set[str] = frozenset()) -> None:
        """Requests that are not present have left the engine: finished, aborted or preempted."""
        for key in self._running.keys() - present:
            self._corpus.leave(self._running.pop(key).entry)

    def _observe(self, requests: Sequence[RequestView], step_seconds: float | None) -> None:
        """Teach the step-time model from pure decode steps: only their token count is known here.

        A request that generated its first token in this step was prefilled in it.
        """
        scheduled = [self._scheduled.get(r.key, 0) for r in requests]
        decode = all(
            n and r.sampled and len(r.tokens) - r.sampled > r.prompt_tokens
            for n, r in zip(scheduled, requests, strict=True)
        )
        if step_seconds and requests and decode:
            # A request that was aborted within the step was computed as well; the error is one step's and bounded.
            kv_tokens = float(sum(len(r.tokens) for r in requests))
            tokens = sum(scheduled)
            verify = tokens > len(requests)
            self.model.observe(tokens, kv_tokens, step_seconds, verify)
            if verify:
                # The same tokens, one for each request and step, at this load.
                steps = sum(r.sampled for r in requests) / len(requests)
                model = self._step_time or self.model
                plain = steps * model.seconds(len(requests), kv_tokens)
                saved = plain - model.seconds(tokens, kv_tokens, verify)
                self._counts[self._prefix(requests) + "decode_seconds_saved"] += saved

    # -- choosing -----------------------------------------------------------------------------------------------

    def _drafts(self, requests: Sequence[RequestView], ready: list[_Running | None]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        chosen = [i for i, running in enumerate(ready) if running is not None]
        running_now = len(requests)
        kv_tokens = float(sum(len(r.tokens) for r in requests))
        if not chosen or self._held_off(running_now, kv_tokens):
            return drafts
        begun = self._clock()
        cap = self._config.max_draft_tokens
        limits = [min(requests[i].max_draft, cap) for i in chosen]
        slots = [running.entry.slot for running in ready if running is not None]
        found = self._corpus.index.predict(
            slots, [n + LOOK_AHEAD for n in limits], self.calibration.cells, self._stops, REACH_FLOOR, cap + LOOK_AHEAD
        )
        counts = found.counts.tolist()
        for row, i in enumerate(chosen):
            if requests[i].stops:
                limits[row] = _upto(found.tokens[row, : limits[row]].tolist(), requests[i].stops)
        probs = [found.probs[row, : min(counts[row], limits[row])].tolist() for row in range(len(chosen))]
        self.budget.looked(len(chosen), self._clock() - begun)
        lengths = self._lengths(probs, found, running_now, kv_tokens)
        for row, i in enumerate(chosen):
            running = ready[i]
            assert running is not None
            running.guess, running.row, running.drafted = found, row, lengths[row]
            if lengths[row]:
                drafts[i] = found.tokens[row, : lengths[row]].tolist()
                self._count_draft(running, found, row, lengths[row])
        return drafts

    def _held_off(self, running: int, kv_tokens: float) -> bool:
        """Whether this step's drafts could only be empty, or are not worth looking for."""
        if self._config.policy == "war":
            held = running > self._config.max_running
        else:
            if self._serial % BEST_EVERY == 1:
                self._best = self.calibration.best()
            held = self.budget.asleep(running) or (
                self._model_known() and self.budget.hopeless(running, kv_tokens, self._times(), self._best)
            )
        self._counts["steps_held_off"] += held
        return held

    def _times(self) -> StepTime:
        return self._step_time or self.model

    def _model_known(self) -> bool:
        return self._trust_prior or self.model.observations >= FITTED_STEPS

    def _lengths(self, probs: list[list[float]], found: Predictions, running: int, kv_tokens: float) -> list[int]:
        if self._config.policy == "war":
            return [self._published_length(p, int(found.info[row, 0, 4])) for row, p in enumerate(probs)]
        if not self._model_known():
            # Meanwhile predictions are settled and teach the calibration.
            self._counts["steps_unmeasured"] += 1
            return [0] * len(probs)
        reach: list[list[float]] = []
        for chances in probs:
            total, line = 1.0, []
            for chance in chances:
                total *= chance
                line.append(total)
            reach.append(line)
        return self.budget.choose(reach, running, kv_tokens, self._times())

    def _published_length(self, probs: list[float], match: int) -> int:
        """Policy ``war``: no longer than the match, ending where a token's own chance is small."""
        length = 0
        while length < min(len(probs), match) and probs[length] >= self._config.min_token_prob:
            length += 1
        return length

    def _count_draft(self, running: _Running, found: Predictions, row: int, length: int) -> None:
        counts, prefix = self._counts, running.prefix
        counts[prefix + "drafts"] += 1
        counts[prefix + "draft_tokens"] += length
        for i in range(length):
            counts[prefix + "draft_tokens_" + SOURCES[int(found.info[row, i, 3])]] += 1
            if self._corpus.was_fed(int(found.info[row, i, 5])):
                # Read from text that another replica generated.
                counts[prefix + "draft_tokens_fed"] += 1

    def explain(self, key: str) -> list[tuple[str, int]]:
        """Source and match length of each token of the draft that was last proposed for a request; for reports."""
        running = self._running.get(key)
        if running is None or running.guess is None:
            return []
        info = running.guess.info[running.row, : running.drafted]
        return [(SOURCES[int(source)], int(match)) for source, match in info[:, 3:5]]

    # -- between engine steps -----------------------------------------------------------------------------------

    def feed(self, items: Iterable[FeedItem]) -> None:
        """Queue text from elsewhere; it is taken in by :meth:`propose` and :meth:`idle`."""
        if self._on:
            self._corpus.feed(items)

    def idle(self) -> bool:
        """Take in one bounded slice while the engine has nothing to do; True if more is waiting."""
        if not self._on:
            return False
        self._retire()
        self._scheduled = {}
        return self._corpus.ingest(self._clock() + self._slice_s, self._unix_time)

    def forget_group(self, group: GroupId) -> None:
        """A group was dropped: its text leaves. Its requests that still run start afresh."""
        for key in [k for k, r in self._running.items() if _group_of(r.entry) == group]:
            del self._running[key]
        self._corpus.forget_group(group)

    def begin_step(self, step: int) -> None:
        """New weights: text older than the window leaves, the rest stays, calibration trusts its past less."""
        if not self._on:
            return
        self._retire()
        self._corpus.begin_step(step)
        self.calibration.begin_step()

    # -- counting -----------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """Cumulative counts under flat names, validation under ``val/``; and gauges (bytes, trees, step model)."""
        fitted = self.model.coefficients
        return {
            **self._counts,
            **self._corpus.gauges(),
            "running": len(self._running),
            "step_base_s": fitted.base,
            "step_per_token_s": fitted.per_token,
            "step_verify_s": fitted.verify,
            "step_outliers": self.model.outliers,
        }


def _upto(tokens: list[int], stops: frozenset[int]) -> int:
    """How many tokens there are up to the first stop token, itself included."""
    return next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))


def _group_of(entry: Entry) -> GroupId | None:
    return entry.name.group if isinstance(entry.name, TrajectoryId) else None
