# SPDX-License-Identifier: Apache-2.0
"""The work of a simulated step: lengths, tool times and which text is shared; the text itself where there is one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain

import numpy as np

from war_rl.traces.workload import WorkItem
from war_rl.types import TokenArray, TrajectoryId

SEGMENT_BITS = 24
"""A segment's blocks are numbered within this many bits."""


@dataclass(frozen=True, slots=True)
class SimTurn:
    """``model`` tokens generated, ``env`` tokens appended afterwards, ``tool`` seconds until the next turn."""

    model: int
    env: int
    tool: float


@dataclass(frozen=True, slots=True, eq=False)
class SimTrajectory:
    """One trajectory.

    Attributes:
        id: identity; the step is set by the simulation.
        prompt: tokens of the first prompt.
        turns: at least one.
        path: its whole text in full blocks, as (segment, blocks); equal segments are equal text.
        text: int32 [context at the end], or None where only lengths are known.
    """

    id: TrajectoryId
    prompt: int
    turns: tuple[SimTurn, ...]
    path: tuple[tuple[int, int], ...]
    text: TokenArray | None = None

    @property
    def context(self) -> int:
        """Tokens at its end."""
        return self.prompt + sum(t.model + t.env for t in self.turns)

    @property
    def generated(self) -> int:
        return sum(t.model for t in self.turns)

    def hashes(self, blocks: int) -> array[int]:
        """Identities of its first ``blocks`` blocks, as the scheduler's clients send them, but packed: there are many
        turns, and what they share would be copied number by number."""
        parts, left = [], blocks
        for segment, size in self.path:
            if left <= 0:
                break
            first = segment << SEGMENT_BITS
            parts.append(range(first, first + min(size, left)))
            left -= size
        return array("q", chain.from_iterable(parts))


def working_set(trajectories: Sequence[SimTrajectory], block: int) -> int:
    """KV tokens that hold all trajectories at their ends, shared text once."""
    sizes: dict[int, int] = {}
    for t in trajectories:
        for segment, size in t.path:
            sizes[segment] = size
    return (sum(sizes.values()) + len(trajectories)) * block


def from_items(items: Sequence[WorkItem], block: int, repeat: int = 1) -> list[SimTrajectory]:
    """Replayable work as simulated work.

    Args:
        items: the work.
        block: tokens per KV block.
        repeat: how often each group is taken; the copies share what all groups share, and nothing else.
    """
    chains = [_chain(item, block) for item in items]
    count: Counter[bytes] = Counter(digest for blocks in chains for digest in blocks)
    groups: dict[bytes, set[str]] = {}
    for item, blocks in zip(items, chains, strict=True):
        for digest in blocks:
            if count[digest] > 1:
                groups.setdefault(digest, set()).add(item.trajectory.uid)
    numbers: dict[tuple[int, bytes], int] = {}
    out = []
    for copy in range(repeat):
        for item, blocks in zip(items, chains, strict=True):
            path: list[tuple[int, int]] = []
            first = 0
            for at in range(1, len(blocks) + 1):
                if at < len(blocks) and count[blocks[at]] == count[blocks[first]]:
                    continue
                common = len(groups.get(blocks[first], ())) > 1
                key = (0 if common else copy, blocks[first])
                path.append((numbers.setdefault(key, len(numbers) + 1), at - first))
                first = at
            identity = item.trajectory
            if copy:
                suffix = f"#{copy}"
                identity = replace(identity, uid=identity.uid + suffix, index=identity.index + suffix)
            turns = tuple(SimTurn(len(t.model_tokens), len(t.env_tokens), t.tool_seconds) for t in item.turns)
            out.append(SimTrajectory(identity, len(item.prompt_tokens), turns, tuple(path), item.tokens()))
    return out


def _chain(item: WorkItem, block: int) -> list[bytes]:
    """Chained digests of the trajectory's full blocks."""
    tokens = item.tokens().astype("<i4", copy=False)
    raw, width, digest, out = tokens.tobytes(), 4 * block, b"", []
    for at in range(len(tokens) // block):
        digest = blake2b(digest + raw[at * width : (at + 1) * width], digest_size=12).digest()
        out.append(digest)
    return out


@dataclass(frozen=True)
class Shape:
    """Made-up work: every length and time is lognormal with the given mean and sigma of its logarithm."""

    groups: int = 64
    """Groups of one step."""
    n: int = 8
    """Trajectories of each group."""
    turns: float = 10.0
    """Mean turns of a trajectory. Unit: turns."""
    turns_sigma: float = 0.6
    """Tail of the number of turns: sigma of its logarithm. Unit: none."""
    likeness: float = 0.7
    """Share of the variance of a trajectory's number of turns that its group explains. Unit: none."""
    max_turns: int = 120
    """Longest trajectory. Unit: turns."""
    system: int = 1024
    """Tokens that all prompts begin with."""
    prompt: int = 1024
    """Tokens of the group's own part of the prompt."""
    model: float = 150.0
    """Mean tokens generated in a turn."""
    model_sigma: float = 0.8
    env: float = 400.0
    """Mean tokens that the environment appends after a turn."""
    env_sigma: float = 1.0
    tool: float = 1.0
    """Mean seconds between two turns."""
    tool_sigma: float = 1.0
    max_context: int = 32768
    """A trajectory ends before the turn that would go beyond. Unit: tokens."""

    def __post_init__(self) -> None:
        if min(self.groups, self.n, self.max_turns, self.prompt) < 1 or self.turns < 1 or self.model < 1:
            raise ValueError(
                "a workload needs groups, members, turns, a prompt and generated tokens: at least 1 of each"
            )
        if not 0.0 <= self.likeness <= 1.0:
            raise ValueError(f"likeness={self.likeness}: a share, between 0 and 1")
        if self.max_context < self.system + self.prompt + 2:
            raise ValueError(f"max_context={self.max_context}: does not hold the prompt")


def make_work(shape: Shape, block: int, seed: int) -> list[SimTrajectory]:
    """Trajectories of ``shape``, group by group; the same seed gives the same work."""
    rng = np.random.Generator(np.random.PCG64(seed))
    out: list[SimTrajectory] = []
    prompt = shape.system + shape.prompt
    for group in range(shape.groups):
        common = rng.standard_normal()
        for session in range(shape.n):
            own = rng.standard_normal()
            z = shape.likeness**0.5 * common + (1.0 - shape.likeness) ** 0.5 * own
            sigma = shape.turns_sigma
            count = int(np.clip(round(shape.turns * np.exp(sigma * z - 0.5 * sigma * sigma)), 1, shape.max_turns))
            turns = _turns(rng, shape, count, shape.max_context - prompt)
            identity = TrajectoryId(f"g{group}", session, 0, str(group))
            total = (prompt + sum(t.model + t.env for t in turns)) // block
            out.append(SimTrajectory(identity, prompt, turns, _path(shape, group, len(out), total, block)))
    return out


def _turns(rng: np.random.Generator, shape: Shape, count: int, room: int) -> tuple[SimTurn, ...]:
    model = np.maximum(1, _lognormal(rng, shape.model, shape.model_sigma, count)).astype(int)
    env = _lognormal(rng, shape.env, shape.env_sigma, count).astype(int)
    tool = _lognormal(rng, shape.tool, shape.tool_sigma, count)
    turns: list[SimTurn] = []
    used = 0
    for i in range(count):
        made, answer = min(int(model[i]), room), int(env[i]) if i + 1 < count else 0
        if turns and used + made + answer > room:
            break
        turns.append(SimTurn(made, min(answer, room - used - made), float(tool[i]) if i + 1 < count else 0.0))
        used += made + answer
    last = turns[-1]
    turns[-1] = SimTurn(last.model, 0, 0.0)
    return tuple(turns)


def _lognormal(rng: np.random.Generator, mean: float, sigma: float, count: int) -> np.ndarray:
    if mean <= 0.0:
        return np.zeros(count)
    return np.asarray(rng.lognormal(np.log(mean) - 0.5 * sigma * sigma, sigma, count))


def _path(shape: Shape, group: int, number: int, total: int, block: int) -> tuple[tuple[int, int], ...]:
    """All prompts share the system's blocks, a group its prompt's, and the rest is the trajectory's own."""
    system = min(shape.system // block, total)
    shared = min((shape.system + shape.prompt) // block, total) - system
    parts = ((1, system), (2 + group, shared), (2 + shape.groups + number, total - system - shared))
    return tuple(part for part in parts if part[1] > 0)
