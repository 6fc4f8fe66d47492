# SPDX-License-Identifier: Apache-2.0
"""Block hashes: chained, incremental, and sensitive to everything that decides a block's content."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.rollout.blocks import HASH_BITS, MediaSpan, PromptHasher, block_hashes

TOKENS = st.lists(st.integers(0, 3), max_size=40)


@given(TOKENS, st.integers(1, 7))
def test_one_hash_per_full_block_in_range(tokens, size):
    hashes = block_hashes(tokens, size)
    assert len(hashes) == len(tokens) // size
    assert all(0 <= h < 2**HASH_BITS for h in hashes)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_equal_hash_if_and_only_if_equal_prefix(a, b, size):
    for i, (x, y) in enumerate(zip(block_hashes(a, size), block_hashes(b, size), strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


@given(st.lists(TOKENS, min_size=1, max_size=6), st.integers(1, 5))
def test_incremental_hashing_equals_hashing_from_scratch(prompts, size):
    hasher = PromptHasher(size, lora="a")
    for prompt in prompts:
        assert hasher.update(prompt) == block_hashes(prompt, size, lora="a")


def test_growing_prompt_hashes_only_new_blocks(monkeypatch):
    import war_rl.rollout.blocks as blocks

    calls = []
    real = blocks.blake2b
    monkeypatch.setattr(blocks, "blake2b", lambda data, **kw: calls.append(1) or real(data, **kw))
    hasher = PromptHasher(4)
    hasher.update(np.arange(400, dtype=np.int32))
    calls.clear()
    hasher.update(np.arange(410, dtype=np.int32))
    assert len(calls) == 2


def test_adapter_salt_and_media_enter_the_hash():
    tokens = list(range(16))
    plain = block_hashes(tokens, 4)
    assert set(block_hashes(tokens, 4, lora="x")).isdisjoint(plain)
    assert set(block_hashes(tokens, 4, salt="x")).isdisjoint(plain)
    assert set(block_hashes(tokens, 4, lora="ab")).isdisjoint(block_hashes(tokens, 4, lora="a", salt="b"))
    image = block_hashes(tokens, 4, media=[MediaSpan(5, 2, "cat")])
    other = block_hashes(tokens, 4, media=[MediaSpan(5, 2, "dog")])
    assert image[0] == other[0] == plain[0]
    assert all(a != b for a, b in zip(image[1:], other[1:], strict=True))


def test_changed_media_is_hashed_again():
    hasher = PromptHasher(4)
    tokens = list(range(16))
    hasher.update(tokens, [MediaSpan(5, 2, "cat")])
    assert hasher.update(tokens, [MediaSpan(5, 2, "dog")]) == block_hashes(tokens, 4, media=[MediaSpan(5, 2, "dog")])
    assert hasher.update(tokens) == block_hashes(tokens, 4)


def test_block_size_is_checked():
    with pytest.raises(ValueError, match="block_size=0"):
        block_hashes([1], 0)
