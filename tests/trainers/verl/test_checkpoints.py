# SPDX-License-Identifier: Apache-2.0
"""Folders of checkpoints as verl leaves them, whole and not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from war_rl.trainers.verl.checkpoints import NoCheckpoint, failure, newest_whole, problem, repair, steps  # noqa: E402

WORLD = 2


def save(folder: Path, step: int, role: str = "actor") -> Path:
    checkpoint = folder / f"global_step_{step}"
    (checkpoint / role).mkdir(parents=True)
    for rank in range(WORLD):
        for kind in ("model", "optim", "extra_state"):
            torch.save({"x": torch.zeros(100)}, checkpoint / role / f"{kind}_world_size_{WORLD}_rank_{rank}.pt")
    (checkpoint / role / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": WORLD}))
    torch.save({"position": step}, checkpoint / "data.pt")
    return checkpoint


def name(folder: Path, text: str) -> Path:
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    return tracker


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def test_a_whole_checkpoint_is_left_as_it_is(tmp_path: Path):
    save(tmp_path, 2)
    save(tmp_path, 4)
    tracker = name(tmp_path, "2")
    assert repair(tmp_path) == "" and tracker.read_text() == "2"


def test_without_a_tracker_nothing_is_judged(tmp_path: Path):
    (save(tmp_path, 1) / "data.pt").unlink()
    assert repair(tmp_path) == "" and repair(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda at: cut(at / "actor/model_world_size_2_rank_1.pt"), "actor/model_world_size_2_rank_1.pt is cut short"),
        (lambda at: (at / "actor/optim_world_size_2_rank_0.pt").unlink(), "optim_world_size_2_rank_0.pt is missing"),
        (lambda at: (at / "actor/fsdp_config.json").write_text(""), "fsdp_config.json is missing or cut short"),
        (lambda at: cut(at / "data.pt"), "data.pt is cut short"),
        (lambda at: shutil.rmtree(at / "actor"), "its actor is not there"),
        (lambda at: shutil.rmtree(at), "its actor is not there"),
    ],
)
def test_a_checkpoint_that_is_not_whole_gives_way_to_the_newest_that_is(tmp_path: Path, damage, why: str):
    save(tmp_path, 2)
    save(tmp_path, 10)
    damage(save(tmp_path, 12))
    tracker = name(tmp_path, "12")
    text = repair(tmp_path)
    assert "named step 12 (" in text and why in text and "step 10" in text
    assert tracker.read_text() == "10"
    assert repair(tmp_path) == ""


def test_a_tracker_that_a_kill_left_empty_is_filled(tmp_path: Path):
    save(tmp_path, 2)
    tracker = name(tmp_path, "")
    assert "empty or no number" in repair(tmp_path) and tracker.read_text() == "2"


def test_a_checkpoint_without_its_data_order_is_the_last_choice(tmp_path: Path):
    (save(tmp_path, 4) / "data.pt").unlink()
    name(tmp_path, "3")
    assert "it has no data order" in repair(tmp_path)
    save(tmp_path, 2)
    assert newest_whole(tmp_path) == 2


def test_nothing_to_resume_from_is_refused_rather_than_trained_over(tmp_path: Path):
    cut(save(tmp_path, 2) / "data.pt")
    name(tmp_path, "2")
    with pytest.raises(NoCheckpoint, match=r"names step 2 \(data.pt is cut short\).*resume_mode=disable"):
        repair(tmp_path)


def test_a_critic_is_judged_too_and_other_layouts_are_not(tmp_path: Path):
    checkpoint = save(tmp_path, 2)
    save(tmp_path / "other", 2, "critic")
    shutil.copytree(tmp_path / "other/global_step_2/critic", checkpoint / "critic")
    assert problem(checkpoint) == ""
    cut(checkpoint / "critic/model_world_size_2_rank_0.pt")
    assert problem(checkpoint).startswith("critic/model")
    megatron = tmp_path / "global_step_3"
    (megatron / "actor" / "dist_ckpt").mkdir(parents=True)
    assert problem(megatron) == "" and steps(tmp_path) == [2, 3]


def test_with_a_disk_for_each_node_only_what_is_there_is_judged(tmp_path: Path):
    checkpoint = save(tmp_path, 2)
    (checkpoint / "actor/model_world_size_2_rank_1.pt").unlink()
    assert problem(checkpoint) != "" and problem(checkpoint, one_node=False) == ""
    cut(checkpoint / "actor/model_world_size_2_rank_0.pt")
    assert problem(checkpoint, one_node=False) != ""


def test_a_failed_checkpoint_names_the_disk_and_the_last_whole_one(tmp_path: Path):
    assert "there is no whole one" in failure(tmp_path, 5, "no space")
    save(tmp_path, 4)
    text = failure(tmp_path, 5, "no space")
    assert "checkpoint of step 5" in text and "MiB free" in text and text.endswith("of step 4")
