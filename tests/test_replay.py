# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from war_rl import cli
from war_rl.config import SpecConfig
from war_rl.replay import parse_table, replay
from war_rl.traces.workload import WorkItem, WorkTurn
from war_rl.types import TrajectoryId

SPEC = dataclasses.replace(SpecConfig(), policy="budget", memory_mb=8)


def item(uid: str, session: int, turns: list[np.ndarray]) -> WorkItem:
    prompt = np.arange(1, 30, dtype=np.int32)
    env = np.array([40, 41, 42], np.int32)
    made = tuple(WorkTurn(turn, env if i + 1 < len(turns) else env[:0], 0.0) for i, turn in enumerate(turns))
    return WorkItem(TrajectoryId(uid, session, 0, uid), f"{uid}{session}", prompt, made)


def work(rng: np.random.Generator, alike: bool) -> list[WorkItem]:
    items = []
    for group in range(3):
        shared = [rng.integers(100, 20_000, 60).astype(np.int32) for _ in range(3)]
        for session in range(3):
            own = [rng.integers(100, 20_000, 60).astype(np.int32) for _ in range(3)]
            # Siblings that never part have nothing to copy: each later one first writes something of its own.
            late = [rng.integers(100, 20_000, 70 * session).astype(np.int32)] if session else []
            items.append(item(f"g{group}", session, late + shared if alike else own))
    return items


@pytest.mark.parametrize("concurrency", [1, 3])
def test_siblings_that_write_the_same_are_sped_up(concurrency: int) -> None:
    items = work(np.random.default_rng(0), alike=True)
    figures = replay(items, ("war", "oracle"), spec=SPEC, concurrency=concurrency, exact_step_time=True)
    war, oracle = figures["sides"]["war"], figures["sides"]["oracle"]
    assert war["modelled_speedup"] > 1.0
    # Not an upper bound: the oracle follows one occurrence to its end, war may go on with another.
    assert oracle["modelled_speedup"] > 0.9 * war["modelled_speedup"]
    assert war["by_source"]["group"]["accepted"] > 0
    assert json.dumps(figures)


def test_text_without_repetition_costs_nothing() -> None:
    items = work(np.random.default_rng(1), alike=False)
    war = replay(items, ("war",), spec=SPEC, exact_step_time=True)["sides"]["war"]
    assert 0.97 <= war["modelled_speedup"] <= 1.01


def test_off_commits_one_token_a_step() -> None:
    items = work(np.random.default_rng(2), alike=True)
    war = replay(items, ("war",), spec=dataclasses.replace(SPEC, policy="off"))["sides"]["war"]
    assert war["committed_tokens_per_step"] == 1.0
    assert war["modelled_speedup"] == pytest.approx(1.0)


def test_every_token_is_committed_once_whatever_is_drafted() -> None:
    items = work(np.random.default_rng(3), alike=True)
    figures = replay(items, ("war", "oracle"), spec=SPEC)
    turns = sum(len(i.turns) for i in items)
    for side in figures["sides"].values():
        committed = round(side["committed_tokens_per_step"] * side["steps"])
        assert committed == figures["generated_tokens"] - turns  # a turn's first token comes from prefill


def test_refusals() -> None:
    with pytest.raises(ValueError, match="sides are war, library, oracle"):
        replay(work(np.random.default_rng(0), True), ("best",))
    with pytest.raises(ValueError, match="--step-table"):
        parse_table("1-23")
    assert parse_table("1:23,32:80").seconds(1) == pytest.approx(0.023)


def recording(folder: Path, groups: int = 2, members: int = 3) -> Path:
    """Trajectories in the format ``messages``; members of a group say nearly the same."""
    lines = []
    for group in range(groups):
        for session in range(members):
            said = [f"go to room {i} of house {group} and look under the {session} table " * 3 for i in range(3)]
            talk = [{"role": "user", "content": f"house {group}"}]
            for text in said:
                talk += [{"role": "assistant", "content": text}, {"role": "user", "content": "nothing there"}]
            lines.append(json.dumps({"messages": talk[:-1], "group": f"g{group}"}))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    from tests.support.tiny_model import build_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def test_the_command_writes_the_documented_json(
    tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("arctic_inference")
    trace, out = recording(tmp_path), tmp_path / "out.json"
    argv = ["replay", str(trace), "--format", "messages", "--tokenizer", tokenizer, "--tasks", "2", "--json", str(out)]
    assert cli.main(argv) == 0
    sides = json.loads(out.read_text())["sides"]
    assert set(sides) == {"war", "library", "oracle"}
    for figures in sides.values():
        for name in ("committed_tokens_per_step", "drafted_tokens_per_step", "modelled_speedup"):
            assert figures[name] > 0
    assert sides["oracle"]["committed_tokens_per_step"] > 1.2
    table = capsys.readouterr().out
    assert all(name in table for name in sides)


def test_the_command_refuses_by_name(tmp_path: Path, tokenizer: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(recording(tmp_path))
    good = [trace, "--format", "messages", "--tokenizer", tokenizer]
    for argv, word in (
        ([str(tmp_path / "absent.jsonl"), *good[1:]], "absent.jsonl"),
        ([trace, "--format", "mesages", "--tokenizer", tokenizer], "mesages"),
        ([trace, "--format", "messages", "--tokenizer", "/nowhere"], "war-rl prepare"),
        ([*good, "--policy", "always"], "war.spec.policy"),
        ([*good, "--max-draft-tokens", "1000"], "war.spec.max_draft_tokens"),
        ([*good, "--concurrency", "0"], "concurrency"),
    ):
        assert cli.main(["replay", *argv]) == 2
        assert word in capsys.readouterr().err
