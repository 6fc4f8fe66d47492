# SPDX-License-Identifier: Apache-2.0
"""LMCache agent traces: JSONL, one engine request per line with its whole ``input`` and its ``output`` as text.

``session_id`` (the file's name without it) says which lines form one trajectory, ``timestamp`` their order; files are
not always written in order. A turn's environment text is what its successor's input has beyond its own input. Some
recorders append the model's output to the next input and some leave it out: where it is there it is taken off, so both
give the same trajectory. An input that does not continue its predecessor's (the agent rewrote its history) starts a new
trajectory. There is no group identity, and timestamps do not part tool time from generation time, so neither is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from war_rl.traces.model import Message, Notes, Text, Trace, Turn
from war_rl.traces.readers.common import field, json_lines


@dataclass(frozen=True, slots=True)
class _Request:
    text: str
    output: str
    timestamp: float


def read(path: Path, notes: Notes) -> Iterator[Trace]:
    """Trajectories of one file, in order of each session's first line."""
    sessions: dict[str, list[_Request]] = {}
    for line, record in json_lines(path):
        request = _Request(
            field(record, "input", str, "the request's whole input text", path, line),
            field(record, "output", str, "the model's text", path, line),
            float(field({"timestamp": 0, **record}, "timestamp", (int, float), "a number", path, line)),
        )
        session = str(record.get("session_id") or path.name.split(".")[0])
        sessions.setdefault(session, []).append(request)
    for session, requests in sessions.items():
        requests.sort(key=lambda r: r.timestamp)  # stable: equal or missing timestamps keep the file's order
        runs = _runs(requests)
        if len(runs) > 1:
            notes["history rewritten by the agent: trajectory split"] += len(runs) - 1
        for number, run in enumerate(runs):
            yield _trace(session if len(runs) == 1 else f"{session}#{number}", run)


def _runs(requests: list[_Request]) -> list[list[_Request]]:
    runs = [[requests[0]]]
    for previous, request in pairwise(requests):
        if request.text.startswith(previous.text):
            runs[-1].append(request)
        else:
            runs.append([request])
    return runs


def _trace(name: str, run: list[_Request]) -> Trace:
    turns = []
    for request, following in zip(run, [*run[1:], None], strict=True):
        env = "" if following is None else _without_output(following.text[len(request.text) :], request.output)
        answer = (Message("user", env),) if env else ()
        turns.append(Turn(Text((Message("assistant", request.output),)), Text(answer)))
    return Trace(name, "", Text((Message("user", run[0].text),)), tuple(turns), "lmcache")


def _without_output(added: str, output: str) -> str:
    body = added.lstrip()
    wanted = output.strip()
    return body[len(wanted) :] if wanted and body.startswith(wanted) else added
