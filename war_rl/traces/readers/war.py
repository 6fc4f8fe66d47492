# SPDX-License-Identifier: Apache-2.0
"""War-RL's own recordings: JSONL, one finished trajectory per line, token ids as the engine saw them.

| key | type | meaning |
|---|---|---|
| ``version`` | int | 1 |
| ``group`` | str | ``TrajectoryId.uid`` |
| ``session``, ``step``, ``index``, ``validate`` | int, int, str, bool | the rest of the trajectory's identity |
| ``prompt_ids`` | [int] | tokens of the first prompt |
| ``turns`` | [{``model_ids``: [int], ``env_ids``: [int], ``tool_seconds``: number or null}] | either this |
| ``response_ids`` | [int] | or these two: everything after the prompt, |
| ``response_mask`` | [0 or 1] | and for each token whether the model generated it (1) |
| ``tool_seconds`` | [number or null] | with ``response_mask``: per turn, seconds the environment took; may be absent |
| ``reward``, ``seconds`` | number or null | the trajectory's reward and how long it took |
| ``replicas`` | [str] | which replica ran each turn; may be absent |
| ``model`` | str | whose tokenizer the ids belong to; may be absent |

With ``response_mask`` a turn is an unbroken run of ones, so turns between which the environment said nothing are one.
Mask zeros before the first run belong to the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from war_rl.files import append_whole
from war_rl.traces.model import Notes, Tokens, Trace, TraceFormatError, Turn
from war_rl.traces.readers.common import as_object, field, json_lines, seconds
from war_rl.types import TokenArray, TrajectoryId

VERSION = 1
"""Version of the line format written here; others are refused."""


def encode_trajectory(
    trajectory: TrajectoryId,
    *,
    prompt_ids: Sequence[int] | NDArray[Any],
    response_ids: Sequence[int] | NDArray[Any],
    response_mask: Sequence[int] | NDArray[Any],
    tool_seconds: Sequence[float | None] = (),
    replicas: Sequence[str] = (),
    reward: float | None = None,
    seconds: float | None = None,
    model: str = "",
) -> str:
    """One finished trajectory as one line, newline included.

    Args:
        trajectory: its identity.
        prompt_ids: tokens of the first prompt, [p].
        response_ids: every token after it, environment text included, without padding, [r].
        response_mask: [r], 1 where the model generated the token, 0 where the environment wrote it.
        tool_seconds: per turn, how long the environment took, in seconds; shorter is fine, the rest is unknown.
        replicas: per turn, the replica that ran it.
        reward: None when unknown.
        seconds: duration of the whole trajectory; None when unknown.
        model: name of the model whose tokenizer the ids belong to.

    Raises:
        ValueError: ids and mask differ in length, or the mask holds something else than 0 and 1.
    """
    if len(response_ids) != len(response_mask):
        raise ValueError(f"response_ids has {len(response_ids)} entries, response_mask {len(response_mask)}")
    mask = [int(m) for m in response_mask]
    if not set(mask) <= {0, 1}:
        raise ValueError("response_mask may hold 0 and 1 only")
    record = {
        "version": VERSION,
        "group": trajectory.uid,
        "session": trajectory.session,
        "step": trajectory.step,
        "index": trajectory.index,
        "validate": trajectory.validate,
        "model": model,
        "prompt_ids": [int(t) for t in prompt_ids],
        "response_ids": [int(t) for t in response_ids],
        "response_mask": mask,
        "tool_seconds": list(tool_seconds),
        "replicas": list(replicas),
        "reward": None if reward is None else float(reward),
        "seconds": None if seconds is None else float(seconds),
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def dump_trajectory(path: str | Path, trajectory: TrajectoryId, **record: Any) -> None:
    """Append one finished trajectory to a file, made with its folders if missing. See :func:`encode_trajectory`.

    Give every process its own file: a line is written in one call, but only local disks keep such appends apart.

    Raises:
        OSError: the line could not be written as a whole; nothing of it stays.
    """
    line = encode_trajectory(trajectory, **record)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    append_whole(target, line.encode())


def read(path: Path, notes: Notes) -> Iterator[Trace]:
    """Trajectories of one file, in file order; those in which the model generated nothing are skipped and noted.

    So is a last line that the writer's death cut short.
    """
    for line, record in json_lines(path, notes):
        version = field(record, "version", int, f"{VERSION}", path, line)
        if version != VERSION:
            raise TraceFormatError(path, line, f"expected version {VERSION}, got {version}")
        group = field(record, "group", str, "the group's uid", path, line)
        session = field({"session": 0, **record}, "session", int, "the index within the group", path, line)
        step = field({"step": 0, **record}, "step", int, "the trainer's step", path, line)
        prompt = _ids(record, "prompt_ids", path, line)
        if "turns" in record:
            turns = _from_turns(record, path, line)
        else:
            prompt, turns = _from_mask(prompt, record, path, line)
        if not turns:
            notes["trajectory without generated tokens skipped"] += 1
            continue
        reward = record.get("reward")
        yield Trace(
            id=f"{step}/{group}/{session}",
            # The same uid in two steps is two groups: other weights, other siblings.
            group=f"{step}/{group}" if group else "",
            prompt=Tokens(prompt),
            turns=turns,
            source="war",
            reward=float(reward) if isinstance(reward, (int, float)) else None,
        )


def _ids(record: dict[str, Any], key: str, path: Path, line: int) -> TokenArray:
    values = field(record, key, list, "an array of token ids", path, line)
    if not all(type(v) is int and 0 <= v < 2**31 for v in values):
        raise TraceFormatError(path, line, f"expected token ids (whole numbers >= 0) in {key!r}")
    return np.asarray(values, dtype=np.int32)


def _from_turns(record: dict[str, Any], path: Path, line: int) -> tuple[Turn, ...]:
    turns = []
    for number, value in enumerate(field(record, "turns", list, "the array of turns", path, line)):
        turn = as_object(value, path, line, f"turn {number}")
        env = _ids({"env_ids": [], **turn}, "env_ids", path, line)
        wait = seconds(turn.get("tool_seconds"), "tool_seconds", path, line)
        turns.append(Turn(Tokens(_ids(turn, "model_ids", path, line)), Tokens(env), wait))
    return tuple(turns)


def _from_mask(
    prompt: TokenArray, record: dict[str, Any], path: Path, line: int
) -> tuple[TokenArray, tuple[Turn, ...]]:
    ids = _ids(record, "response_ids", path, line)
    mask = field(record, "response_mask", list, "0 or 1 per response token", path, line)
    if len(mask) != len(ids):
        raise TraceFormatError(path, line, f"expected {len(ids)} entries in 'response_mask', got {len(mask)}")
    if not all(type(m) is int and m in (0, 1) for m in mask):
        raise TraceFormatError(path, line, "expected only 0 and 1 in 'response_mask'")
    waits = field({"tool_seconds": [], **record}, "tool_seconds", list, "seconds per turn", path, line)
    edges = np.flatnonzero(np.diff(np.asarray([0, *mask, 0])))
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    if not runs:
        return prompt, ()
    turns = []
    for number, (start, end) in enumerate(runs):
        until = runs[number + 1][0] if number + 1 < len(runs) else len(ids)
        wait = seconds(waits[number] if number < len(waits) else None, "tool_seconds", path, line)
        turns.append(Turn(Tokens(ids[start:end]), Tokens(ids[end:until]), wait))
    return np.concatenate([prompt, ids[: runs[0][0]]]), tuple(turns)
