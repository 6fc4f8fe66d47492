# SPDX-License-Identifier: Apache-2.0
"""tau-bench historical trajectories: a JSON array, one object per (task, trial).

Used keys: ``task_id``, ``traj`` (OpenAI-style messages, system prompt first), and where present ``trial``, ``reward``.
Trials of one task form a group. The simulated user opens each trial in its own words, so siblings share the system
prompt rather than the whole prompt. Tool times are not recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from war_rl.traces.model import Notes, Trace
from war_rl.traces.readers.common import as_object, field, json_array, parse_message, split_messages


def read(path: Path, notes: Notes) -> Iterator[Trace]:
    """Trajectories of one file, in file order; entries in which the model never spoke are skipped and noted."""
    counts: dict[str, int] = {}
    for line, value in json_array(path):
        entry = as_object(value, path, line, "each array element")
        task = field(entry, "task_id", (int, str), "the task's number or name", path, line)
        raw = field(entry, "traj", list, "the array of messages", path, line)
        messages = [parse_message(m, path, line, f"message {i} of 'traj'") for i, m in enumerate(raw)]
        prompt, turns = split_messages(messages, [None] * len(messages))
        group = f"{path.stem}/task-{task}"
        trial = entry.get("trial", counts.get(group, 0))
        counts[group] = counts.get(group, 0) + 1
        if not turns:
            notes["trajectory without an assistant message skipped"] += 1
            continue
        reward = entry.get("reward")
        yield Trace(
            id=f"{group}/trial-{trial}",
            group=group,
            prompt=prompt,
            turns=turns,
            source="tau-bench",
            reward=float(reward) if isinstance(reward, (int, float)) else None,
        )
