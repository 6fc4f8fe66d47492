# SPDX-License-Identifier: Apache-2.0
"""What a recorded trajectory is, whatever file format it came from.

A recording holds a trajectory in one of three forms: the text of its messages, its token ids, or only its lengths.
:class:`Trace` keeps whichever form the recording has; nothing is invented at reading time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

from war_rl.types import TokenArray


class TraceFormatError(ValueError):
    """A recording that cannot be read. The message names the file, the line and what was expected there."""

    def __init__(self, file: object, line: int, expected: str) -> None:
        super().__init__(f"{file}:{line}: {expected}")
        self.file = str(file)
        self.line = line
        self.expected = expected


Notes: TypeAlias = Counter[str]
"""What a reader left out or had to interpret, by plain-English reason, with how often it happened."""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message as plain text; tool calls are already part of ``content``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of a trajectory as messages; empty when nothing was said."""

    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A piece of a trajectory as token ids, int32 [n], of the tokenizer that recorded it."""

    ids: TokenArray


@dataclass(frozen=True, slots=True)
class Length:
    """A piece of a trajectory of which only the number of tokens is known."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"a length cannot be negative: {self.tokens}")


Span: TypeAlias = Text | Tokens | Length


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant generation and what the environment answered.

    Attributes:
        model: what the model wrote.
        env: what the environment appended afterwards; empty when nothing followed.
        tool_seconds: how long the environment took, in seconds; None when the recording does not say.
    """

    model: Span
    env: Span
    tool_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded trajectory.

    Attributes:
        id: unique within the files read together.
        group: trajectories with the same non-empty group are siblings of one prompt or task; "" when unknown.
        prompt: what the first turn was asked.
        turns: in order; at least one.
        source: name of the file format.
        block_hashes: lengths-only recordings: identities of the blocks of the last turn's prompt, oldest first. Equal
            ids at equal positions mean equal text.
        block_size: tokens per block of ``block_hashes``; 0 without them.
        reward: the recorded reward, None when unknown.

    Raises:
        ValueError: no turns, pieces of different forms, or fewer block hashes than the last prompt has blocks.
    """

    id: str
    group: str
    prompt: Span
    turns: tuple[Turn, ...]
    source: str
    block_hashes: tuple[int, ...] = ()
    block_size: int = 0
    reward: float | None = None
    _kind: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"trace {self.id!r} has no turns")
        spans = [self.prompt, *(span for turn in self.turns for span in (turn.model, turn.env))]
        kinds = {type(span).__name__.lower() for span in spans}
        if len(kinds) > 1:
            raise ValueError(f"trace {self.id!r} mixes {' and '.join(sorted(kinds))}: one form per trajectory")
        if self.block_hashes and self.block_size < 1:
            raise ValueError(f"trace {self.id!r} has block hashes but block_size={self.block_size}")
        object.__setattr__(self, "_kind", kinds.pop())

    @property
    def kind(self) -> str:
        """``text``, ``tokens`` or ``length``."""
        return self._kind
