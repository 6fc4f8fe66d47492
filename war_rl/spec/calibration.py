# SPDX-License-Identifier: Apache-2.0
"""What a match is worth: chance that a predicted token is right, learned online.

Three levels of Beta cells, each the prior of the finer one: match length; with the share of the votes and the source;
with the number of occurrences and the depth in the draft. A logistic regression moves their estimate by what the tokens
themselves say (kernels.corrected). A prediction is settled against the tokens that really came,
whether it was drafted or not, so learning costs no engine time.
"""

from __future__ import annotations

import math

import numpy as np

from war_rl.spec import kernels
from war_rl.spec.kernels import CELLS, CELLS_1, CELLS_2, PRIOR_WEIGHT, SURE, Floats

_KINDS = (kernels.BY_CONTEXT, kernels.BY_PAIR, kernels.BY_SHAPE)
"""Where the weights of the second, third and fourth kind begin."""

SAFE_PRIOR = (0.05, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.85, 0.9)
"""Chance by match bucket before anything was seen: below what real agent text shows, so that a fresh engine does not
waste steps on noise."""
SAFE_WEIGHT = 20.0
"""Observations the safe prior counts for."""


class Calibration:
    """One array [ROWS, 2]: Beta cells (right, seen), decayed at every policy update, then the correction's weights
    (weight, sum of squared gradients), which begin by changing nothing.

    Args:
        decay: what an observation counts for after a policy update, in (0, 1].
    """

    def __init__(self, decay: float = 0.5) -> None:
        self._decay = decay
        self._prior: Floats = np.zeros((CELLS, 2), np.float64)
        self._prior[:CELLS_1, 0] = SAFE_WEIGHT * np.array(SAFE_PRIOR)
        self._prior[:CELLS_1, 1] = SAFE_WEIGHT
        self.cells: Floats = np.zeros((kernels.ROWS, 2), np.float64)
        self.cells[:CELLS] = self._prior
        self.cells[kernels.SLOPE, 0] = 1.0

    def begin_step(self) -> None:
        """A new policy writes other text: old evidence counts less, the safe prior stays."""
        cells = self.cells[:CELLS]
        cells -= self._prior
        cells *= self._decay
        cells += self._prior

    def best(self) -> float:
        """An upper bound of the chance that any prediction could be given now: :func:`kernels.estimate` over all cells
        at once, with the largest weight of each kind.

        Takes some tens of microseconds.
        """
        one, two, three = np.split(self.cells[:CELLS], (CELLS_1, CELLS_1 + CELLS_2))
        chances = one[:, 0] / one[:, 1]
        for cells in (two, three):
            prior = PRIOR_WEIGHT * np.repeat(chances, len(cells) // len(chances))
            chances = (cells[:, 0] + prior) / (cells[:, 1] + PRIOR_WEIGHT)
        p = min(max(float(chances.max()), SURE), 1.0 - SURE)
        slope, bias = (float(self.cells[row, 0]) for row in (kernels.SLOPE, kernels.BIAS))
        kinds = np.split(self.cells[kernels.BY_TOKEN :, 0], np.array(_KINDS) - kernels.BY_TOKEN)
        z = max(slope, 0.0) * math.log(p / (1.0 - p)) + bias + sum(float(kind.max()) for kind in kinds)
        return 1.0 / (1.0 + math.exp(-z))

    def chance(self, match: int) -> float:
        """Chance that the next token is right after a match of this length, over all sources; for reports."""
        cell = self.cells[kernels.match_bucket(match)]
        return float(cell[0] / cell[1])
