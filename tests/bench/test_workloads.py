# SPDX-License-Identifier: Apache-2.0
"""The packaged workload and the choice between it, a trace and made-up text."""

from __future__ import annotations

from pathlib import Path

import pytest

from war_rl.bench.presets import PRESETS, make_settings, plan_kv
from war_rl.bench.workloads import load_workload, packaged_workload
from war_rl.traces.readers.war import dump_trajectory
from war_rl.types import TrajectoryId

SMOLLM2_VOCABULARY = 49_152


def load(preset: str, **overrides: object):  # type: ignore[no-untyped-def]
    settings = make_settings(preset, overrides, packaged=True)
    work = load_workload(settings, trace=[], fmt="war", tokenizer=_NoText(), vocabulary=SMOLLM2_VOCABULARY, limit=8192)
    return settings, work


class _NoText:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not text or len(text) < 40, "recordings hold token ids; only the chat format's own pieces are text"
        return [1]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_on_the_packaged_workload(preset: str) -> None:
    settings, work = load(preset)
    plan = plan_kv(settings, work.items)
    assert work.items and plan.kv_tokens is not None
    if preset == "high-load":
        assert 3 <= plan.pressure <= 4
    if preset == "mixed":
        assert 1.5 <= plan.pressure <= 2.5


def test_the_packaged_workload_is_small_and_its_groups_are_whole() -> None:
    assert packaged_workload().stat().st_size < 1_000_000
    _, work = load("mixed", groups=0, max_context=0)
    sizes = {uid: sum(i.trajectory.uid == uid for i in work.items) for uid in {i.trajectory.uid for i in work.items}}
    assert set(sizes.values()) == {4} and len(sizes) >= 4


def test_a_trace_takes_its_place_and_the_models_context_bounds_it(tmp_path: Path) -> None:
    for session in range(4):
        dump_trajectory(
            tmp_path / "t.jsonl",
            TrajectoryId("g", session, 1),
            prompt_ids=list(range(50)),
            response_ids=list(range(200)),
            response_mask=[1] * 200,
        )
    work = load_workload(
        make_settings("mixed", {"groups": 1}),
        trace=[str(tmp_path)],
        fmt="war",
        tokenizer=_NoText(),
        vocabulary=SMOLLM2_VOCABULARY,
        limit=128,
    )
    assert len(work.items) == 4 and max(len(item.tokens()) for item in work.items) <= 128
    assert work.cut.trajectories == 4
