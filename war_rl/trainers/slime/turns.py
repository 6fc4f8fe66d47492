# SPDX-License-Identifier: Apache-2.0
"""A turn on its way through the router, and the answers that the router gives in an engine's stead."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from war_rl.trainers.slime.sessions import Prompt, Session


class Lost(Exception):
    """The worker is gone, and nothing has reached the client yet."""


class Aborted(Exception):
    """The rollout was aborted while the turn waited."""


@dataclass(slots=True, eq=False)
class Turn:
    """A request on its way.

    ``queue_seconds``: waiting for a place, all attempts together. ``rid``: SGLang's own request id, where the client
    gave one. ``aborted``: to be answered as aborted while it waits. ``lost``: why its worker is lost while it runs.
    """

    session: Session
    prompt: Prompt
    hashes: tuple[int, ...]
    number: int
    raw: bytes
    began: float
    stream: bool
    key: str = ""
    url: str = ""
    reason: str = ""
    queue_seconds: float = 0.0
    placed: float = 0.0
    error: str = ""
    settled: bool = False
    rid: str = ""
    aborted: bool = False
    lost: str = ""
    task: asyncio.Task[Any] | None = None


def error_response(status: int, code: str, message: str) -> web.Response:
    """An error in the form of SGLang's router, for clients that look at it."""
    return web.json_response({"error": {"type": "Error", "code": code, "message": message}}, status=status)


def aborted_response(turn: Turn) -> web.Response:
    """What an engine says about a request that it aborted before the first token."""
    meta: dict[str, Any] = {
        "finish_reason": {"type": "abort", "message": "aborted while waiting for a worker"},
        "prompt_tokens": turn.prompt.tokens,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "output_token_logprobs": [],
    }
    body = {"text": "", "output_ids": [], "meta_info": meta}
    if not turn.stream:
        return web.json_response(body)
    return web.Response(text=f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")
