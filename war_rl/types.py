# SPDX-License-Identifier: Apache-2.0
"""Identities and records shared by every floor. Imports nothing but the standard library and numpy.

The words are those of docs/architecture.md: a *trajectory* is one agent episode, a *turn* one assistant generation
(one engine request), a *group* the n trajectories sampled from one prompt.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.int32]

SOURCES = ("own", "group", "prompt", "window")
"""Whose text a draft was read from: its own, its group's, the same prompt's in an earlier step, the rest."""


@dataclass(frozen=True, slots=True)
class TrajectoryId:
    """One agent episode.

    Attributes:
        uid: the group's identity within this run; verl draws a new one each time a prompt is sampled.
        session: index of the trajectory within its group, 0 <= session < n.
        step: the trainer's global step this trajectory belongs to; its policy version.
        index: the dataset's own index of the prompt, stable over epochs; "" where the dataset has none.
        validate: whether this is a validation trajectory (kept apart in every statistic).
    """

    uid: str
    session: int
    step: int
    index: str = ""
    validate: bool = False

    @property
    def group(self) -> GroupId:
        return GroupId(self.uid, self.step, self.index, self.validate)


@dataclass(frozen=True, slots=True)
class GroupId:
    """The trajectories that were sampled from one prompt in one step."""

    uid: str
    step: int
    index: str = ""
    validate: bool = False


_PREFIX = "war:"
_END = ";"


def encode_request_id(trajectory: TrajectoryId, turn: int) -> str:
    """Engine request id that carries the trajectory's identity into the engine's worker.

    Engines append their own suffix to request ids, so the identity ends with a ``;``.
    """
    kind = "v" if trajectory.validate else "t"
    index = quote(trajectory.index, safe="")
    uid = quote(trajectory.uid, safe="")
    return f"{_PREFIX}{kind}:{trajectory.step}:{index}:{trajectory.session}:{turn}:{uid}{_END}"


def decode_request_id(request_id: str) -> tuple[TrajectoryId, int] | None:
    """Inverse of :func:`encode_request_id`; None for a request that did not come from a known trajectory."""
    if not request_id.startswith(_PREFIX):
        return None
    body, end, _ = request_id[len(_PREFIX) :].partition(_END)
    parts = body.split(":")
    if not end or len(parts) != 6:
        return None
    kind, step, index, session, turn, uid = parts
    try:
        trajectory = TrajectoryId(unquote(uid), int(session), int(step), unquote(index), kind == "v")
        return trajectory, int(turn)
    except ValueError:
        return None


def engine_priority(request_id: str) -> int:
    """vLLM's priority of a request: lower runs first and is preempted last; the further along, the lower.

    Minus the number of turns that the request's trajectory has behind it; 0, that of a new trajectory, where the
    request id carries none.
    """
    known = decode_request_id(request_id)
    return -known[1] if known is not None else 0


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that asks for a replica.

    Attributes:
        key: unique for the life of the turn (the engine request id without the engine's suffix).
        trajectory: whose turn it is.
        turn: 0 for the trajectory's first generation.
        prompt_tokens: length of the whole prompt of this turn, in tokens.
        max_tokens: most tokens the turn may generate; 0 when unknown.
        block_hashes: chained hashes of the prompt's full KV blocks, oldest first; empty when not computed.
        attempt: how often this turn has been placed before (a lost replica costs an attempt).
    """

    key: str
    trajectory: TrajectoryId
    turn: int
    prompt_tokens: int
    max_tokens: int = 0
    block_hashes: Sequence[int] = ()
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What the engine reported for a finished turn. All counts in tokens, times in seconds.

    ``cached_tokens`` is None where the engine did not say. ``engine_queue_seconds``: the part of ``seconds`` before the
    request's first engine step, 0 where the engine did not say. ``error`` is "" for a turn that ended normally.
    """

    generated_tokens: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    seconds: float = 0.0
    error: str = ""
    engine_queue_seconds: float = 0.0


@dataclass(slots=True)
class TurnRecord:
    """One turn as the client saw it; the raw material of metrics, traces and reports.

    Times are seconds on the recording process's monotonic clock; ``queue_seconds`` is how long the router held it.
    """

    turn: int
    replica: str
    prompt_tokens: int
    cached_tokens: int | None
    generated_tokens: int
    started: float
    queue_seconds: float
    seconds: float
    preemptions: int = 0
    reason: str = ""
    error: str = ""


@dataclass(slots=True)
class TrajectoryRecord:
    """One trajectory as the agent-loop worker saw it.

    ``started`` and ``finished`` are unix seconds, so that records of several nodes compare.
    ``status`` is "finished", "truncated" (context or response budget exhausted) or "failed"; ``error`` names why.
    ``clock_offset`` added to a turn's ``started`` gives unix seconds; 0 where the recorder did not say.
    """

    trajectory: TrajectoryId
    started: float = 0.0
    finished: float = 0.0
    turns: list[TurnRecord] = field(default_factory=list)
    env_seconds: float = 0.0
    response_tokens: int = 0
    reward: float | None = None
    status: str = "finished"
    error: str = ""
    clock_offset: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FeedItem:
    """Text on its way to the drafters of all replicas.

    ``tokens`` (int32, 1-d) are the trajectory's tokens from position ``start`` on, environment text included, so that
    items of one trajectory can be joined, and a repeated or overlapping item recognised. ``final`` marks the last one.
    ``sent`` is the sender's unix time in seconds, for the feed-lag metric only.
    """

    trajectory: TrajectoryId
    start: int
    tokens: TokenArray
    final: bool = False
    sent: float = 0.0


_MAGIC = b"WARFEED1"


def encode_feed(items: Sequence[FeedItem]) -> bytes:
    """Items as one blob: magic, header length (uint32 little endian), JSON header, then the int32 tokens back to back.

    Only plain data crosses the wire: nothing is ever unpickled by the receiver.
    """
    header = [
        {
            "t": [i.trajectory.uid, i.trajectory.session, i.trajectory.step, i.trajectory.index, i.trajectory.validate],
            "s": i.start,
            "n": len(i.tokens),
            "f": i.final,
            "at": i.sent,
        }
        for i in items
    ]
    head = json.dumps(header, separators=(",", ":")).encode()
    body = b"".join(np.ascontiguousarray(i.tokens, dtype="<i4").tobytes() for i in items)
    return _MAGIC + struct.pack("<I", len(head)) + head + body


def decode_feed(blob: bytes) -> list[FeedItem]:
    """Inverse of :func:`encode_feed`.

    Raises:
        ValueError: the blob is not a feed message or is cut short.
    """
    if blob[: len(_MAGIC)] != _MAGIC or len(blob) < len(_MAGIC) + 4:
        raise ValueError("not a War-RL feed message")
    (size,) = struct.unpack_from("<I", blob, len(_MAGIC))
    at = len(_MAGIC) + 4
    header = json.loads(blob[at : at + size])
    at += size
    items = []
    for entry in header:
        count = int(entry["n"])
        if at + 4 * count > len(blob):
            raise ValueError("feed message is cut short")
        tokens = np.frombuffer(blob, dtype="<i4", count=count, offset=at).astype(np.int32)
        at += 4 * count
        uid, session, step, index, validate = entry["t"]
        trajectory = TrajectoryId(str(uid), int(session), int(step), str(index), bool(validate))
        items.append(FeedItem(trajectory, int(entry["s"]), tokens, bool(entry["f"]), float(entry["at"])))
    return items


def as_tokens(values: Iterable[int]) -> TokenArray:
    """Token ids as a contiguous int32 array."""
    return np.ascontiguousarray(
        np.fromiter(values, dtype=np.int32) if not isinstance(values, np.ndarray) else values, dtype=np.int32
    )
