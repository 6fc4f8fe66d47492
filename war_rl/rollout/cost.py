# SPDX-License-Identifier: Apache-2.0
"""What a placement costs, in seconds, with rates that each replica's own finished turns teach.

A turn that generates g tokens while its replica computes u prompt tokens, its own or others', and on average n turns
run beside it, takes about

    seconds = u / prefill + g * (decode + interference * n)

which is linear in (1 / prefill, decode, interference) and fitted by recursive least squares with forgetting, over all
replicas together: one replica's few turns say little about three numbers. A replica that is slower or faster than the
rest is scaled by one factor of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RatePriors:
    """Rates believed before the first turn ends, and how fast old turns are forgotten.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed per second by an otherwise idle replica.
        decode_seconds: seconds per generated token of a turn that runs alone.
        interference_seconds: seconds that each further running turn adds to every generated token.
        forgetting: weight of the past after each new turn, in (0, 1].
    """

    prefill_tokens_per_s: float
    decode_seconds: float
    interference_seconds: float
    forgetting: float


SPREAD = 100.0
"""Each rate stays within this factor of its prior: a fit is not a law."""


class ReplicaRates:
    """Online fit of the three rates."""

    def __init__(self, priors: RatePriors) -> None:
        self.priors = priors
        self._forgetting = priors.forgetting
        self._prior = (1.0 / priors.prefill_tokens_per_s, priors.decode_seconds, priors.interference_seconds)
        self.prefill, self.decode, self.interference = self._prior
        # Variance of the prior: each rate may well be wrong by ten times its own size.
        self._limit = tuple((10.0 * v) ** 2 for v in self._prior)
        self._cov = [[self._limit[i] if i == j else 0.0 for j in range(3)] for i in range(3)]
        self.turns = 0
        self.turn_seconds = 0.0
        """Mean seconds of a turn, exponentially weighted."""
        self.mean_abs_error = 0.0
        """Mean absolute error of the predicted seconds, exponentially weighted."""

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1.0 / self.prefill

    def predict(self, computed: float, generated: float, others: float) -> float:
        """Seconds of a turn that computes and generates these tokens beside ``others`` running turns on average."""
        return computed * self.prefill + generated * (self.decode + self.interference * others)

    def observe(self, computed: int, generated: int, others: float, seconds: float) -> None:
        """A turn has ended. Turns without a usable time are ignored."""
        if seconds <= 0.0 or computed + generated <= 0:
            return
        predicted = self.predict(computed, generated, others)
        error = abs(seconds - predicted)
        weight = max(0.05, 1.0 / (1 + self.turns))
        self.turns += 1
        self.turn_seconds += weight * (seconds - self.turn_seconds)
        self.mean_abs_error += weight * (error - self.mean_abs_error)
        # Turns are noisy in proportion to their length, and by the engine steps they begin and end within; a short one
        # must not be taken at its word.
        noise = 0.2 * max(seconds, predicted) + 2.0 * self._prior[1]
        self._fit((float(computed), float(generated), generated * others), seconds, noise * noise)

    def _fit(self, x: tuple[float, float, float], seconds: float, noise: float) -> None:
        """One step of recursive least squares. Plain floats: for three numbers, arrays cost ten times as much."""
        cov, axes = self._cov, (0, 1, 2)
        px = [row[0] * x[0] + row[1] * x[1] + row[2] * x[2] for row in cov]
        scale = self._forgetting * noise + px[0] * x[0] + px[1] * x[1] + px[2] * x[2]
        theta = (self.prefill, self.decode, self.interference)
        error = seconds - (x[0] * theta[0] + x[1] * theta[1] + x[2] * theta[2])
        for i in axes:
            for j in axes:
                cov[i][j] = (cov[i][j] - px[i] * px[j] / scale) / self._forgetting
        # Directions that no turn excites would otherwise grow without bound under forgetting.
        shrink = [min(1.0, (self._limit[i] / cov[i][i]) ** 0.5) if cov[i][i] > 0.0 else 1.0 for i in axes]
        if min(shrink) < 1.0:
            for i in axes:
                for j in axes:
                    cov[i][j] *= shrink[i] * shrink[j]
        low, high = 1.0 / SPREAD, SPREAD
        self.prefill, self.decode, self.interference = (
            min(max(theta[i] + px[i] / scale * error, self._prior[i] * low), self._prior[i] * high) for i in axes
        )


OWN_TURNS = 32
"""A replica is believed as fast as the whole fleet until it has finished this many turns."""
EQUAL = 0.2
"""A replica that differs from the fleet by less than this share is believed equal to it: noise would otherwise send
every trajectory to whichever replica looks fastest."""


class OwnRates:
    """One replica's rates: the fleet's, scaled by how much longer its turns take than the fleet's rates say."""

    __slots__ = ("_turns", "decode", "factor", "interference", "prefill", "turn_seconds")

    def __init__(self) -> None:
        self._turns = 0
        self.factor = 1.0
        self.prefill = self.decode = self.interference = self.turn_seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1.0 / self.prefill

    def observe(self, fleet: ReplicaRates, computed: int, generated: int, others: float, seconds: float) -> Rates:
        """A turn of this replica has ended. Returns what to believe from now on: the fleet's rates, or these."""
        predicted = fleet.predict(computed, generated, others)
        if seconds > 0.0 and predicted > 0.0:
            self._turns += 1
            self.factor += max(0.03, 1.0 / (4 + self._turns)) * (min(max(seconds / predicted, 0.25), 4.0) - self.factor)
        if self._turns < OWN_TURNS or abs(self.factor - 1.0) < EQUAL:
            return fleet
        self.prefill, self.decode = fleet.prefill * self.factor, fleet.decode * self.factor
        self.interference, self.turn_seconds = fleet.interference * self.factor, fleet.turn_seconds * self.factor
        return self


Rates = ReplicaRates | OwnRates
"""Seconds per computed prompt token (``prefill``), per generated token (``decode``), per generated token and further
running turn (``interference``), and of a mean turn (``turn_seconds``)."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Parts of a placement's cost, all in seconds.

    Attributes:
        queue: until the replica begins with it: prefill work in front of it, and a full engine.
        prefill: computing the prompt tokens that are not cached.
        interference: what the replica's other running turns add to its decoding, and it to theirs.
    """

    queue: float
    prefill: float
    interference: float

    @property
    def wait(self) -> float:
        """Seconds until the first token."""
        return self.queue + self.prefill

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.interference
