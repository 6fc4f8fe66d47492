# SPDX-License-Identifier: Apache-2.0
"""Drafts in the simulation: the real drafter over real text, or draws from what it was measured to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from war_rl.config import SpecConfig
from war_rl.sim.engine import Draft, Request
from war_rl.sim.times import StepTimes
from war_rl.spec.budget import START_GAIN, STOP_GAIN
from war_rl.spec.drafter import Drafter, RequestView
from war_rl.types import FeedItem

KINDS = ("own", "sibling")
"""Whose text a turn could be drafted from: its own trajectory's only, or also that of a sibling that has already come
as far."""


class TextDrafts:
    """War-RL's own :class:`Drafter`, asked after every engine step as the engine's worker asks it."""

    def __init__(self, spec: SpecConfig, stop_token_ids: frozenset[int] = frozenset()) -> None:
        self._spec = spec
        self._stops = stop_token_ids
        self.drafter = self._new()

    def _new(self) -> Drafter:
        return Drafter(self._spec, stop_token_ids=self._stops, clock=lambda: 0.0)

    def plan(self, requests: Sequence[Request], kv_tokens: float, times: StepTimes) -> Draft | None:
        commits, drafted, tokens = np.ones(len(requests)), 0, 0
        for i, request in enumerate(requests):
            if request.draft:
                drafted += 1
                tokens += len(request.draft)
                commits[i] += _right(request)
        return Draft(commits, float(tokens), float(drafted), most_steps=1)

    def after(self, decoding: Sequence[Request], prefilling: Sequence[Request], seconds: float, pure: bool) -> None:
        going = [*decoding, *prefilling]
        if not going:
            return
        drafts = self.drafter.propose([_view(r) for r in going], seconds)
        for request, draft in zip(going, drafts, strict=True):
            request.draft = draft

    def feed(self, items: Iterable[FeedItem]) -> None:
        self.drafter.feed(items)

    def idle(self) -> None:
        """Take all waiting text in."""
        while self.drafter.idle():
            pass

    def begin_step(self, step: int) -> None:
        self.drafter.begin_step(step)


def _right(request: Request) -> int:
    """How many of the draft's tokens the trajectory really has there."""
    text = request.trajectory.text
    assert text is not None
    at = request.prompt + request.generated
    truth = text[at : at + min(len(request.draft), request.target - request.generated)]
    wrong = np.flatnonzero(truth != np.asarray(request.draft[: len(truth)], dtype=truth.dtype))
    return int(wrong[0]) if len(wrong) else len(truth)


def _view(request: Request) -> RequestView:
    text = request.trajectory.text
    assert text is not None
    return RequestView(
        key=request.key,
        trajectory=request.trajectory.id,
        tokens=text[: request.prompt + request.generated],
        prompt_tokens=request.prompt,
        sampled=request.sampled,
        draftable=True,
        max_draft=max(0, request.target - request.generated - 1),
    )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Measured drafting, turn by turn: (tokens committed, tokens drafted) per verify step of the turn.

    Attributes:
        own, sibling: the turns by :data:`KINDS`.
        source: where it was measured.
    """

    own: tuple[tuple[float, float], ...]
    sibling: tuple[tuple[float, float], ...]
    source: str = ""

    def __post_init__(self) -> None:
        for kind in KINDS:
            turns = getattr(self, kind)
            if not turns or any(m < 1.0 or d < 0.0 or m > d + 1.0 + 1e-9 for m, d in turns):
                raise ValueError(f"acceptance: {kind} needs turns with 1 <= committed <= drafted + 1")

    def draw(self, kind: str, name: str) -> tuple[float, float]:
        """The same name always draws the same turn of a kind."""
        turns = self.sibling if kind == "sibling" else self.own
        digest = blake2b(name.encode(), digest_size=8).digest()
        return turns[int.from_bytes(digest, "little") % len(turns)]

    def to_json(self) -> dict[str, Any]:
        return {"own": self.own, "sibling": self.sibling, "source": self.source}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Acceptance:
        try:
            own, sibling = (tuple((float(m), float(d)) for m, d in data[kind]) for kind in KINDS)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"acceptance: expected own and sibling as lists of [committed, drafted]: {error}"
            ) from error
        return cls(own, sibling, str(data.get("source", "")))

    @classmethod
    def load(cls, text: str) -> Acceptance:
        return cls.from_json(json.loads(text))


class RateDrafts:
    """Each turn commits and drafts at its drawn rate while the replica drafts; whether it does is War-RL's rule.

    Policy ``budget`` is applied to a turn's mean draft: it is drafted for where what it commits beyond one token is
    worth the time its tokens take at the present rate (:mod:`war_rl.spec.budget`).
    """

    def __init__(self, spec: SpecConfig) -> None:
        self._spec = spec
        self._drafting = False

    def plan(self, requests: Sequence[Request], kv_tokens: float, times: StepTimes) -> Draft | None:
        running = len(requests)
        if self._spec.policy == "off" or (self._spec.policy == "war" and running > self._spec.max_running):
            return None
        rates = np.array([r.rate for r in requests])
        commits, drafted = rates[:, 0], rates[:, 1]
        if self._spec.policy == "budget":
            plain = times.seconds(running, kv_tokens)
            pays = commits - 1.0 > running / plain * times.per_token * drafted
            commits, drafted = np.where(pays, commits, 1.0), np.where(pays, drafted, 0.0)
            gain = commits.sum() / times.seconds(running + drafted.sum(), kv_tokens) * plain / running - 1.0
            self._drafting = bool(gain > (STOP_GAIN if self._drafting else START_GAIN))
            if not self._drafting:
                return None
        return Draft(commits, float(drafted.sum()), float((drafted > 0).sum()))

    def after(self, decoding: Sequence[Request], prefilling: Sequence[Request], seconds: float, pure: bool) -> None:
        """Draws need not be told anything."""
