# SPDX-License-Identifier: Apache-2.0
"""The floors: what decides must not drag in engines, trainers or clusters."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("ray", "torch", "vllm", "verl", "hydra", "transformers", "slime", "sglang")
PURE = [
    "war_rl.types",
    "war_rl.config",
    "war_rl.metrics",
    "war_rl.analysis",
    "war_rl.trace",
    "war_rl.progress",
    "war_rl.display",
    "war_rl.display_view",
    "war_rl.engine_page",
    "war_rl.trainers.prometheus",
    "war_rl.summary",
    "war_rl.spec.drafter",
    "war_rl.rollout.scheduler",
    "war_rl.traces.model",
    "war_rl.sim.simulator",
    "war_rl.sim.cli",
    "war_rl.compat",
    "war_rl.cli",
    "war_rl.trainers.shell",
    "war_rl.trainers.slime.router",
    "war_rl.trainers.slime.rollout",
    "war_rl.trainers.slime.loadtest",
]


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_imports_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
