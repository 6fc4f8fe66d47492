# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run may resume from, where an earlier run was killed while it wrote or removed one.

verl (0.9.1) names its newest checkpoint in a file that it writes last, but not at once: a run killed in that moment
leaves it empty, and the next one cannot start. With ``max_actor_ckpt_to_keep=1`` the older checkpoint goes before the
file names the newer one: then it names one that is not there. Layouts other than FSDP's are not judged, nor is what is
missing where each node may have a disk of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import zipfile
from pathlib import Path

from war_rl.files import write_whole

TRACKER = "latest_checkpointed_iteration.txt"
DATA_ORDER = "data.pt"
_FOLDER = re.compile(r"global_step_(\d+)")
_SHARDS = "*_world_size_*_rank_*.pt"


class NoCheckpoint(RuntimeError):
    """A checkpoint is named, but neither it nor any other can be loaded. Training from scratch would hide that."""


def repair(folder: Path, one_node: bool = True) -> str:
    """Make ``folder`` name its newest whole checkpoint, if the one that it names is not whole.

    Args:
        folder: the run's folder.
        one_node: whether all ranks write into this very folder.

    Returns:
        What was done, for the user; "" where nothing had to be.

    Raises:
        NoCheckpoint: see there.
    """
    tracker = folder / TRACKER
    if not tracker.exists():
        return ""
    named = _named(tracker)
    why = problem(_of(folder, named), one_node) if named is not None else "it is empty or no number"
    if not why:
        return ""
    what = f"step {named}" if named is not None else "no step"
    step = newest_whole(folder, one_node)
    if step is None:
        raise NoCheckpoint(
            f"{tracker} names {what} ({why}), and there is no other whole checkpoint: restore one, or set "
            "trainer.resume_mode=disable to train from scratch"
        )
    write_whole(tracker, str(step))
    order = "" if (_of(folder, step) / DATA_ORDER).exists() else "; it has no data order, which begins anew"
    return f"{tracker} named {what} ({why}): resuming from the newest whole checkpoint, step {step}{order}"


def failure(folder: Path, step: int, why: str, one_node: bool = True) -> str:
    """What to tell the user when the checkpoint of ``step`` could not be written."""
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(folder).free >> 20} MiB free there)"
    whole = newest_whole(folder, one_node)
    last = "there is no whole one" if whole is None else f"the newest whole one is of step {whole}"
    return f"the checkpoint of step {step} could not be written to {folder}{free}: {why}; {last}"


def newest_whole(folder: Path, one_node: bool = True) -> int | None:
    """The step of the newest checkpoint that can be loaded, those that know the data order first; None for none."""
    whole = [step for step in steps(folder) if not problem(_of(folder, step), one_node)]
    return max(whole, key=lambda step: ((_of(folder, step) / DATA_ORDER).exists(), step), default=None)


def steps(folder: Path) -> list[int]:
    """Steps of which there is a checkpoint folder, whole or not."""
    found = (_FOLDER.fullmatch(path.name) for path in folder.glob("global_step_*"))
    return sorted(int(match.group(1)) for match in found if match is not None)


def problem(checkpoint: Path, one_node: bool = True) -> str:
    """What keeps a checkpoint from being loaded; "" where nothing does, or where it cannot be judged."""
    if one_node and not (checkpoint / "actor").is_dir():
        return "its actor is not there"
    for role in ("actor", "critic"):
        if (checkpoint / role).is_dir() and (bad := _bad_shard(checkpoint / role, one_node)):
            return bad
    data = checkpoint / DATA_ORDER
    return f"{DATA_ORDER} is cut short" if data.exists() and not _is_whole(data) else ""


def _bad_shard(role: Path, one_node: bool) -> str:
    there = sorted(role.glob(_SHARDS))
    cut = next((shard for shard in there if not _is_whole(shard)), None)
    if cut is not None:
        return f"{role.name}/{cut.name} is cut short"
    if not (there and one_node):
        return ""
    try:
        # Written by rank 0 after its own shards.
        world = int(json.loads((role / "fsdp_config.json").read_text())["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{role.name}/fsdp_config.json is missing or cut short"
    for kind in sorted({shard.name.partition("_world_size_")[0] for shard in there}):
        for rank in range(world):
            name = f"{kind}_world_size_{world}_rank_{rank}.pt"
            if not (role / name).exists():
                return f"{role.name}/{name} is missing"
    return ""


def _is_whole(path: Path) -> bool:
    """Whether a file of ``torch.save`` is there to its end: the index of a zip file is written last."""
    return path.is_file() and zipfile.is_zipfile(path)


def _of(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def _named(tracker: Path) -> int | None:
    try:
        return int(tracker.read_text())
    except (OSError, ValueError):
        return None
