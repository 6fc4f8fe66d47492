# SPDX-License-Identifier: Apache-2.0
"""Recorded text -> one growing token sequence.

Every piece is tokenised on its own and the ids are joined, which is what an agent loop that works token-in, token-out
does: the next turn's prompt is exactly the previous prompt, the generated ids and the environment's ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from war_rl.traces.model import Length, Message, Span, Text, Tokens, Trace
from war_rl.types import TokenArray, as_tokens


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of ``transformers`` and ``tokenizers`` fit."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Token ids of ``text``, or an object that has them as ``ids``."""


@dataclass(frozen=True)
class ChatFormat:
    """How messages become text. The default is ChatML.

    ``{role}`` in ``start`` is the message's role. A model's turn ends with ``end``, which it generates itself;
    ``separator`` follows every ``end`` and is not generated.
    """

    start: str = "<|im_start|>{role}\n"
    end: str = "<|im_end|>"
    separator: str = "\n"
    model_role: str = "assistant"


@dataclass(frozen=True, slots=True, eq=False)
class TokenTurn:
    """One turn in tokens: int32 [m] generated (end of turn included), int32 [e] appended afterwards."""

    model: TokenArray
    env: TokenArray
    tool_seconds: float | None


@dataclass(frozen=True, slots=True, eq=False)
class TokenTrace:
    """One trajectory in tokens; ``prompt`` is int32 [p]. Fields as in :class:`~war_rl.traces.model.Trace`."""

    id: str
    group: str
    prompt: TokenArray
    turns: tuple[TokenTurn, ...]
    source: str


class Renderer:
    """Renders and tokenises traces with one tokenizer and one chat format; remembers messages it has seen."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat or ChatFormat()
        self._seen: dict[Message, list[int]] = {}
        self._opening = self._encode(self._chat.start.format(role=self._chat.model_role))
        self._separator = self._encode(self._chat.separator)

    def trace(self, trace: Trace) -> TokenTrace:
        """The trajectory in tokens. A trajectory recorded as token ids passes through unchanged.

        Raises:
            ValueError: a lengths-only recording, which has nothing to tokenise.
        """
        turns = tuple(TokenTurn(self._model(t.model), self._env(t.env), t.tool_seconds) for t in trace.turns)
        return TokenTrace(trace.id, trace.group, self._prompt(trace.prompt), turns, trace.source)

    def _prompt(self, span: Span) -> TokenArray:
        if isinstance(span, Text):
            return as_tokens([*self._messages(span.messages), *self._opening])
        return _recorded(span)

    def _model(self, span: Span) -> TokenArray:
        if isinstance(span, Text):
            return as_tokens(self._encode("".join(m.content for m in span.messages) + self._chat.end))
        return _recorded(span)

    def _env(self, span: Span) -> TokenArray:
        if isinstance(span, Text):
            # Opens with what the chat format puts between the model's end of turn and the next message.
            return as_tokens([*self._separator, *self._messages(span.messages), *self._opening])
        return _recorded(span)

    def _messages(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if message not in self._seen:
                chat = self._chat
                text = f"{chat.start.format(role=message.role)}{message.content}{chat.end}{chat.separator}"
                self._seen[message] = self._encode(text)
            ids.extend(self._seen[message])
        return ids

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return list(getattr(encoded, "ids", encoded))


def _recorded(span: Span) -> TokenArray:
    if isinstance(span, Tokens):
        return np.ascontiguousarray(span.ids, dtype=np.int32)
    assert isinstance(span, Length)
    raise ValueError("a lengths-only recording has no text to tokenise; give it synthetic tokens")
