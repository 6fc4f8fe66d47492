# SPDX-License-Identifier: Apache-2.0
"""What one replica's KV cache still holds, block by block, in the engine's own eviction order.

The order is vLLM v1's (``vllm/v1/core/block_pool.py``): the blocks of a finished request go to the tail of the free
queue, last block first; blocks without a hash go to its head; new blocks are taken from the head; a prefix hit takes
its blocks out of the queue. Under that order a block never outlives its parent, so residency is a set of prefixes and
consecutive blocks can be kept as one run: a turn's cost follows the number of runs on its path (a handful), not of
blocks.

Text a turn generated has no hash until the trajectory's next prompt carries it; until then it is an unnamed run.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from war_rl.rollout.blocks import same_blocks
from war_rl.types import TrajectoryId

_MASK = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class _Run:
    """Consecutive blocks with one set of holders. The first ``resident`` of its ``size`` blocks are in the cache."""

    parent: _Run | None
    key: int
    size: int
    resident: int = 0
    refs: int = 0
    stamp: int = 0
    hashes: array[int] | None = None
    owner: TrajectoryId | None = None
    children: dict[int, _Run] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """A running turn: its deepest run, and what was predicted, so that the engine's report can correct the model."""

    leaf: _Run
    trajectory: TrajectoryId
    prompt_tokens: int
    cached_blocks: int
    named_blocks: int
    stamps: list[tuple[int, int]]


class Residency:
    """Model of one replica's prefix cache.

    Args:
        kv_tokens: capacity in tokens; the engine keeps one block for itself. 0 or less: no bound.
        block_size: tokens per block.
    """

    def __init__(self, kv_tokens: int, block_size: int) -> None:
        self.block_size = max(1, block_size)
        self.capacity = max(1, kv_tokens // self.block_size - 1) if kv_tokens > 0 else 1 << 60
        self.evicted_blocks = 0
        self.divergences = 0
        """Prompts that did not continue with the text their trajectory had generated."""
        self.frontier_corrections = 0
        """Reports of fewer cached tokens than predicted that moved the eviction frontier."""
        self.clear()

    def clear(self) -> None:
        """The cache is empty (weights changed). Running turns, if any, keep running without being modelled."""
        self._root = _Run(None, -1, 0)
        self._free: OrderedDict[_Run, None] = OrderedDict()
        self._unnamed: dict[TrajectoryId, _Run] = {}
        self._held: dict[str, _Held] = {}
        self._blank = self.capacity
        self._grown = 0
        self._stamp = 0
        self._unnamed_key = -1

    # ---- questions

    @property
    def resident_blocks(self) -> int:
        """Blocks that are in use or could serve a hit."""
        return self.capacity - self._blank

    def match(self, hashes: Sequence[int], prompt_tokens: int, trajectory: TrajectoryId | None = None) -> int:
        """Prompt tokens the cache would serve now: whole blocks, never the whole prompt (its last token is computed).

        ``hashes`` may be empty or shorter than the prompt; only what is hashed can match.
        """
        run, blocks = self._root, 0
        while True:
            child = run.children.get(hashes[blocks]) if blocks < len(hashes) else None
            if child is None:
                break
            same = min(self._same(child, hashes, blocks), child.resident)
            blocks += same
            run = child
            if same < child.size:
                return self._servable(blocks, prompt_tokens)
        tail = self._unnamed.get(trajectory) if trajectory is not None else None
        if tail is not None and tail.parent is run and len(hashes) - blocks >= tail.size:
            blocks += tail.resident
        return self._servable(blocks, prompt_tokens)

    # ---- events

    def begin(self, key: str, trajectory: TrajectoryId, hashes: Sequence[int], prompt_tokens: int) -> int:
        """A turn starts to run: its prompt's blocks are taken. Returns the predicted cached tokens."""
        cached = self.match(hashes, prompt_tokens, trajectory)
        run, blocks, stamps = self._root, 0, []
        while blocks < len(hashes):
            child = run.children.get(hashes[blocks])
            if child is None:
                break
            same = self._same(child, hashes, blocks)
            if same < child.size:
                child = self._split(child, same)
            # A run that is in use cannot have been evicted: a miss there is a matter of timing, and moves nothing.
            stamps.append((blocks, child.stamp if child.refs == 0 else 0))
            self._take(child)
            blocks += child.size
            run = child
        named = blocks
        tail = self._unnamed.pop(trajectory, None)
        if tail is not None and tail.parent is run and len(hashes) - blocks >= tail.size and tail.resident:
            stamps.append((blocks, tail.stamp if tail.refs == 0 else 0))
            self._name(tail, hashes, blocks)
            self._take(tail)
            blocks += tail.size
            run = tail
        if blocks < len(hashes):
            run = self._add(run, hashes, blocks)
        run = self._fold(run)
        self._allocate(_ceil(prompt_tokens, self.block_size) - self._depth(run))
        self._held[key] = _Held(run, trajectory, prompt_tokens, cached // self.block_size, named, stamps)
        return cached

    def grow(self, tokens: float) -> None:
        """Estimate of the tokens that the running turns have generated so far, all of them together."""
        target = min(int(tokens) // self.block_size, self.capacity)
        if target > self._grown:
            self._allocate(target - self._grown)
            self._grown = target

    def end(self, key: str, generated_tokens: int, reported_cached: int | None) -> None:
        """A turn is over: the report corrects the model, then its blocks become evictable, last block first."""
        held = self._held.pop(key, None)
        if held is None:
            return
        if reported_cached is not None:
            self._correct(held, reported_cached // self.block_size)
        size = self.block_size
        # The last token is sampled but never computed, so it has no place in the cache.
        tokens = max(held.prompt_tokens, held.prompt_tokens + generated_tokens - 1)
        grown = _ceil(tokens, size) - _ceil(held.prompt_tokens, size)
        from_pool = min(self._grown, grown)
        self._grown -= from_pool
        self._allocate(grown - from_pool)
        named = self._depth(held.leaf)
        if tokens // size > named:
            self._append_unnamed(held, tokens // size - named)
        # Blocks that are not full have no hash and can serve nobody.
        self._blank += _ceil(tokens, size) - max(tokens // size, named)
        run: _Run | None = held.leaf
        while run is not None and run is not self._root:
            self._give(run)
            run = run.parent
        if not self._held:
            self._blank += self._grown
            self._grown = 0
        self._settle()

    def forget(self, trajectory: TrajectoryId) -> None:
        """The trajectory will not return: its blocks stay until evicted, but nobody will name its last text."""
        tail = self._unnamed.pop(trajectory, None)
        if tail is not None:
            tail.owner = None

    # ---- inside

    def _servable(self, blocks: int, prompt_tokens: int) -> int:
        return max(0, min(blocks, (prompt_tokens - 1) // self.block_size)) * self.block_size

    @staticmethod
    def _same(run: _Run, hashes: Sequence[int], start: int) -> int:
        """How many of the run's blocks the prompt shares."""
        assert run.hashes is not None
        # The first one is its key, by which it was found.
        return max(1, same_blocks(run.hashes, 0, run.size, hashes, start))

    def _split(self, run: _Run, at: int) -> _Run:
        """Cut a run in two; returns the new head. The old object becomes the tail and keeps its place in the queue."""
        assert run.hashes is not None and run.parent is not None and 0 < at < run.size
        head = _Run(run.parent, run.key, at, min(run.resident, at), run.refs, run.stamp, run.hashes[:at])
        run.parent.children[run.key] = head
        run.parent, run.key = head, run.hashes[at]
        run.hashes = run.hashes[at:]
        run.size -= at
        run.resident -= head.resident
        head.children[run.key] = run
        if run.refs == 0:
            if run.resident == 0:
                self._free.pop(run, None)
                if not run.children:
                    del head.children[run.key]
            if head.resident:
                # Evictable as well, right after its tail: the caller takes it at once, so the place does not matter.
                self._free[head] = None
        return head

    def _take(self, run: _Run) -> None:
        if run.refs == 0:
            self._free.pop(run, None)
        run.refs += 1
        if run.resident < run.size:
            missing = run.size - run.resident
            run.resident = run.size
            self._allocate(missing)

    def _add(self, parent: _Run, hashes: Sequence[int], start: int) -> _Run:
        fresh = _compact(hashes[start:])
        run = _Run(parent, hashes[start], len(fresh), len(fresh), 1, 0, fresh)
        parent.children[run.key] = run
        self._allocate(run.size)
        return run

    def _name(self, run: _Run, hashes: Sequence[int], start: int) -> None:
        assert run.parent is not None
        del run.parent.children[run.key]
        run.hashes = _compact(hashes[start : start + run.size])
        run.owner = None
        run.key = hashes[start]
        run.parent.children[run.key] = run

    def _fold(self, run: _Run) -> _Run:
        """Join the path's private end into one run, so that a trajectory's path stays short over its turns."""
        parent = run.parent
        while (
            parent is not None
            and parent is not self._root
            and len(parent.children) == 1
            and parent.refs == run.refs == 1
            and parent.hashes is not None
            and run.hashes is not None
            and not run.children
        ):
            parent.hashes.extend(run.hashes)
            parent.size += run.size
            parent.resident += run.resident
            parent.children.clear()
            run, parent = parent, parent.parent
        return run

    def _append_unnamed(self, held: _Held, size: int) -> None:
        self._unnamed_key -= 1
        run = _Run(held.leaf, self._unnamed_key, size, size, 1, owner=held.trajectory)
        held.leaf.children[run.key] = run
        self._unnamed[held.trajectory] = run
        held.leaf = run

    def _give(self, run: _Run) -> None:
        run.refs -= 1
        if run.refs == 0:
            self._stamp += 1
            run.stamp = self._stamp
            self._free[run] = None

    def _allocate(self, blocks: int) -> None:
        """Blank blocks first, then evict. May go below zero where the engine would preempt; freed blocks repay it."""
        self._blank -= blocks
        self._settle()

    def _settle(self) -> None:
        while self._blank < 0 and self._free:
            run = next(iter(self._free))
            gone = min(-self._blank, run.resident)
            run.resident -= gone
            self._blank += gone
            self.evicted_blocks += gone
            if run.resident == 0:
                self._drop(run)

    def _drop(self, run: _Run) -> None:
        self._free.pop(run, None)
        if run.owner is not None and self._unnamed.get(run.owner) is run:
            del self._unnamed[run.owner]
        while run.parent is not None and run.refs == 0 and run.resident == 0 and not run.children:
            parent = run.parent
            parent.children.pop(run.key, None)
            run.parent = None
            if parent is self._root:
                break
            run = parent

    def _correct(self, held: _Held, reported_blocks: int) -> None:
        """Fewer hits than predicted: whatever became evictable before the first missing block is gone as well.

        A prompt that stops matching exactly where its generated text begins was rewritten, not evicted.
        """
        if reported_blocks >= held.cached_blocks:
            return
        if reported_blocks == held.named_blocks:
            self.divergences += 1
            return
        stamp = next((s for start, s in reversed(held.stamps) if start <= reported_blocks), 0)
        self.frontier_corrections += 1
        while self._free:
            run = next(iter(self._free))
            if run.stamp >= stamp:
                break
            self._blank += run.resident
            run.resident = 0
            self._drop(run)

    def _depth(self, run: _Run) -> int:
        depth = 0
        node: _Run | None = run
        while node is not None:
            depth += node.size
            node = node.parent
        return depth


def _compact(hashes: Sequence[int]) -> array[int]:
    try:
        return array("q", hashes)
    except OverflowError:
        # Not hashes of ours, which fit; they must not stop a rollout.
        return array("q", (h & _MASK for h in hashes))


def _ceil(tokens: int, size: int) -> int:
    return -(-tokens // size)
