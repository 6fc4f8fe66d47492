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


def test_what_verifying_costs_by_itself_is_not_put_down_to_the_tokens() -> None:
    rng = np.random.default_rng(3)
    model = StepTimeModel()
    for _ in range(400):
        running, drafted = int(rng.integers(1, 9)), int(rng.integers(0, 2)) * int(rng.integers(1, 13))
        seconds = (0.1 + 0.001 * (running + drafted) + 0.03 * (drafted > 0)) * rng.normal(1.0, 0.01)
        model.observe(running + drafted, 0.0, seconds, drafted > 0)
    c = model.coefficients
    assert c.verify == pytest.approx(0.03, abs=0.004) and c.per_token == pytest.approx(0.001, abs=0.0004)
    assert model.seconds(8, 0.0, True) - model.seconds(8, 0.0) == pytest.approx(c.verify)


def test_where_every_step_verifies_the_price_of_a_token_is_still_right() -> None:
    rng = np.random.default_rng(4)
    model = StepTimeModel()
    for _ in range(400):
        tokens = int(rng.integers(8, 40))
        model.observe(tokens, 0.0, (0.13 + 0.001 * tokens) * rng.normal(1.0, 0.01), True)
    assert model.coefficients.per_token == pytest.approx(0.001, abs=0.0003)
    assert model.seconds(20, 0.0, True) == pytest.approx(0.15, rel=0.02)
