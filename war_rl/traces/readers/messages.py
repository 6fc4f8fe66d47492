# SPDX-License-Identifier: Apache-2.0
"""OpenAI-style messages: JSONL, one trajectory per line.

Required key: ``messages`` (each with ``role``, ``content`` and optionally ``tool_calls``). Optional: ``id``; a group
under the first present of ``group``, ``uid``, ``task_id``, ``instance_id``; ``reward``; and on any message
``tool_seconds``, how long the environment took to produce it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from war_rl.traces.model import Notes, Trace
from war_rl.traces.readers.common import field, json_lines, parse_message, seconds, split_messages

GROUP_KEYS = ("group", "uid", "task_id", "instance_id")
"""Keys that may carry the group, most specific first."""


def read(path: Path, notes: Notes) -> Iterator[Trace]:
    """Trajectories of one file, in file order; lines in which the model never spoke are skipped and noted."""
    for line, record in json_lines(path):
        raw = field(record, "messages", list, "the array of messages", path, line)
        messages = [parse_message(m, path, line, f"message {i}") for i, m in enumerate(raw)]
        waits = [seconds(m.get("tool_seconds"), "tool_seconds", path, line) for m in raw]
        prompt, turns = split_messages(messages, waits)
        if not turns:
            notes["trajectory without an assistant message skipped"] += 1
            continue
        group = next((str(record[key]) for key in GROUP_KEYS if record.get(key) not in (None, "")), "")
        reward = record.get("reward")
        yield Trace(
            id=str(record.get("id") or f"{path.name.split('.')[0]}:{line}"),
            group=group,
            prompt=prompt,
            turns=turns,
            source="messages",
            reward=float(reward) if isinstance(reward, (int, float)) else None,
        )
