# SPDX-License-Identifier: Apache-2.0
"""What an engine says about a finished turn: SGLang's ``meta_info``, or the ``usage`` of the OpenAI paths."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from war_rl.trainers.slime.sessions import Prompt, text_units
from war_rl.types import TokenArray

try:
    import orjson

    loads: Any = orjson.loads
except ImportError:  # the standard library does the same, slower
    loads = json.loads


@dataclass(slots=True)
class Answer:
    """``output`` is in the prompt's units (token ids or bytes); empty where it is unknown or incomplete."""

    generated: int = 0
    prompt_tokens: int | None = None
    cached: int | None = None
    output: Sequence[int] | TokenArray = ()
    error: str = ""
    weight_version: str = ""


def read_answer(data: bytes, status: int, prompt: Prompt) -> Answer:
    """An engine's JSON answer. One that cannot be read counts as unknown, not as failed: the client got it."""
    if status >= 400:
        return Answer(error=f"HTTP {status}")
    try:
        body = loads(data)
    except ValueError:
        return Answer()
    if isinstance(body, list):
        parts = [_one(b, prompt) for b in body if isinstance(b, Mapping)]
        cached = [p.cached for p in parts if p.cached is not None]
        return Answer(sum(p.generated for p in parts), cached=sum(cached) if cached else None)
    return _one(body, prompt) if isinstance(body, Mapping) else Answer()


def _one(body: Mapping[str, Any], prompt: Prompt) -> Answer:
    meta = body.get("meta_info")
    if not isinstance(meta, Mapping):
        return _openai(body)
    generated = _count(meta.get("completion_tokens")) or 0
    output: Sequence[int] | TokenArray = ()
    if prompt.text:
        text = body.get("text")
        output = text_units(text) if isinstance(text, str) else ()
    else:
        ids = body.get("output_ids")
        if not isinstance(ids, list):
            ids = [entry[1] for entry in meta.get("output_token_logprobs") or ()]
        # An incremental stream's last event holds the last tokens only.
        output = ids if len(ids) == generated else ()
    return Answer(
        generated,
        _count(meta.get("prompt_tokens")),
        _count(meta.get("cached_tokens")),
        output,
        weight_version=str(meta.get("weight_version") or ""),
    )


def _openai(body: Mapping[str, Any]) -> Answer:
    usage = body.get("usage")
    if not isinstance(usage, Mapping):
        return Answer()
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    return Answer(_count(usage.get("completion_tokens")) or 0, _count(usage.get("prompt_tokens")), cached)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None


class LastEvent:
    """Keeps the last whole server-sent event that carries JSON, of a stream that passes by."""

    def __init__(self) -> None:
        self.data = b""
        self._rest = b""

    def feed(self, chunk: bytes) -> None:
        *events, self._rest = (self._rest + chunk).split(b"\n\n")
        for event in reversed(events):
            if event.startswith(b"data: {"):
                self.data = event[6:]
                return
