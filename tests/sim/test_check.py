# SPDX-License-Identifier: Apache-2.0
"""The comparison with benchmark reports, the calibration's arithmetic, presets and the measured acceptance."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from war_rl.bench.calibrate import PROBES, fit, row, times_of
from war_rl.bench.presets import Settings
from war_rl.config import SchedulerConfig, SpecConfig
from war_rl.rollout.progress import Progress
from war_rl.sim.ablation import WrongProgress
from war_rl.sim.acceptance import measure
from war_rl.sim.check import Compared, compare, side_setup, summary, table
from war_rl.sim.cli import load_acceptance, load_times, main
from war_rl.sim.drafts import Acceptance
from war_rl.sim.engine import EngineSettings
from war_rl.sim.presets import NIM_70B, llama_70b_times, presets, published_efficiency, qwen3_32b_times
from war_rl.sim.simulator import Setup, simulate
from war_rl.sim.sweep import EXPERIMENTS, speedups
from war_rl.sim.times import StepTimes
from war_rl.sim.work import from_items
from war_rl.traces.workload import WorkItem, WorkTurn
from war_rl.types import GroupId, TrajectoryId

TIMES = {"war": StepTimes(0.021, 0.0018, 1e-7, 0.0008), "vllm": StepTimes(0.02, 0.0018, 1e-7, 0.0008)}


def items(count=4, turns=3):
    rng = np.random.default_rng(0)
    system = rng.integers(0, 500, 64).astype(np.int32)
    out = []
    for i in range(count):
        own = [WorkTurn(*(rng.integers(0, 500, n).astype(np.int32) for n in (24, 16)), 0.0) for _ in range(turns)]
        out.append(WorkItem(TrajectoryId(f"g{i // 2}", i % 2, 0, "x"), str(i), system, tuple(own)))
    return out


def report(policies, seconds):
    """A benchmark's report as far as the check reads it."""
    work = from_items(items(), 16)
    settings = dataclasses.asdict(Settings(groups=2, n=2)) | {
        "sides": {name: "vllm" if p == "stock" else "war" for name, p in policies.items()},
        "overrides": {
            name: [] if p == "stock" else [f"war.scheduler.policy={p}", "war.spec.policy=off", "trainer.x=1"]
            for name, p in policies.items()
        },
        "kv_tokens_per_replica": {name: [2064, 2064] for name in policies},
    }
    done = simulate(Setup(2, EngineSettings(2048, 16, 64, 1024), TIMES["vllm"]), work)
    counts = {k: getattr(done, k) for k in ("turns", "generated_tokens", "requested_prompt_tokens")}
    sides = {
        name: {
            "seconds": {"median": s, "min": 0.99 * s, "max": 1.01 * s},
            "work": counts,
            "counters": {"prefill_computed_tokens": float(done.prefill_computed_tokens)},
        }
        for name, s in zip(policies, seconds, strict=True)
    }
    return {"sides": sides, "settings": settings, "workload": {"source": "packaged recording"}, "machine": {}}


def test_a_report_is_simulated_with_its_own_settings():
    made = report({"war": "cost", "vllm": "stock"}, [3.0, 2.0])
    policy, setup = side_setup(made, "war", TIMES, frozenset(), 1024)
    assert (policy, setup.scheduler.policy, setup.spec.policy) == ("cost", "cost", "off")
    assert (setup.engine.blocks, setup.replicas, setup.engine.max_num_seqs) == (128, 2, 64)
    assert setup.spec.max_draft_tokens == 8
    policy, setup = side_setup(made, "vllm", TIMES, frozenset(), 1024)
    assert (policy, setup.scheduler.policy, setup.spec.policy) == ("stock", "sticky_least_inflight", "off")
    assert setup.times is TIMES["vllm"]


def test_other_work_than_was_measured_is_refused():
    made = report({"war": "cost", "vllm": "stock"}, [3.0, 2.0])
    assert len(compare("x", made, from_items(items(), 16), TIMES)) == 2
    with pytest.raises(ValueError, match="not the recording that was replayed"):
        compare("x", made, from_items(items(turns=2), 16), TIMES)


def compared(side, seconds, simulated, computed=100.0, simulated_computed=100):
    return Compared("b", side, side, seconds, (seconds, seconds), simulated, computed, simulated_computed)


def test_the_goals_are_the_median_the_worst_and_the_order():
    good = [compared("a", 10.0, 10.5), compared("b", 20.0, 19.0), compared("c", 30.0, 33.0)]
    found = summary(good)
    assert found["met"] and (found["ranked_pairs"], found["pairs_in_the_same_order"]) == (3, 3)
    assert found["seconds_worst_error"] == pytest.approx(0.1)
    assert "goals met" in table(good, found)
    assert not summary([*good, compared("d", 40.0, 49.0)])["met"]  # 22 % off
    assert not summary([compared("a", 10.0, 11.0), compared("b", 10.5, 10.6)])["met"]  # the other way round
    assert not summary([compared("a", 10.0, 10.0, 100.0, 125)])["met"]
    assert not summary([])["met"]
    assert summary([compared("a", 10.0, 11.0), compared("b", 10.1, 10.6)])["ranked_pairs"] == 0  # too close to rank


def test_the_fit_gives_back_what_made_the_seconds():
    truth = [0.022, 0.0016, 2e-7, 0.0008, 0.0, 0.03]
    rows = [row(p, p.turns * p.generated) for p in PROBES]
    coefficients, errors = fit(rows, [float(np.dot(r, truth)) for r in rows])
    assert coefficients == pytest.approx(truth, rel=1e-3, abs=1e-9)
    assert max(map(abs, errors)) < 1e-6
    noisy = [
        float(np.dot(r, truth)) * f
        for r, f in zip(rows, np.random.default_rng(0).uniform(0.9, 1.1, len(rows)), strict=True)
    ]
    coefficients, errors = fit(rows, noisy)
    assert min(coefficients) >= 0.0 and max(map(abs, errors)) < 0.2
    times = times_of(coefficients, "x", "y")
    assert times.send_s == times.return_s == coefficients[-1] / 2


def test_the_published_table_is_met_and_the_derivation_is_plausible():
    times = llama_70b_times()
    for concurrency, (_, latency) in NIM_70B.items():
        made = times.seconds(concurrency) + times.prefill(10 * concurrency, 0)
        assert made == pytest.approx(latency / 1e3, rel=0.01)
    assert all(0.3 < share < 0.8 for share in published_efficiency())
    assert 0.005 < qwen3_32b_times().base < 0.02


def test_presets_and_measured_acceptance_load(tmp_path):
    for preset in presets().values():
        assert preset.times.source and preset.engine.kv_tokens > preset.shape.max_context
    for policy in ("war", "budget"):
        found = load_acceptance("", policy)
        means = [len(t) / sum(1 / m for m, _ in t) for t in (found.own, found.sibling)]
        assert 1.5 < means[0] < means[1] < 5.0
        assert Acceptance.from_json(json.loads(json.dumps(found.to_json()))) == found
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"sides": {"war": {"times": TIMES["war"].to_json()}}}))
    assert load_times(f"{file}:war") == {"war": TIMES["war"]}
    with pytest.raises(ValueError, match="no side vllm"):
        load_times(f"{file}:vllm")
    file.write_text("{}")
    with pytest.raises(ValueError, match="neither step times"):
        load_times(str(file))
    with pytest.raises(ValueError, match="unknown \\['bass'\\]"):
        StepTimes.from_json({"base": 1, "per_token": 1, "bass": 1})
    with pytest.raises(ValueError, match="committed"):
        Acceptance(((2.0, 0.5),), ((1.0, 1.0),))


def test_acceptance_is_measured_apart_for_own_and_siblings_text():
    rng = np.random.default_rng(2)
    text = rng.integers(0, 900, 200).astype(np.int32)
    work = [
        WorkItem(TrajectoryId("g", i, 0, "g"), str(i), text[:40], (WorkTurn(text[40:], text[:0], 0.0),))
        for i in range(3)
    ]
    setup = Setup(
        1,
        EngineSettings(4096),
        TIMES["war"],
        SchedulerConfig(policy="round_robin"),
        SpecConfig(policy="war"),
        at_once=1,
    )
    found = measure(setup, from_items(work, 16))
    assert found.own[0][0] < 1.2 and min(m for m, _ in found.sibling) > 5.0


def test_the_command(tmp_path, capsys):
    base = ["--preset", "cpu-demo", "--groups", "2", "--n", "2", "--turns", "2"]
    json_file, plot = tmp_path / "r.json", tmp_path / "r.png"
    flags = [*base, "--policy", "stock,cost,war", "--draft", "war", "--json", str(json_file), "--plot", str(plot)]
    assert main(flags) == 0
    document = json.loads(json_file.read_text())
    assert list(document["policies"]) == ["stock", "cost", "war"] and plot.stat().st_size > 1000
    assert document["policies"]["stock"]["accepted_tokens"] == 0 < document["policies"]["cost"]["accepted_tokens"]
    for wrong in (
        ["--policy", "no_such"],
        ["--load", "2", "--kv-tokens", "9999"],
        ["--load", "99"],
        ["--check"],
        ["--scheduler", "admission_fil=1"],
    ):
        assert main([*base, *wrong]) == 2
        assert "war-rl simulate: " in capsys.readouterr().err


def test_every_experiment_has_its_base_and_speedups_are_means_over_seeds():
    for _, cases in EXPERIMENTS.values():
        assert {"stock", "no drafts"} & {case.side.label for case in cases(1)}
    rows = [
        {"preset": "p", "x": x, "seed": s, "side": side, "throughput": t}
        for x, s, side, t in (
            (1, 0, "stock", 10.0),
            (1, 1, "stock", 20.0),
            (1, 0, "a", 20.0),
            (1, 1, "a", 10.0),
            (2, 0, "a", 5.0),
        )
    ]
    assert speedups(rows, "stock")[("p", "a")] == pytest.approx({1: 1.0, 2: 0.5})


def test_wrong_estimates_are_wrong_and_the_right_ones_stay():
    known = Progress(0.5, 4.0, 500.0, 2000.0)
    group = GroupId("g", 1)
    right = known.remaining(group, 0, 0, 100)
    assert WrongProgress(known, 1.0, 0.0).remaining(group, 0, 0, 100) == right
    wrong = WrongProgress(known, 4.0, 0.0).remaining(group, 0, 0, 100)
    assert (wrong.turns, wrong.output_tokens) == (4 * right.turns, 4 * right.output_tokens)
    others = {WrongProgress(known, 1.0, 1.0).remaining(GroupId(f"g{i}", 1), 0, 0, 100).turns for i in range(8)}
    assert len(others) > 4
