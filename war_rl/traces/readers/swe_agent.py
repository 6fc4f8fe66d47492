# SPDX-License-Identifier: Apache-2.0
"""SWE-agent ``.traj`` files: one JSON object per file, one file per attempt at an instance.

Used keys (https://swe-agent.com/latest/usage/trajectories/): ``trajectory``, an array of steps with ``response`` (the
model's raw text), ``action``, ``observation`` and ``execution_time`` (seconds; absent in old files); for the prompt the
first step's ``query`` (or, before 1.1.0, ``messages``), else ``history`` up to the model's first own message.
The file's stem is the instance, so attempts at one instance in different folders form a group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from war_rl.traces.model import Message, Notes, Text, Trace, TraceFormatError, Turn
from war_rl.traces.readers.common import as_object, field, parse_message, read_text, seconds


def read(path: Path, notes: Notes) -> Iterator[Trace]:
    """The one trajectory of a file; nothing (and a note) when the model never spoke."""
    try:
        document = as_object(json.loads(read_text(path)), path, 1, "the file")
    except json.JSONDecodeError as error:
        raise TraceFormatError(path, error.lineno, f"expected one JSON object ({error.msg})") from error
    raw = field(document, "trajectory", list, "the array of steps", path, 1)
    steps = [as_object(step, path, 1, f"step {i} of 'trajectory'") for i, step in enumerate(raw)]
    turns = []
    for number, step in enumerate(steps):
        response = field(step, "response", str, f"the model's text in step {number}", path, 1)
        action = field({"action": "", **step}, "action", str, f"the action of step {number}", path, 1)
        if not response.strip() and not action.strip():
            # Steps the harness adds itself, such as the automatic submission after a cost limit.
            notes["step without a model response skipped"] += 1
            continue
        observation = field(step, "observation", str, f"the environment's answer in step {number}", path, 1)
        answer = (Message("user", observation),) if observation else ()
        wait = seconds(step.get("execution_time"), "execution_time", path, 1)
        turns.append(Turn(Text((Message("assistant", _model_text(response, action)),)), Text(answer), wait))
    if not turns:
        notes["trajectory without a model response skipped"] += 1
        return
    # The parent folder tells attempts apart, since all files of one instance have the same name.
    attempt = f"{path.parent.name}/{path.stem}" if path.parent.name else path.stem
    yield Trace(attempt, path.stem, Text(_prompt(document, steps[0], path)), tuple(turns), "swe-agent")


def _model_text(response: str, action: str) -> str:
    # With function calling the action is not part of the response, though the model generated it.
    if not action.strip() or action.strip() in response:
        return response
    return f"{response}\n<tool_call>\n{action.strip()}\n</tool_call>" if response else action


def _prompt(document: dict[str, Any], first: dict[str, Any], path: Path) -> tuple[Message, ...]:
    for key in ("query", "messages"):
        shown = first.get(key)
        if isinstance(shown, list) and any(isinstance(m, dict) and m.get("role") for m in shown):
            return tuple(parse_message(m, path, 1, f"message {i} of '{key}'") for i, m in enumerate(shown))
    history = document.get("history")
    if not isinstance(history, list):
        raise TraceFormatError(
            path, 1, "expected 'query' or 'messages' in the first step, or an array 'history', to know the prompt"
        )
    prompt = []
    for number, raw in enumerate(history):
        if parse_message(raw, path, 1, f"message {number} of 'history'").role == "assistant" and not raw.get("is_demo"):
            break
        prompt.append(parse_message(raw, path, 1, f"message {number} of 'history'"))
    return tuple(prompt)
