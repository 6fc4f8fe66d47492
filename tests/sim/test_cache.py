# SPDX-License-Identifier: Apache-2.0
"""The run-wise KV cache against a block-wise one written down from vLLM's rules."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from war_rl.sim.cache import BlockCache

PATHS = (
    ((1, 3), (2, 4), (10, 6)),
    ((1, 3), (2, 4), (11, 5)),
    ((1, 3), (3, 2), (12, 8)),
    ((20, 10),),
)


class Plain:
    """Block by block: a free queue, evicted from its head."""

    def __init__(self, blocks):
        self.blank = blocks
        self.refs = {}
        self.queue = OrderedDict()

    @property
    def free(self):
        return self.blank + len(self.queue)

    def match(self, path):
        hit = 0
        for block in path:
            if block not in self.refs:
                break
            hit += 1
        return hit

    def allocate(self, blocks):
        for _ in range(blocks):
            if self.blank:
                self.blank -= 1
            else:
                gone, _ = self.queue.popitem(last=False)
                del self.refs[gone]
                # vLLM reuses the block at once.

    def hold(self, blocks, allocated):
        for block in blocks:
            if block in self.refs:
                self.queue.pop(block, None)
            else:
                allocated -= 1
                self.refs[block] = 0
            self.refs[block] += 1
        self.blank += allocated

    def release(self, blocks):
        for block in reversed(blocks):
            self.refs[block] -= 1
            if not self.refs[block]:
                self.queue[block] = None


def blocks_of(path):
    return [(segment, i) for segment, size in path for i in range(size)]


class CacheMachine(RuleBasedStateMachine):
    """Requests start, grow and end; both caches must always serve the same hits."""

    def __init__(self):
        super().__init__()
        self.cache, self.plain = BlockCache(24), Plain(24)
        self.running = {}
        self.serial = 0

    @rule(which=st.integers(0, 3), most=st.integers(0, 13))
    def start(self, which, most):
        path = PATHS[which]
        flat = blocks_of(path)
        hit, idle = self.cache.match(path, min(most, len(flat)))
        assert hit == min(self.plain.match(flat), most, len(flat))
        assert idle == sum(self.plain.refs[b] == 0 for b in flat[:hit])
        self.cache.take(path, hit)
        self.plain.hold(flat[:hit], 0)
        self.serial += 1
        self.running[self.serial] = [path, hit]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 6))
    def grow(self, data, more):
        request = self.running[data.draw(st.sampled_from(sorted(self.running)))]
        path, depth = request
        flat = blocks_of(path)
        more = min(more, len(flat) - depth, self.cache.free)
        if more <= 0:
            return
        self.cache.allocate(more)
        self.plain.allocate(more)
        self.cache.name(path, depth, depth + more, more)
        self.plain.hold(flat[depth : depth + more], more)
        request[1] = depth + more

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        path, depth = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.cache.release(path, depth)
        self.plain.release(blocks_of(path)[:depth])

    @invariant()
    def same(self):
        self.cache.check()
        assert (self.cache.blank, self.cache.free) == (self.plain.blank, self.plain.free)
        for path in PATHS:
            flat = blocks_of(path)
            assert self.cache.match(path, len(flat))[0] == self.plain.match(flat)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_last_block_of_the_oldest_text_goes_first():
    cache = BlockCache(10)
    for path in (((1, 4),), ((2, 4),)):
        cache.allocate(4)
        cache.name(path, 0, 4, 4)
        cache.release(path, 4)
    cache.allocate(5)
    assert cache.match(((1, 4),), 4) == (1, 1)
    assert cache.match(((2, 4),), 4) == (4, 4)
    assert cache.evicted == 3


def test_what_cannot_be_is_refused():
    cache = BlockCache(2)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        cache.allocate(3)
    cache.allocate(1)
    with pytest.raises(ValueError, match="emptied"):
        cache.clear()
