# SPDX-License-Identifier: Apache-2.0
"""One replica's paged KV cache, in runs of blocks instead of blocks.

Rules of vLLM 0.24 (``vllm/v1/core/block_pool.py``, ``kv_cache_manager.py``): new blocks come from the head of the free
queue; a request's full blocks go to its tail, last block first; blocks that are not full go to the head; a prefix hit
takes blocks out of the queue. Under these rules a block never outlives the one before it, so what is cached of a run
is always a prefix of it, and what is free of it is a stack of ranges, the deepest the oldest.

One simplification: two requests that compute the same block at the same time share it here, and hold a copy each there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

Path = Sequence[tuple[int, int]]
"""A trajectory's text as (segment, blocks), from its start; equal segments are equal text."""


class _Node:
    """Cached blocks of one segment: the first ``resident``; those up to ``held`` are in use."""

    __slots__ = ("depths", "free", "held", "resident")

    def __init__(self) -> None:
        self.resident = 0
        self.held = 0
        self.depths: dict[int, int] = {}
        self.free: deque[_Range] = deque()


class _Range:
    """Free blocks ``[low, high)`` of a segment."""

    __slots__ = ("high", "low", "segment")

    def __init__(self, segment: int, low: int, high: int) -> None:
        self.segment, self.low, self.high = segment, low, high


class BlockCache:
    """KV blocks of one replica.

    Args:
        blocks: capacity.
    """

    def __init__(self, blocks: int) -> None:
        self.capacity = blocks
        self.blank = blocks
        """Blocks that hold nothing anyone could ask for."""
        self.evictable = 0
        """Blocks that hold text and are not in use."""
        self.evicted = 0
        self._nodes: dict[int, _Node] = {}
        self._queue: OrderedDict[_Range, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that can be allocated."""
        return self.blank + self.evictable

    def match(self, path: Path, most: int) -> tuple[int, int]:
        """(cached blocks at the start of ``path``, at most ``most``; how many of them are not in use)."""
        hit = idle = 0
        for segment, size in path:
            node = self._nodes.get(segment)
            if node is None:
                break
            found = min(node.resident, size, most - hit)
            hit += found
            idle += max(0, found - node.held)
            if found < size:
                break
        return hit, idle

    def take(self, path: Path, blocks: int) -> None:
        """A request begins to use the first ``blocks`` cached blocks of its path."""
        self.name(path, 0, blocks, 0)

    def allocate(self, blocks: int) -> None:
        """Take blocks for text that has no name yet; cached text is evicted for them.

        Raises:
            ValueError: there are not that many free blocks.
        """
        if blocks > self.free:
            raise ValueError(f"{blocks} blocks wanted, {self.free} free")
        self.blank -= blocks
        while self.blank < 0:
            oldest = next(iter(self._queue))
            gone = min(-self.blank, oldest.high - oldest.low)
            oldest.high -= gone
            node = self._nodes[oldest.segment]
            node.resident -= gone
            self.blank += gone
            self.evictable -= gone
            self.evicted += gone
            if oldest.low == oldest.high:
                del self._queue[oldest]
                node.free.popleft()
                if not node.resident and not node.depths:
                    del self._nodes[oldest.segment]

    def give_back(self, blocks: int) -> None:
        """Blocks without a name are free again."""
        self.blank += blocks

    def name(self, path: Path, old: int, new: int, allocated: int) -> None:
        """A request that uses the first ``old`` blocks of its path now uses ``new``; ``allocated`` blocks were taken
        for the difference. Where others have cached the same text meanwhile, it is shared and the copy given back."""
        start = missing = 0
        for segment, size in path:
            before, after = min(max(old - start, 0), size), min(max(new - start, 0), size)
            start += size
            if after > before:
                missing += self._hold(segment, before, after)
            if start >= new:
                break
        self.blank += allocated - missing
        if self.blank < 0:
            raise ValueError("blocks were named that are neither cached nor allocated")

    def _hold(self, segment: int, before: int, after: int) -> int:
        """Returns the blocks that were not cached."""
        node = self._nodes.get(segment)
        if node is None:
            node = self._nodes[segment] = _Node()
        if before:
            self._drop_depth(node, before)
        node.depths[after] = node.depths.get(after, 0) + 1
        while node.free and node.free[-1].low < after:
            top = node.free[-1]
            cut = min(top.high, after)
            self.evictable -= cut - top.low
            if cut == top.high:
                node.free.pop()
                del self._queue[top]
            else:
                top.low = cut
        missing = max(0, after - node.resident)
        node.resident += missing
        node.held = max(node.held, after)
        return missing

    @staticmethod
    def _drop_depth(node: _Node, depth: int) -> None:
        left = node.depths[depth] - 1
        if left:
            node.depths[depth] = left
        else:
            del node.depths[depth]

    def release(self, path: Path, blocks: int) -> None:
        """The request uses them no more; they stay cached until evicted, the last one first."""
        used, start = [], 0
        for segment, size in path:
            if start >= blocks:
                break
            used.append((segment, min(size, blocks - start)))
            start += size
        for segment, depth in reversed(used):
            node = self._nodes[segment]
            self._drop_depth(node, depth)
            held = max(node.depths, default=0)
            if held < node.held:
                idle = _Range(segment, held, node.held)
                node.free.append(idle)
                self._queue[idle] = None
                self.evictable += node.held - held
                node.held = held

    def clear(self) -> None:
        """The weights have changed. Only while nothing is in use.

        Raises:
            ValueError: a request still uses blocks.
        """
        if self.free != self.capacity:
            raise ValueError("the cache cannot be emptied while requests use it")
        self._nodes.clear()
        self._queue.clear()
        self.blank, self.evictable = self.capacity, 0

    def check(self) -> None:
        """Raise AssertionError where the books do not balance; for tests. Blocks without a name are the rest."""
        idle = 0
        for segment, node in self._nodes.items():
            assert node.held == max(node.depths, default=0) <= node.resident, segment
            edge = node.resident
            for found in node.free:
                assert found.high == edge and found.low < found.high and found in self._queue, segment
                edge = found.low
            assert edge == node.held, segment
            idle += node.resident - node.held
        assert idle == self.evictable and self.blank >= 0
        assert self.blank + sum(n.resident for n in self._nodes.values()) <= self.capacity
