# SPDX-License-Identifier: Apache-2.0
"""An index over text that answers: after this context, which tokens followed before?

Text is kept in *slots* that grow at their end, one per trajectory. A slot belongs to a *scope* (texts of the same
prompt) and a *group* within it; its text is findable within its scope at once, and by every slot once published.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from war_rl.spec import kernels
from war_rl.spec.kernels import ORDERS, PAGE, SCOPES, Floats, Heads, Ints, Longs, State
from war_rl.types import TokenArray

TABLES = SCOPES * ORDERS
PAGE_BYTES = PAGE * 4 * (1 + TABLES) + 20
HEADS_PER_TOKEN_BYTES = 8 * TABLES
"""Upper end of the head tables' share: three buckets in memory for one and a half tokens while they grow."""
FIRST_HEADS = 1 << 12
MIGRATE_BUCKETS = 1024
"""Buckets of each table moved to a grown table at a time."""
TOUCH_BUCKETS = 1 << 13
"""Buckets of new memory touched at a time: eight pages of the system. Each is zeroed first, in 5 to 20 us."""
RELEASE_BYTES = 1 << 20
"""Old memory given back to the system at a time: freeing a large table at once would stall a step for milliseconds."""


@dataclass(slots=True)
class Predictions:
    """What may follow each of R requests. D is the longest prediction.

    Attributes:
        tokens: int32 [R, D].
        info: int64 [R, D, kernels.INFO], the calibration cells (3), source, match length, origin slot and the weights'
            rows (4) of each token.
        probs: float64 [R, D], calibrated chance of each token given the ones before it.
        counts: int64 [R], how many of the D are there.
        links: int64 [R], occurrences looked at: the work that was done.
    """

    tokens: Ints
    info: Longs
    probs: Floats
    counts: Longs
    links: Longs


class SuffixIndex(Protocol):
    """What the corpus needs from an index. Slots are non-negative integers."""

    def open(self, scope: int, group: int) -> int:
        """A new empty slot. ``scope`` and ``group`` are any 31-bit numbers. Raises MemoryError when slots ran out."""

    def append(self, slot: int, tokens: TokenArray) -> int:
        """Add int32 tokens [m] at the slot's end; returns how many found room."""

    def publish(self, slot: int, tokens: int) -> bool:
        """Make up to so many more of the slot's tokens findable by every slot; True if more is left."""

    def truncate(self, slot: int, length: int) -> None:
        """Forget what the slot holds beyond ``length`` tokens."""

    def drop(self, slot: int, pages: int) -> bool:
        """Give back up to so many pages of a slot; True if more is left, else the slot is gone."""

    def length(self, slot: int) -> int:
        """Tokens in the slot."""

    def read(self, slot: int) -> TokenArray:
        """The slot's tokens, as a copy [n]."""

    def predict(
        self, slots: list[int], limits: list[int], cells: Floats, stops: Longs, floor: float, depth: int
    ) -> Predictions:
        """Predict after each slot's end at most limits[i] <= depth tokens, see :func:`kernels.predict_one`."""

    def maintain(self) -> bool:
        """One small piece of housekeeping; True if more is due."""

    def free_tokens(self) -> int:
        """Room left, in tokens of whole free pages."""

    def nbytes(self) -> int:
        """Bytes in use."""


class _Memory:
    """Zeroed memory that goes back to the system piece by piece."""

    def __init__(self, size: int = 0) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if size else None
        self._released = 0
        if self._map is not None and hasattr(mmap, "MADV_NOHUGEPAGE"):
            # The kernel may look for 2 MiB in one piece when such memory is first touched: stalls of 7 ms were seen,
            # of 1.9 ms without. numpy asks for huge pages on its own.
            with contextlib.suppress(OSError):  # a kernel that knows none
                self._map.madvise(mmap.MADV_NOHUGEPAGE)

    @property
    def nbytes(self) -> int:
        """Bytes not yet given back."""
        return 0 if self._map is None else len(self._map) - self._released

    def array(self, shape: tuple[int, ...]) -> Ints:
        """The memory as an int32 array. It must not be used any more once its release has begun."""
        assert self._map is not None
        return np.frombuffer(self._map, np.int32).reshape(shape)

    def release(self, most: int) -> bool:
        """Give up to so many bytes back; False when there was nothing left to give."""
        if self._map is None:
            return False
        size = min(most, len(self._map) - self._released)
        if size:
            self._map.madvise(mmap.MADV_DONTNEED, self._released, size)
            self._released += size
            return True
        self._map = None
        return False


class PagedIndex:
    """Hashed contexts over paged text (see kernels.py): constant-time append, removal in pages, no rebuilding.

    Args:
        max_bytes: hard bound of everything the index holds.
    """

    def __init__(self, max_bytes: int) -> None:
        pages = max(4, int(max_bytes) // (PAGE_BYTES + PAGE * HEADS_PER_TOKEN_BYTES + 40))
        pages = min(pages, (1 << 31) // PAGE - 1)
        self._pages = pages
        # Zeroed memory is only taken from the system when it is first used.
        self._state = State(
            text=_Memory(4 * pages * PAGE).array((pages * PAGE,)),
            chain=_Memory(4 * pages * PAGE * TABLES).array((pages * PAGE, TABLES)),
            page_slot=np.full(pages, -1, np.int32),
            page_fill=np.zeros(pages, np.int32),
            page_prev=np.zeros(pages, np.int32),
            page_next=np.zeros(pages, np.int32),
            slot_last=np.zeros(pages, np.int32),
            slot_scope=np.zeros(pages, np.int64),
            slot_group=np.zeros(pages, np.int64),
            slot_first=np.zeros(pages, np.int32),
        )
        first = np.zeros((TABLES, FIRST_HEADS), np.int32)
        self._heads = Heads(first, first)
        self._migrated = 0
        self._next_heads: Ints | None = None
        self._touched = 0
        self._spare = _Memory()
        self._memory = _Memory()
        self._leaving = _Memory()
        self._free = np.zeros(pages + 1, np.int32)
        self._free[1:pages] = np.arange(pages - 1, 0, -1)
        self._free[0] = pages - 1
        self._free_slots = list(range(pages - 1, -1, -1))
        self._lengths: dict[int, int] = {}
        self._published: dict[int, tuple[int, int, int]] = {}
        self._tokens = 0

    def open(self, scope: int, group: int) -> int:
        if not self._free_slots:
            raise MemoryError("the index has no free slot")
        slot = self._free_slots.pop()
        self._state.slot_last[slot] = 0
        self._state.slot_first[slot] = 0
        self._state.slot_scope[slot] = scope
        self._state.slot_group[slot] = group
        self._lengths[slot] = 0
        self._published[slot] = (0, 0, 0)
        return slot

    def append(self, slot: int, tokens: TokenArray) -> int:
        if tokens.dtype != np.int32 or not (tokens.flags.c_contiguous and tokens.flags.writeable):
            # Another array type would compile another kernel, in the middle of an engine step.
            tokens = np.array(tokens, np.int32)
        entered = int(kernels.append(self._state, self._heads, slot, tokens, 0, False, self._free))
        self._lengths[slot] += entered
        self._tokens += entered
        return entered

    def publish(self, slot: int, tokens: int) -> bool:
        page, offset, done = self._published[slot]
        tokens = min(tokens, self._lengths[slot] - done)
        if tokens <= 0:
            return False
        page = page or int(self._state.slot_first[slot])
        page, offset = kernels.publish(self._state, self._heads, page, offset, tokens)
        self._published[slot] = (int(page), int(offset), done + tokens)
        return done + tokens < self._lengths[slot]

    def truncate(self, slot: int, length: int) -> None:
        excess = self._lengths[slot] - length
        if excess <= 0:
            return
        state = self._state
        while excess > 0:
            fill = int(state.page_fill[state.slot_last[slot]])
            if excess < fill:
                state.page_fill[state.slot_last[slot]] = fill - excess
                excess = 0
            else:
                kernels.drop(state, slot, self._free, 1)
                excess -= fill
        if not int(state.slot_last[slot]):
            state.slot_first[slot] = 0
        self._tokens -= self._lengths[slot] - length
        self._lengths[slot] = length
        if self._published[slot][2] > length:
            page = int(state.slot_last[slot])
            self._published[slot] = (page, int(state.page_fill[page]) if page else 0, length)

    def drop(self, slot: int, pages: int) -> bool:
        if kernels.drop(self._state, slot, self._free, pages):
            return True
        self._tokens -= self._lengths.pop(slot)
        del self._published[slot]
        self._free_slots.append(slot)
        return False

    def length(self, slot: int) -> int:
        return self._lengths[slot]

    def read(self, slot: int) -> TokenArray:
        state, parts = self._state, []
        page = int(state.slot_last[slot])
        while page:
            parts.append(state.text[page * PAGE : page * PAGE + int(state.page_fill[page])])
            page = int(state.page_prev[page])
        return np.concatenate(parts[::-1]) if parts else np.zeros(0, np.int32)

    def predict(
        self, slots: list[int], limits: list[int], cells: Floats, stops: Longs, floor: float, depth: int
    ) -> Predictions:
        rows = len(slots)
        found = Predictions(
            np.zeros((rows, depth), np.int32),
            np.zeros((rows, depth, kernels.INFO), np.int64),
            np.zeros((rows, depth), np.float64),
            np.zeros(rows, np.int64),
            np.zeros(rows, np.int64),
        )
        kernels.predict(
            self._state,
            self._heads,
            np.array(slots, np.int64),
            np.array(limits, np.int64),
            cells,
            stops,
            floor,
            found.tokens,
            found.info,
            found.probs,
            found.counts,
            found.links,
        )
        return found

    def longest_right(self, slot: int, truth: TokenArray) -> int:
        """How much of ``truth`` [m] the best occurrence found after the slot's end gets right; for the oracle."""
        return int(kernels.longest_right(self._state, self._heads, slot, truth))

    def maintain(self) -> bool:
        """Grow the heads when they are full: get memory, touch it, switch, move the old buckets, give the old memory
        back, all in small pieces.

        The system zeroes memory when it is first touched; done at once for a large table that would stall a step.
        """
        if self._leaving.release(RELEASE_BYTES):
            return True
        heads = self._heads
        size = heads.new.shape[1]
        if heads.new is not heads.old:
            kernels.migrate(heads, self._migrated, MIGRATE_BUCKETS)
            self._migrated += MIGRATE_BUCKETS
            if self._migrated >= heads.old.shape[1]:
                self._heads = Heads(heads.new, heads.new)
                self._leaving, self._memory, self._spare = self._memory, self._spare, _Memory()
            return True
        if self._next_heads is None:
            if self._tokens < size + size // 2:
                return False
            self._spare = _Memory(TABLES * 2 * size * 4)
            self._next_heads = self._spare.array((TABLES, 2 * size))
            self._touched = 0
        if self._touched < self._next_heads.size:
            self._next_heads.reshape(-1)[self._touched : self._touched + TOUCH_BUCKETS] = 0
            self._touched += TOUCH_BUCKETS
            return True
        if self._tokens <= 2 * size:
            return False
        self._heads, self._next_heads, self._migrated = Heads(self._next_heads, heads.new), None, 0
        return True

    def free_tokens(self) -> int:
        return int(self._free[0]) * PAGE

    def nbytes(self) -> int:
        used = self._pages - 1 - int(self._free[0])
        heads = self._heads.new.nbytes + (self._heads.old.nbytes if self._heads.old is not self._heads.new else 0)
        heads += self._next_heads.nbytes if self._next_heads is not None else 0
        heads += self._leaving.nbytes
        return used * PAGE_BYTES + heads + 40 * self._pages


class ReferenceIndex:
    """What an index may say, written down as plainly as possible; slow, for tests. Only the text side of the protocol.

    A *visible* text for a slot is one of its scope, or a published part of any other.
    """

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        self._scopes: dict[int, int] = {}
        self._published: dict[int, int] = {}

    def open(self, slot: int, scope: int) -> None:
        """A new empty slot under the number the real index gave it."""
        self._texts[slot], self._scopes[slot], self._published[slot] = [], scope, 0

    def append(self, slot: int, tokens: TokenArray) -> None:
        self._texts[slot].extend(int(t) for t in tokens)

    def publish(self, slot: int, tokens: int) -> None:
        self._published[slot] = min(len(self._texts[slot]), self._published[slot] + tokens)

    def truncate(self, slot: int, length: int) -> None:
        del self._texts[slot][length:]
        self._published[slot] = min(self._published[slot], len(self._texts[slot]))

    def drop(self, slot: int) -> None:
        del self._texts[slot], self._scopes[slot], self._published[slot]

    def read(self, slot: int) -> list[int]:
        return list(self._texts[slot])

    def followers(self, slot: int, context: list[int]) -> dict[int, int]:
        """Every token that follows a suffix of ``context`` in a visible text, with the longest such suffix's length."""
        found: dict[int, int] = {}
        for other, text in self._texts.items():
            same = self._scopes[other] == self._scopes[slot]
            for end in range(1, len(text) if same else min(len(text), self._published[other] + 1)):
                match = 0
                while match < min(end, len(context)) and text[end - 1 - match] == context[-1 - match]:
                    match += 1
                if match and end < len(text):
                    found[text[end]] = max(found.get(text[end], 0), match)
        return found


def open_index(max_bytes: int) -> SuffixIndex:
    """The index used in production."""
    return PagedIndex(max_bytes)
