# SPDX-License-Identifier: Apache-2.0
"""Which trajectory does an HTTP request belong to?

Best known first: the header that War-RL's rollout function sets, then the routing key that slime and its agent adapters
send, then the prompt itself. A prompt continues a session when it starts with all that the session has read and
written so far; several samples of one prompt therefore stay apart until their answers differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from war_rl.rollout.blocks import PromptHasher
from war_rl.types import TokenArray, TrajectoryId, TurnRecord, as_tokens, decode_request_id

TRAJECTORY_HEADER = "X-War-Trajectory"
"""Carries :func:`war_rl.types.encode_request_id` of the trajectory, from War-RL's rollout function."""
ROUTING_HEADER = "X-SMG-Routing-Key"
"""The routing key of SGLang's model gateway; slime sends the sample's session id in it."""
BYTES_PER_TOKEN = 4
"""Prompts that come as text are matched by their UTF-8 bytes; this many count as one token of load."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks to continue.

    ``units``: token ids, or bytes where the request carries text (int32 [n]). ``tokens``: its length in tokens,
    estimated for text. ``single``: False for a batch of prompts in one request, which has no continuation.
    """

    units: TokenArray
    tokens: int
    text: bool = False
    single: bool = True
    max_tokens: int = 0


def read_prompt(body: Mapping[str, Any]) -> Prompt:
    """The prompt of a ``/generate`` (``input_ids`` or ``text``) or OpenAI (``messages``, ``prompt``) request body.

    Raises:
        ValueError: ``input_ids`` holds something else than token ids.
    """
    params = body.get("sampling_params")
    params = params if isinstance(params, Mapping) else body
    limit = params.get("max_new_tokens") or params.get("max_tokens") or 0
    max_tokens = int(limit) if isinstance(limit, int | float) else 0
    ids = body.get("input_ids")
    if isinstance(ids, list) and ids:
        if isinstance(ids[0], list):
            total = sum(len(x) for x in ids if isinstance(x, list))
            return Prompt(np.empty(0, np.int32), total, single=False, max_tokens=max_tokens)
        try:
            units = np.asarray(ids, dtype=np.int32)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"input_ids must be a list of token ids: {error}") from error
        return Prompt(units, len(units), max_tokens=max_tokens)
    text = body.get("text", body.get("prompt", body.get("messages")))
    if isinstance(text, list) and "messages" not in body:
        total = sum(len(str(x)) for x in text) // BYTES_PER_TOKEN
        return Prompt(np.empty(0, np.int32), total, text=True, single=False, max_tokens=max_tokens)
    units = text_units(text if isinstance(text, str) else "" if text is None else repr(text)[:-1])
    return Prompt(units, len(units) // BYTES_PER_TOKEN, text=True, max_tokens=max_tokens)


def text_units(text: str) -> TokenArray:
    """The UTF-8 bytes of ``text`` as int32."""
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int32)


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory as the router sees it. Times are seconds on the router's clock."""

    trajectory: TrajectoryId
    hasher: PromptHasher
    how: str
    used: float
    routing_key: str = ""
    turns: int = 0
    running: int = 0
    records: list[TurnRecord] = field(default_factory=list)
    end_key: int | None = None
    end_tail: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))


class SessionTable:
    """Sessions by trajectory, routing key and text.

    Args:
        block_size: tokens per KV block, the grain of matching.
    """

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.step = 0
        self.counts: dict[str, int] = {"header": 0, "routing_key": 0, "prompt": 0, "new": 0, "batch": 0}
        self._by_trajectory: dict[TrajectoryId, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._ends: dict[tuple[bool, int], list[Session]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._by_trajectory)

    def begin(self, trajectory: TrajectoryId, routing_key: str, now: float) -> Session:
        """The trajectory starts; requests with this routing key (if any) are its own. Repeating it is harmless."""
        session = self._by_trajectory.get(trajectory)
        if session is None:
            session = self._open(trajectory, PromptHasher(self.block_size), "header", now)
        if routing_key and session.routing_key != routing_key:
            self._by_key.pop(session.routing_key, None)
            session.routing_key = routing_key
            self._by_key[routing_key] = session
        return session

    def find(self, headers: Mapping[str, str], prompt: Prompt, now: float) -> tuple[Session, tuple[int, ...]]:
        """The session of a request, made where there is none, and the hashes of the prompt's full blocks.

        Looking does not count as use; call :meth:`started` when the request starts.
        """
        session, how, hashes = self._look_up(headers, prompt, now)
        self.counts[how] += 1
        session.used = now
        return session, hashes

    def started(self, session: Session, now: float) -> int:
        """A turn of the session starts. Returns its number."""
        self._drop_end(session)
        session.running += 1
        session.used = now
        session.turns += 1
        return session.turns - 1

    def ended(self, session: Session, prompt: Prompt, output: Sequence[int] | TokenArray, now: float) -> None:
        """The turn ended and wrote ``output`` (same units as the prompt; empty when nothing is known of it)."""
        session.running -= 1
        session.used = now
        if session.how not in ("new", "prompt") or not prompt.single or not len(output):
            # Its name finds it, or nothing can: no need to know how its text ends.
            return
        if session.trajectory not in self._by_trajectory:
            return
        whole = np.concatenate([prompt.units, as_tokens(output)])
        hashes = session.hasher.update(whole)
        self._drop_end(session)
        session.end_key = hashes[-1] if hashes else 0
        session.end_tail = whole[len(hashes) * session.hasher.block_size :]
        self._ends.setdefault((prompt.text, session.end_key), []).append(session)

    def finish(self, trajectory: TrajectoryId) -> Session | None:
        """Forget the trajectory. Returns what was known of it."""
        session = self._by_trajectory.pop(trajectory, None)
        if session is not None:
            self._drop_end(session)
            if self._by_key.get(session.routing_key) is session:
                del self._by_key[session.routing_key]
        return session

    def idle_since(self, before: float) -> list[Session]:
        """Sessions without a running turn that were last used before ``before``."""
        return [s for s in self._by_trajectory.values() if s.running == 0 and s.used < before]

    def older_than(self, step: int) -> list[Session]:
        """Sessions of earlier steps without a running turn."""
        return [s for s in self._by_trajectory.values() if s.running == 0 and s.trajectory.step < step]

    # ------------------------------------------------------------------ inside

    def _look_up(self, headers: Mapping[str, str], prompt: Prompt, now: float) -> tuple[Session, str, tuple[int, ...]]:
        key = headers.get(ROUTING_HEADER, "")
        decoded = decode_request_id(headers.get(TRAJECTORY_HEADER, ""))
        known, how = (self.begin(decoded[0], key, now), "header") if decoded else (self._by_key.get(key), "routing_key")
        if known is not None:
            if known.turns == 0:
                known.hasher = PromptHasher(self._size(prompt.text))
            return known, how, known.hasher.update(prompt.units) if prompt.single else ()
        hasher = PromptHasher(self._size(prompt.text))
        hashes = hasher.update(prompt.units)
        if key or not prompt.single:
            how = "routing_key" if key else "batch"
            return self._fresh(hasher, hashes, how, now, key), how, hashes
        found = self._continued(prompt, hashes)
        if found is not None:
            return found, "prompt", found.hasher.update(prompt.units)
        return self._fresh(hasher, hashes, "new", now), "new", hashes

    def _continued(self, prompt: Prompt, hashes: tuple[int, ...]) -> Session | None:
        """The idle session whose whole text is the longest beginning of the prompt."""
        size = self._size(prompt.text)
        for blocks in range(len(hashes), -1, -1):
            at = blocks * size
            ends = self._ends.get((prompt.text, hashes[blocks - 1] if blocks else 0), ())
            fits = [
                s
                for s in ends
                if s.running == 0 and np.array_equal(prompt.units[at : at + len(s.end_tail)], s.end_tail)
            ]
            if fits:
                return max(fits, key=lambda s: len(s.end_tail))
        return None

    def _fresh(
        self, hasher: PromptHasher, hashes: tuple[int, ...], how: str, now: float, routing_key: str = ""
    ) -> Session:
        # Samples of one prompt form a group: its name is the prompt's own hash.
        self._serial += 1
        name = f"{hashes[-1]:x}" if hashes else f"{self._serial}"
        session = self._open(TrajectoryId(uid=f"prompt-{name}", session=self._serial, step=self.step), hasher, how, now)
        if routing_key:
            session.routing_key = routing_key
            self._by_key[routing_key] = session
        return session

    def _open(self, trajectory: TrajectoryId, hasher: PromptHasher, how: str, now: float) -> Session:
        session = self._by_trajectory[trajectory] = Session(trajectory, hasher, how, now)
        return session

    def _size(self, text: bool) -> int:
        return self.block_size * (BYTES_PER_TOKEN if text else 1)

    def _drop_end(self, session: Session) -> None:
        if session.end_key is None:
            return
        for text in (False, True):
            sessions = self._ends.get((text, session.end_key))
            if sessions and session in sessions:
                sessions.remove(session)
                if not sessions:
                    del self._ends[(text, session.end_key)]
        session.end_key = None
