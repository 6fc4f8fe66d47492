# SPDX-License-Identifier: Apache-2.0
"""`war-rl bench rollout` on real engines with the tiny model: both sides do the recorded work, and it is measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiny_run import tiny_model
from tests.support.training import Run, run_command
from war_rl.traces.readers.war import dump_trajectory
from war_rl.types import TrajectoryId

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

VOCABULARY = 440
GROUPS, MEMBERS, TURNS, MODEL_TOKENS, ENV_TOKENS = 2, 4, 3, 32, 20


def write_trace(path: Path) -> None:
    """Groups whose members mostly say the same, and now and then something else."""
    rng = np.random.default_rng(5)
    for group in range(GROUPS):
        prompt = rng.integers(10, VOCABULARY, 100).tolist()
        shared = rng.integers(10, VOCABULARY, TURNS * (MODEL_TOKENS + ENV_TOKENS))
        for member in range(MEMBERS):
            text = np.where(rng.random(len(shared)) < 0.1, rng.integers(10, VOCABULARY, len(shared)), shared)
            mask = ([1] * MODEL_TOKENS + [0] * ENV_TOKENS) * TURNS
            identity = TrajectoryId(f"g{group}", member, 1)
            dump_trajectory(path, identity, prompt_ids=prompt, response_ids=text.tolist(), response_mask=mask)


def bench_command(folder: Path) -> list[str]:
    write_trace(folder / "trace.jsonl")
    command = [sys.executable, "-m", "war_rl", "bench", "rollout", "--preset", "low-load", "--sides", "war,vllm"]
    command += ["--trace", str(folder / "trace.jsonl"), "--format", "war", "--model", str(tiny_model())]
    return [*command, "--kv-tokens", "2048"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    folder = tmp_path_factory.mktemp("bench")
    command = [*bench_command(folder), "--pairs", "2", "--json", str(folder / "out.json")]
    command += ["--plot", str(folder / "out.png"), "--concurrency", "2", "--turns", "2"]
    done = subprocess.run(
        command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )
    (folder / "output.log").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads((folder / "out.json").read_text()), done.stdout, folder


def test_both_sides_did_the_recorded_work(finished: tuple[dict[str, Any], str, Path]) -> None:
    report, _, _ = finished
    assert report["work_equal"] and set(report["work_spread"].values()) == {0.0}
    trajectories = GROUPS * MEMBERS
    second_prompt = 100 + MODEL_TOKENS + ENV_TOKENS
    for side in report["sides"].values():
        assert side["work"] == {
            "turns": 2 * trajectories,
            "generated_tokens": 2 * MODEL_TOKENS * trajectories,
            "requested_prompt_tokens": (100 + second_prompt) * trajectories,
        }
        assert len(side["runs"]) == 2
        counters = side["counters"]
        asked = side["work"]["requested_prompt_tokens"]
        assert counters["prefill_cached_tokens"] + counters["prefill_computed_tokens"] == asked
        # The first turn's end and the siblings' common prompt are found again, and nothing from the run before.
        assert 0 < counters["prefill_cached_tokens"] < asked - GROUPS * 96
        assert counters["scheduled_tokens"] >= counters["prefill_computed_tokens"]
        assert 1 <= counters["replica_imbalance"] <= 2
        assert counters["traced_trajectories"] == trajectories and counters["observer_seconds"] > 0


def test_only_war_drafts_and_its_drafts_are_accepted(finished: tuple[dict[str, Any], str, Path]) -> None:
    report, _, _ = finished
    war, stock = (report["sides"][name]["counters"] for name in ("war", "vllm"))
    assert stock["drafts"] == stock["draft_tokens"] == 0
    assert war["draft_tokens"] > war["accepted_tokens"] > 0
    assert war["engine_steps"] < stock["engine_steps"]
    assert report["sides"]["war"]["estimated_speedup"]["mean"] > 0
    assert "estimated_speedup" not in report["sides"]["vllm"]


def test_the_report_is_complete(finished: tuple[dict[str, Any], str, Path]) -> None:
    report, output, folder = finished
    assert report["ratio"]["min"] <= report["ratio"]["median"] <= report["ratio"]["max"]
    assert report["settings"]["preset"] == "low-load" and report["settings"]["kv_tokens_per_replica"]["war"] != []
    assert "war / vllm throughput" in output and "work: equal" in output
    assert (folder / "out.png").stat().st_size > 10_000
    jsonschema = pytest.importorskip("jsonschema")
    from war_rl.bench.report import SCHEMA

    jsonschema.validate(report, SCHEMA)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("bench_interrupted")
    # Many pairs: it must still be at work when the signal comes.
    command = [*bench_command(folder), "--pairs", "50"]
    return run_command(folder, command, when="engines are up", act=lambda process: process.send_signal(signal.SIGINT))


def test_ctrl_c_ends_everything_and_leaves_nothing(interrupted: Run) -> None:
    assert interrupted.code == 130, interrupted.output[-5000:]
    assert 0 < interrupted.seconds_after_action < 20
    assert len(interrupted.family) > 10  # Ray, two sides' servers and engines
    assert interrupted.left_processes == []
    assert interrupted.left_shared_memory == []
