# SPDX-License-Identifier: Apache-2.0
"""Seconds of an engine step, and of a stretch of equal decode steps in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class StepTimes:
    """T = base + per_token * decode tokens + per_kv * KV tokens they attend to
    + per_prefill * prompt tokens + per_prefill_kv * (prompt tokens x mean context before them).

    The first three are those of :class:`war_rl.steptime.StepTimeModel`.

    Attributes:
        base: seconds per engine step.
        per_token: seconds per decoded or verified token.
        per_kv: seconds per KV token of the decoding requests.
        per_prefill: seconds per computed prompt token.
        per_prefill_kv: seconds per computed prompt token and context token in front of it.
        send_s: from the client's request to the engine's queue, in seconds.
        return_s: from the engine's last token to the client's next action, in seconds.
        draft_s: seconds per engine step that choosing drafts takes.
        alone: a step's seconds while no other replica works, as a share of those while all do. Less than 1 where
            replicas share a machine's memory bandwidth, as on CPUs; 1 where each has an accelerator of its own.
        name, source: what this is, and where the figures come from.

    Raises:
        ValueError: a negative coefficient, or steps that would take no time.
    """

    base: float
    per_token: float
    per_kv: float = 0.0
    per_prefill: float = 0.0
    per_prefill_kv: float = 0.0
    send_s: float = 0.0
    return_s: float = 0.0
    draft_s: float = 0.0
    alone: float = 1.0
    name: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float | int) and not 0.0 <= value < math.inf:
                raise ValueError(f"step times: {item.name}={value} must be a number >= 0")
        if self.alone <= 0.0:
            raise ValueError(f"step times: alone={self.alone} must be above 0")
        if self.base + self.per_token <= 0.0:
            raise ValueError("step times: base and per_token are both 0, so that a step would take no time")

    def seconds(self, tokens: float, kv_tokens: float = 0.0, verify: bool = False) -> float:
        """A decode step of ``tokens`` over ``kv_tokens``; the interface of :class:`StepTimeModel`. What verifying costs
        by itself is not modelled."""
        return self.base + self.per_token * tokens + self.per_kv * kv_tokens

    def prefill(self, tokens: float, before: float) -> float:
        """What ``tokens`` prompt tokens after ``before`` context tokens add to a step."""
        return tokens * (self.per_prefill + self.per_prefill_kv * (before + 0.5 * tokens))

    def stretch(self, steps: int, tokens: float, kv_tokens: float, growth: float) -> float:
        """``steps`` decode steps of ``tokens`` each, the KV growing by ``growth`` tokens from step to step."""
        return steps * self.seconds(tokens, kv_tokens) + self.per_kv * growth * steps * (steps - 1) / 2.0

    def steps_until(self, seconds: float, tokens: float, kv_tokens: float, growth: float) -> int:
        """Whole steps after which at least ``seconds`` have passed; at least 1."""
        first = self.seconds(tokens, kv_tokens)
        half = self.per_kv * growth / 2.0
        if half > 0.0:
            linear = first - half
            guess = (-linear + math.sqrt(linear * linear + 4.0 * half * max(seconds, 0.0))) / (2.0 * half)
        else:
            guess = seconds / first
        steps = max(1, math.ceil(guess - 1e-9))
        while steps > 1 and self.stretch(steps - 1, tokens, kv_tokens, growth) >= seconds:
            steps -= 1
        return steps

    def pace(self, others: int, working: int) -> float:
        """What a step's seconds are multiplied with while ``working`` of the ``others`` replicas work."""
        return self.alone + (1.0 - self.alone) * working / others if others else 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepTimes:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError: unknown or missing names.
        """
        known = {item.name for item in fields(cls)}
        unknown = set(data) - known
        missing = {"base", "per_token"} - set(data)
        if unknown or missing:
            raise ValueError(
                f"step times: unknown {sorted(unknown)}, missing {sorted(missing)}; fields: {sorted(known)}"
            )
        return cls(**data)
