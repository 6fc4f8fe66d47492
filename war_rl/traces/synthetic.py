# SPDX-License-Identifier: Apache-2.0
"""Tokens where a recording has none, or where a workload must have nothing to reuse. Deterministic by seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from war_rl.traces.model import Length, Span, Trace
from war_rl.traces.tokenise import TokenTrace, TokenTurn
from war_rl.types import TokenArray


@dataclass(frozen=True, slots=True)
class SyntheticTokens:
    """Random token ids in ``[low, high)`` that depend on ``seed`` and on what they stand for, and on nothing else.

    Raises:
        ValueError: an empty or negative range.
    """

    low: int
    high: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise ValueError(f"token ids must come from a range with 0 <= low < high, got [{self.low}, {self.high})")

    def block(self, name: str, size: int) -> TokenArray:
        """int32 [size]: the same name gives the same tokens; a shorter block is the start of a longer one."""
        digest = blake2b(f"{self.seed}:{name}".encode(), digest_size=16).digest()
        rng = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
        # Drawn as fractions, so that the first values do not depend on how many are drawn.
        return (self.low + rng.random(size) * (self.high - self.low)).astype(np.int32)

    def trace(self, trace: Trace) -> TokenTrace:
        """A lengths-only trajectory with tokens.

        The last turn's block identities cover its whole prompt, so also every earlier turn: each block is filled by its
        identity. Trajectories whose identities agree up to a block have the same tokens up to there. What no block
        covers (the last generation, or everything without block identities) is the trajectory's own.

        Raises:
            ValueError: the trajectory is not lengths-only.
        """
        if trace.kind != "length":
            raise ValueError(f"trace {trace.id!r} has {trace.kind}, not just lengths")
        spans = [trace.prompt, *(span for turn in trace.turns for span in (turn.model, turn.env))]
        sizes = [_tokens(span) for span in spans]
        whole = self._whole(trace, sum(sizes))
        pieces = np.split(whole, np.cumsum(sizes)[:-1])
        turns = tuple(
            TokenTurn(pieces[1 + 2 * i], pieces[2 + 2 * i], turn.tool_seconds) for i, turn in enumerate(trace.turns)
        )
        return TokenTrace(trace.id, trace.group, pieces[0], turns, trace.source)

    def _whole(self, trace: Trace, total: int) -> TokenArray:
        last = _tokens(trace.turns[-1].model) + _tokens(trace.turns[-1].env)
        covered = min(total - last, len(trace.block_hashes) * trace.block_size)
        blocks = [
            self.block(f"block:{trace.block_size}:{identity}", trace.block_size) for identity in trace.block_hashes
        ]
        own = self.block(f"trace:{trace.source}:{trace.id}", total - covered)
        return np.concatenate([np.concatenate(blocks)[:covered], own]) if blocks else own


def _tokens(span: Span) -> int:
    assert isinstance(span, Length)
    return span.tokens


def no_repeat_traces(
    *,
    groups: int,
    n: int,
    turns: int,
    prompt_tokens: int,
    model_tokens: int,
    env_tokens: int,
    tokens: SyntheticTokens,
) -> list[TokenTrace]:
    """Trajectories with nothing to reuse: no token comes twice until every id of the range has been used once.

    Not even the prompt is shared within a group, so neither a prefix cache nor a suffix drafter has anything to find.

    Args:
        groups: number of groups.
        n: trajectories per group.
        turns: turns per trajectory.
        prompt_tokens: length of the first prompt. Unit: tokens.
        model_tokens: generated per turn. Unit: tokens.
        env_tokens: appended after each turn but the last. Unit: tokens.
        tokens: range and seed.

    Raises:
        ValueError: a count below 1, or negative ``env_tokens``.
    """
    counts = {"groups": groups, "n": n, "turns": turns, "prompt_tokens": prompt_tokens, "model_tokens": model_tokens}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if env_tokens < 0:
        raise ValueError(f"env_tokens={env_tokens}: must not be negative")
    source = _unrepeated(tokens)
    traces = []
    for group in range(groups):
        for member in range(n):
            prompt = _take(source, prompt_tokens)
            made = tuple(
                TokenTurn(_take(source, model_tokens), _take(source, env_tokens if turn + 1 < turns else 0), None)
                for turn in range(turns)
            )
            traces.append(TokenTrace(f"no-repeat/{group}/{member}", f"no-repeat/{group}", prompt, made, "no-repeat"))
    return traces


def _unrepeated(tokens: SyntheticTokens) -> Iterator[int]:
    rng = np.random.Generator(np.random.PCG64([tokens.seed, tokens.low, tokens.high]))
    while True:
        yield from rng.permutation(np.arange(tokens.low, tokens.high)).tolist()


def _take(source: Iterator[int], count: int) -> TokenArray:
    return np.fromiter((next(source) for _ in range(count)), dtype=np.int32, count=count)
