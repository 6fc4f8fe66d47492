# SPDX-License-Identifier: Apache-2.0
"""Chained hashes of KV blocks, computed at the client so that tokens need not travel to the router.

The hashes follow the engines' rule: a block's identity is its parent's identity, its tokens and whatever else decides
its content (LoRA adapter, cache salt, multimodal items). They are not any engine's own bytes and are compared only with
each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from war_rl.types import TokenArray, as_tokens

HASH_BITS = 63
"""Hashes are non-negative and fit a signed 64-bit integer."""
_MASK = (1 << HASH_BITS) - 1
_ROOT = b"war-rl/kv-block/1"


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A multimodal item: its placeholder occupies ``[start, start + length)`` tokens, ``key`` names its content."""

    start: int
    length: int
    key: str


def root_digest(lora: str = "", salt: str = "") -> bytes:
    """Parent of a prompt's first block. Equal tokens under another adapter or salt share nothing."""
    digest = blake2b(_ROOT, digest_size=16)
    for part in (lora, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def block_hashes(
    tokens: Sequence[int] | TokenArray,
    block_size: int,
    *,
    lora: str = "",
    salt: str = "",
    media: Sequence[MediaSpan] = (),
) -> tuple[int, ...]:
    """Hashes of the full blocks of a prompt, oldest first: ``len(tokens) // block_size`` numbers in [0, 2**63).

    Raises:
        ValueError: ``block_size`` is not positive.
    """
    return PromptHasher(block_size, lora=lora, salt=salt).update(tokens, media)


@dataclass(slots=True)
class PromptHasher:
    """Hashes the growing prompt of one trajectory: a turn pays only for the blocks that are new.

    The prefix is compared, not trusted: where the prompt differs from the last one (an agent loop that rewrites its
    history), hashing starts again at the first block that differs.
    """

    block_size: int
    lora: str = ""
    salt: str = ""
    _tokens: TokenArray = field(default_factory=lambda: np.empty(0, np.int32))
    _media: tuple[MediaSpan, ...] = ()
    _digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: must be at least 1 token")

    def update(self, tokens: Sequence[int] | TokenArray, media: Sequence[MediaSpan] = ()) -> tuple[int, ...]:
        """Hashes of the full blocks of ``tokens``, the trajectory's whole prompt so far."""
        prompt = as_tokens(tokens)
        spans = tuple(media)
        keep = self._common_blocks(prompt, spans)
        del self._digests[keep:]
        parent = self._digests[-1] if self._digests else root_digest(self.lora, self.salt)
        raw = prompt.astype("<i4", copy=False).tobytes()
        width = 4 * self.block_size
        for block in range(keep, len(prompt) // self.block_size):
            data = parent + raw[block * width : (block + 1) * width]
            if spans:
                data += self._media_bytes(block, spans)
            parent = blake2b(data, digest_size=16).digest()
            self._digests.append(parent)
        self._tokens, self._media = prompt, spans
        return tuple(int.from_bytes(d[:8], "little") & _MASK for d in self._digests)

    def _common_blocks(self, prompt: TokenArray, spans: tuple[MediaSpan, ...]) -> int:
        length = min(len(prompt), len(self._tokens))
        different = np.flatnonzero(prompt[:length] != self._tokens[:length])
        same = int(different[0]) if len(different) else length
        for old, new in zip(self._media, spans, strict=False):
            if old != new:
                same = min(same, old.start, new.start)
        for extra in (*self._media[len(spans) :], *spans[len(self._media) :]):
            same = min(same, extra.start)
        return min(same // self.block_size, len(self._digests))

    def _media_bytes(self, block: int, spans: tuple[MediaSpan, ...]) -> bytes:
        start, end = block * self.block_size, (block + 1) * self.block_size
        inside = [s for s in spans if s.start < end and start < s.start + s.length]
        return b"".join(f"|{s.start - start}:{s.key}".encode() for s in inside)


def same_blocks(known: Sequence[int], start: int, size: int, hashes: Sequence[int], at: int) -> int:
    """How many of the ``size`` blocks of ``known`` from ``start`` are those of ``hashes`` from ``at``.

    Hashes are chained: one equal hash proves all before it.
    """
    low, high = 0, min(size, len(hashes) - at)
    if high and known[start + high - 1] == hashes[at + high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if known[start + middle] == hashes[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low
