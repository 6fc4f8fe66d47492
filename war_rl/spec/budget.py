# SPDX-License-Identifier: Apache-2.0
"""How many draft tokens each running request gets in this engine step.

A step commits one token per request plus whatever is accepted, and lasts T(n). Over many steps the most tokens per
second come from taking exactly those draft tokens whose chance of being accepted exceeds rate * dT/dn, where rate is
the tokens per second reached in the long run (the renewal-reward argument: time spent on an unlikely token is time that
could have earned the usual rate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

START_GAIN = 0.02
"""Expected relative gain below which a replica that does not draft leaves it so. With STOP_GAIN: hysteresis."""
STOP_GAIN = 0.0
"""Expected relative gain below which a drafting replica stops."""
RATE_MEMORY = 0.02
"""Weight of the newest step in the long-run rate."""
QUIET_STEPS = 16
"""Steps in a row without gain after which predictions are made only now and then."""
LONGEST_SLEEP = 128
"""Most steps between two looks while nothing is gained."""
LOOK_SHARE = 0.005
"""Share of an engine's time that looking may take while nothing is gained: decides how long to sleep. A lone request on
a slow engine is looked at in every step, a large batch on a fast one rarely."""
LOOK_SECONDS = 50e-6
"""What predicting costs for one request, until it has been measured."""
FITTED_STEPS = 16
"""Measured decode steps before a step-time model is acted on where its prior is not known to fit the machine."""


class StepTime(Protocol):
    def seconds(self, tokens: float, kv_tokens: float = 0.0, verify: bool = False) -> float: ...


def _per_token(running: int, kv_tokens: float, model: StepTime) -> float:
    """Seconds of one draft token more in a step that verifies anyway."""
    return model.seconds(running + 1, kv_tokens, True) - model.seconds(running, kv_tokens, True)


@dataclass(slots=True)
class _Regime:
    """What is remembered for one class of load (running requests, by powers of two)."""

    rate: float = 0.0
    drafting: bool = False
    quiet: int = 0
    sleep: int = 0
    nap: int = 1


@dataclass(slots=True)
class Budget:
    """Chooses draft lengths; remembers rate, hysteresis and sleep for each class of load."""

    _regimes: dict[int, _Regime] = field(default_factory=dict)
    _look_seconds: float = LOOK_SECONDS

    def _regime(self, running: int) -> _Regime:
        return self._regimes.setdefault(running.bit_length(), _Regime())

    def asleep(self, running: int) -> bool:
        """Whether to skip predicting in this step, because it has brought nothing for a while. Call once a step."""
        regime = self._regime(running)
        if regime.sleep > 0:
            regime.sleep -= 1
            return True
        return False

    def looked(self, requests: int, seconds: float) -> None:
        """Predicting for so many requests took so long."""
        self._look_seconds += 0.05 * (max(seconds, 0.0) / requests - self._look_seconds)

    @staticmethod
    def hopeless(running: int, kv_tokens: float, model: StepTime, best: float) -> bool:
        """Whether even a token whose chance is ``best`` would cost more than it brings: then the lengths could only be
        zero, and nobody need predict."""
        return running * _per_token(running, kv_tokens, model) >= best * model.seconds(running, kv_tokens)

    def choose(self, reach: Sequence[Sequence[float]], running: int, kv_tokens: float, model: StepTime) -> list[int]:
        """Draft length of each request.

        Args:
            reach: for each request the chance that its first 1, 2, ... predicted tokens are all right; non-increasing.
            running: requests in the step, those without predictions included.
            kv_tokens: resident kv tokens of all of them.
            model: seconds of a step.
        """
        regime = self._regime(running)
        plain = model.seconds(running, kv_tokens)
        base_rate = running / plain
        per_token = max(_per_token(running, kv_tokens, model), 0.0)
        rate = max(regime.rate, base_rate)
        lengths, expected, count = self._above(reach, rate * per_token)
        reached = (running + expected) / model.seconds(running + count, kv_tokens, count > 0)
        gain = reached / base_rate - 1.0
        if count == 0 or gain < (STOP_GAIN if regime.drafting else START_GAIN):
            lengths, reached = [0] * len(reach), base_rate
        self._remember(regime, reached, any(lengths), running * self._look_seconds / (LOOK_SHARE * plain))
        return lengths

    @staticmethod
    def _above(reach: Sequence[Sequence[float]], threshold: float) -> tuple[list[int], float, int]:
        lengths, expected, count = [], 0.0, 0
        for chances in reach:
            length = 0
            for chance in chances:
                if chance <= threshold:
                    break
                expected += chance
                length += 1
            lengths.append(length)
            count += length
        return lengths, expected, count

    @staticmethod
    def _remember(regime: _Regime, reached: float, drafted: bool, fair_sleep: float) -> None:
        """``fair_sleep``: steps between two looks at which looking takes its share of the time."""
        regime.rate = reached if regime.rate == 0.0 else regime.rate + RATE_MEMORY * (reached - regime.rate)
        if drafted:
            regime.drafting, regime.quiet, regime.nap = True, 0, 1
            return
        regime.quiet += 1
        if regime.quiet >= QUIET_STEPS:
            # A single step without drafts is normal; a row of them is a regime.
            regime.drafting = False
            regime.sleep = min(regime.nap, int(fair_sleep), LONGEST_SLEEP)
            regime.nap *= 2
