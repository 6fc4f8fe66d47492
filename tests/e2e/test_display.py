# SPDX-License-Identifier: Apache-2.0
"""A real training on a terminal, with Prometheus' endpoints on."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from tests.support.terminal import OnTerminal
from tests.support.tiny_run import tiny_overrides

pytestmark = [pytest.mark.e2e, pytest.mark.extended]


def test_a_training_shows_its_progress_and_its_router_can_be_scraped(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: textarena_agent\n  _target_: tests.support.loops.GuessingLoop\n")
    scrape = tmp_path / "prometheus.yml"
    rollout = "actor_rollout_ref.rollout"
    overrides = tiny_overrides(
        tmp_path,
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.prometheus.enable=True",
        f"{rollout}.prometheus.file={scrape}",
        f"{rollout}.prometheus.port=9",
    )
    run = OnTerminal("-m", "war_rl", "train", *overrides, WANDB_MODE="offline")
    run.until("starting engines", 300.0)
    run.until("metrics for Prometheus at", 600.0)
    address = re.search(r"http://([0-9.:]+)/metrics", run.raw)
    assert address is not None
    run.until("step 1 done", 300.0)
    with urllib.request.urlopen(address.group(), timeout=10.0) as answer:
        page = answer.read().decode()
    assert "war_sched_finished_trajectories_total 16.0" in page
    code = run.end(600.0)
    (tmp_path / "terminal.txt").write_text(run.raw)
    assert code == 0, run.raw[-5000:]
    # The display was there, and has gone; nobody printed plain lines beside it.
    assert re.search(r"\[war-rl\].{0,20} step [12] .*/16 trajectories", run.raw)
    assert not re.search(r"\[war-rl\] step \d+: \d+/\d+ trajectories", run.raw)
    screen = "\n".join(run.screen().lines)
    assert "step 2 done" in screen and "starting engines" not in screen and "/16 trajectories" not in screen
    assert run.screen().modes == [] and not (tmp_path / "run" / "progress.json").exists()
    (job,) = (job for job in yaml.safe_load(scrape.read_text())["scrape_configs"] if job["job_name"] == "rollout")
    ((engine, other, router),) = (part["targets"] for part in job["static_configs"])
    assert router == address.group(1) and len({engine, other, router}) == 3
