# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import numpy as np
import pytest

from war_rl.steptime import CPU_TABLE, StepTable, StepTimeModel


def fit(seed: int, outliers: float, steps: int = 600) -> StepTimeModel:
    rng = np.random.default_rng(seed)
    model = StepTimeModel()
    for _ in range(steps):
        tokens, kv = int(rng.integers(1, 33)), float(rng.integers(0, 50_000))
        seconds = (0.02 + 0.0018 * tokens + 2e-7 * kv) * rng.normal(1.0, 0.02)
        if rng.random() < outliers:
            seconds *= 20.0
        model.observe(tokens, kv, seconds)
    return model


@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_fits_a_linear_truth(outliers: float) -> None:
    model = fit(1, outliers)
    for tokens, kv in ((1, 0), (8, 20_000), (32, 50_000)):
        assert model.seconds(tokens, kv) == pytest.approx(0.02 + 0.0018 * tokens + 2e-7 * kv, rel=0.15)


def test_before_any_observation_a_token_costs_something() -> None:
    model = StepTimeModel()
    assert model.seconds(2) > model.seconds(1) > 0


def test_coefficients_are_never_negative() -> None:
    model = StepTimeModel()
    for tokens in range(1, 60):
        model.observe(tokens, 1000.0 * tokens, 0.1 / tokens)
    c = model.coefficients
    assert min(c.base, c.per_token, c.per_kv) >= 0


def test_a_level_that_lasts_is_not_an_outlier() -> None:
    model = fit(2, 0.0, 100)
    for tokens in [1, 4, 8, 16] * 400:
        model.observe(tokens, 0.0, 5 * (0.02 + 0.0018 * tokens))
    assert model.seconds(8) == pytest.approx(5 * (0.02 + 0.0018 * 8), rel=0.25)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be observed"):
        StepTimeModel().observe(1, 0, float("nan"))


def test_table_interpolates_and_goes_on() -> None:
    assert CPU_TABLE.seconds(1) == pytest.approx(0.023)
    assert CPU_TABLE.seconds(6) == pytest.approx(0.0315)
    assert StepTable({1: 1.0, 2: 2.0}).seconds(4) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="two points"):
        StepTable({1: 1.0})
