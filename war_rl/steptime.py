# SPDX-License-Identifier: Apache-2.0
"""Seconds of one engine step from what it computes: T(n, kv) = a + b*n + c*kv, and d more if it verifies drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHAPE_PRIOR = 0.08
"""b / a before anything is known: one more token costs 8 percent of an empty step. Measured on two CPU cores with a
135M model; accelerators are cheaper per token, so the prior errs towards drafting less."""
PRIOR_WEIGHT = 4.0
"""How many observations the prior counts for."""
HALF_LIFE = 500
"""Observations after which an old one counts half."""
OUTLIER = 3.0
"""An observation further than this many mean absolute residuals from the fit is pulled in to that distance."""
KV_SCALE = 1e-4
"""kv tokens are fitted in units of 10,000 so that the normal equations stay well conditioned."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """``base`` seconds per step, ``per_token`` seconds per computed token, ``per_kv`` seconds per resident kv token,
    ``verify`` seconds more for a step that verifies drafts, however many: other attention kernels, rejection sampling.
    """

    base: float
    per_token: float
    per_kv: float
    verify: float = 0.0


class StepTimeModel:
    """Decayed, outlier-robust least squares with non-negative coefficients.

    Args:
        base_seconds: an engine step with nothing in it, before any observation; the first observation sets the scale
            when None.
    """

    def __init__(self, base_seconds: float | None = None) -> None:
        self._decay = 0.5 ** (1.0 / HALF_LIFE)
        self._matrix = np.zeros((4, 4))
        self._vector = np.zeros(4)
        self._residual = 0.0
        self._base_prior = base_seconds
        self._rejected_in_a_row = 0
        self.observations = 0
        self.outliers = 0
        base = base_seconds or 0.02
        self.coefficients = Coefficients(base, SHAPE_PRIOR * base, 0.0)

    def seconds(self, tokens: float, kv_tokens: float = 0.0, verify: bool = False) -> float:
        """Predicted seconds of a step that computes ``tokens`` over ``kv_tokens`` resident tokens.

        ``verify``: whether drafts are among the tokens.
        """
        c = self.coefficients
        return c.base + c.per_token * tokens + c.per_kv * kv_tokens + c.verify * verify

    def observe(self, tokens: float, kv_tokens: float, seconds: float, verify: bool = False) -> None:
        """Learn from one step. Steps of other kinds (prefill, a wait in between) must be left out by the caller.

        Raises:
            ValueError: seconds or tokens are not positive and finite.
        """
        if not (np.isfinite(seconds) and seconds > 0 and tokens > 0):
            raise ValueError(f"a step of {tokens} tokens in {seconds} s cannot be observed")
        if self._base_prior is None:
            self._base_prior = seconds / (1.0 + SHAPE_PRIOR * tokens)
            self._fit()
        clipped = self._clip(seconds, self.seconds(tokens, kv_tokens, verify))
        row = np.array([1.0, tokens, kv_tokens * KV_SCALE, float(verify)])
        self._matrix = self._matrix * self._decay + np.outer(row, row)
        self._vector = self._vector * self._decay + row * clipped
        self.observations += 1
        self._fit()

    def _clip(self, seconds: float, expected: float) -> float:
        off = seconds - expected
        limit = OUTLIER * max(self._residual, 0.02 * expected)
        # Early on nothing is known about the noise; and a level that persists is not an outlier.
        outlier = self.observations >= 16 and abs(off) > limit
        self._rejected_in_a_row = self._rejected_in_a_row + 1 if outlier else 0
        if outlier and self._rejected_in_a_row <= 16:
            self.outliers += 1
            off = limit if off > 0 else -limit
        self._residual += 0.05 * (abs(off) - self._residual)
        return expected + off

    def _fit(self) -> None:
        """Ridge towards the prior; a coefficient that comes out negative is left out and the rest fitted again."""
        base = self._base_prior or 0.02
        # The prior speaks about the ratio and the level at one point, weakly about each alone.
        prior = np.array([base, SHAPE_PRIOR * base, 0.0, 0.0])
        ridge = np.diag([PRIOR_WEIGHT, 16.0 * PRIOR_WEIGHT, PRIOR_WEIGHT, PRIOR_WEIGHT]) * 0.25
        active = [0, 1, 2, 3]
        solution = np.zeros(4)
        while active:
            index = np.ix_(active, active)
            solution[:] = 0.0
            solution[active] = np.linalg.solve((self._matrix + ridge)[index], (self._vector + ridge @ prior)[active])
            negative = [i for i in active if solution[i] < 0.0]
            if not negative:
                break
            active = [i for i in active if i != min(negative, key=lambda i: solution[i])]
        self.coefficients = Coefficients(
            float(solution[0]), float(solution[1]), float(solution[2] * KV_SCALE), float(solution[3])
        )


class StepTable:
    """Seconds of a step from a table of (tokens, seconds), linear in between and beyond; for modelling and tests."""

    def __init__(self, points: dict[int, float]) -> None:
        if len(points) < 2:
            raise ValueError(f"a step-time table needs two points at least, got {points!r}")
        self._tokens = np.array(sorted(points), dtype=np.float64)
        self._seconds = np.array([points[int(n)] for n in self._tokens])

    def seconds(self, tokens: float, kv_tokens: float = 0.0, verify: bool = False) -> float:
        """Seconds of a step that computes ``tokens``; the others are ignored."""
        upper = int(np.clip(np.searchsorted(self._tokens, tokens), 1, len(self._tokens) - 1))
        (n0, n1), (t0, t1) = self._tokens[upper - 1 : upper + 1], self._seconds[upper - 1 : upper + 1]
        return float(t0 + (t1 - t0) * (tokens - n0) / (n1 - n0))


CPU_TABLE = StepTable({1: 0.023, 4: 0.028, 8: 0.035, 16: 0.047, 32: 0.080})
"""Two CPU cores, SmolLM2-135M in bf16 (docs/architecture.md)."""
