# SPDX-License-Identifier: Apache-2.0
"""A replica's ``/metrics`` page: the few of vLLM's values that are looked at again and again while a rollout goes on.

A parse of the page that understands it (:func:`war_rl.metrics.parse_prometheus`) takes several times as long.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prefix_cache_queries_total": "prompt",
    "vllm:prefix_cache_hits_total": "cached",
    "vllm:generation_tokens_total": "generated",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
"""vLLM's name -> ours."""

_LINE = re.compile(r"^(vllm:\w+)(?:\{.*\})? ([-+.\w]+)$", re.MULTILINE)


def parse_gauges(text: str) -> dict[str, float]:
    """:data:`GAUGES` of a ``/metrics`` page, each summed over its labels; those that are not there are left out."""
    out: dict[str, float] = {}
    for name, value in _known_lines(text):
        out[name] = out.get(name, 0.0) + value
    return out


def _known_lines(text: str) -> Iterator[tuple[str, float]]:
    for match in _LINE.finditer(text):
        name = GAUGES.get(match.group(1))
        if name is not None:
            yield name, float(match.group(2))


def read_gauges(server_id: str, timeout_s: float = 10.0) -> dict[str, float]:
    """:data:`GAUGES` of the replica at ``server_id`` (host:port).

    Raises:
        OSError: the replica does not answer.
    """
    # verl binds this port; the address is the one it registered itself under.
    with urllib.request.urlopen(f"http://{server_id}/metrics", timeout=timeout_s) as response:
        return parse_gauges(response.read().decode())


AT_ONCE = 16
"""Most replicas that are asked at the same time."""

T = TypeVar("T")


def ask_all(servers: Sequence[str], ask: Callable[[str], T]) -> dict[str, T]:
    """``ask`` of every server, several at once: one after another, a cluster's pages would take seconds.

    Raises:
        Exception: what ``ask`` raised first.
    """
    if not servers:
        return {}
    with ThreadPoolExecutor(min(AT_ONCE, len(servers)), thread_name_prefix="war-pages") as pool:
        return dict(zip(servers, pool.map(ask, servers), strict=True))
