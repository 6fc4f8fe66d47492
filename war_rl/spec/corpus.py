# SPDX-License-Identifier: Apache-2.0
"""Which text a replica keeps for drafting, what enters it and what leaves it, and in slices of what size."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from war_rl.spec.index import SuffixIndex, open_index
from war_rl.types import FeedItem, GroupId, TokenArray, TrajectoryId

IndexFactory = Callable[[int], SuffixIndex]
"""Makes an index that stays below a number of bytes."""

CHUNK_TOKENS = 128
"""Most tokens taken in between two looks at the clock, about 0.1 ms: how far a slice can overrun its time."""
CHUNK_PAGES = 64
"""Most pages given back between two looks at the clock."""
FEW_TOKENS = 64
"""So much of a running request's text is taken in even when the time is up: what one engine step commits."""
RESERVE_TOKENS = 2048
"""Room that eviction keeps free."""

Name = TrajectoryId | str
"""A trajectory, or an anonymous request's key."""


class Entry:
    """One trajectory's text.

    Attributes:
        slot: where the index keeps it.
        base: position in the trajectory of the slot's first token; not 0 when the feed lost what came before.
        length: position in the trajectory up to which the text is here.
        request: key of the engine request that runs it now, "" between turns.
    """

    __slots__ = ("base", "length", "name", "request", "slot", "step")

    def __init__(self, name: Name, slot: int, step: int, base: int = 0) -> None:
        self.name = name
        self.slot = slot
        self.step = step
        self.base = base
        self.length = base
        self.request = ""


class Corpus:
    """All text of one replica, within a hard bound of bytes.

    Args:
        memory_bytes: the bound; the oldest step leaves first.
        window_steps: how many past steps' text stays draftable.
        clock: monotonic seconds, only for slicing.
        index_factory: makes the index.
    """

    def __init__(
        self,
        memory_bytes: int,
        window_steps: int,
        clock: Callable[[], float],
        index_factory: IndexFactory | None = None,
    ) -> None:
        self.index: SuffixIndex = (index_factory or open_index)(memory_bytes)
        self._window_steps = window_steps
        self._clock = clock
        self._slice = 0.0
        self._step = 0
        self._entries: dict[Name, Entry] = {}
        self._by_step: dict[int, dict[Name, Entry]] = {}
        self._ran_here: set[int] = set()
        self._groups: dict[GroupId, int] = {}
        self._next_group = 1
        self._queue: deque[FeedItem] = deque()
        self._queued_tokens = 0
        self._to_publish: deque[int] = deque()
        self._publishing: set[int] = set()
        self._to_drop: deque[int] = deque()
        self.counts: dict[str, float] = dict.fromkeys(
            ("rebuilds", "feed_gaps", "feed_items", "feed_tokens", "feed_stale_items", "evicted_trajectories"), 0
        )
        self.counts.update(dropped_tokens=0, ingest_max_s=0.0, feed_lag_s=0.0)

    # -- running requests ---------------------------------------------------------------------------------------

    def enter(self, key: str, trajectory: TrajectoryId | None, tokens: TokenArray) -> Entry:
        """A request starts (or a trajectory's next turn): what is here already must be a prefix of its tokens [n].

        Raises:
            MemoryError: the bound is so low that the running requests fill it.
        """
        name: Name = trajectory if trajectory is not None else key
        entry = self._entries.get(name)
        if entry is not None and entry.request:
            # Two turns of one trajectory at once: the second one's text is kept apart, and for as long as it runs.
            name, entry = key, self._entries.get(key)
        if entry is not None and entry.base:
            self._leave(entry)
            entry = None
        if entry is None:
            entry = self._open(name, trajectory)
        entry.request = key
        self._ran_here.add(entry.slot)
        self._verify(entry, tokens)
        return entry

    def _verify(self, entry: Entry, tokens: TokenArray) -> None:
        here = self.index.read(entry.slot)
        n = min(len(here), len(tokens))
        differing = np.flatnonzero(here[:n] != tokens[:n])
        common = int(differing[0]) if len(differing) else n
        if common < len(here):
            self.counts["rebuilds"] += 1
            self.index.truncate(entry.slot, common)
            entry.length = common

    def extend(self, entry: Entry, tokens: TokenArray, until: float) -> bool:
        """Take in a running request's tokens [n] beyond what is here; long text in slices.

        Returns:
            True when everything is here; False when the time is up (call again with the next step) or memory is full.
        """
        missing = len(tokens) - entry.length
        if missing < 0:
            self._verify(entry, tokens)
            missing = len(tokens) - entry.length
        while missing > 0:
            if missing > FEW_TOKENS and self._spent(until):
                return False
            if not self._append(entry, tokens[entry.length : entry.length + CHUNK_TOKENS]):
                return False
            missing = len(tokens) - entry.length
        return True

    def _spent(self, until: float) -> bool:
        """Is the slice that ends at ``until`` used up? Never before its first piece: a short slice moves too."""
        first, self._slice = until != self._slice, until
        return not first and self._clock() >= until

    def leave(self, entry: Entry) -> None:
        """The request left the engine: a trajectory's text stays for its next turn, published; other text goes."""
        entry.request = ""
        if isinstance(entry.name, TrajectoryId):
            self._publish(entry)
        else:
            self._leave(entry)

    # -- entries ------------------------------------------------------------------------------------------------

    def _open(self, name: Name, trajectory: TrajectoryId | None, base: int = 0) -> Entry:
        step = trajectory.step if trajectory is not None else self._step
        scope = scope_of(trajectory if trajectory is not None else name)
        slot = self._slot(scope, self._group(trajectory.group) if trajectory is not None else 0)
        entry = Entry(name, slot, step, base)
        self._ran_here.discard(slot)
        self._entries[name] = entry
        self._by_step.setdefault(step, {})[name] = entry
        return entry

    def _slot(self, scope: int, group: int) -> int:
        """A slot, evicting for it where need be. Raises MemoryError when running requests hold them all."""
        while True:
            try:
                return self.index.open(scope, group)
            except MemoryError:
                oldest = None if self._to_drop else self._oldest()
                if oldest is not None:
                    self.counts["evicted_trajectories"] += 1
                    self._leave(oldest)
                elif not self._to_drop:
                    raise
                self._drop_some()

    def _group(self, group: GroupId) -> int:
        number = self._groups.get(group)
        if number is None:
            number = self._groups[group] = self._next_group
            self._next_group = self._next_group % 0x7FFFFFFF + 1
        return number

    def _leave(self, entry: Entry) -> None:
        """Forget an entry; its pages go back piece by piece."""
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
        of_step = self._by_step.get(entry.step, {})
        if of_step.get(entry.name) is entry:
            del of_step[entry.name]
            if not of_step:
                del self._by_step[entry.step]
        self._to_drop.append(entry.slot)

    def _append(self, entry: Entry, tokens: TokenArray) -> int:
        if self.index.free_tokens() < RESERVE_TOKENS:
            self._make_room(entry)
        took = self.index.append(entry.slot, tokens)
        entry.length += took
        if took < len(tokens):
            self.counts["dropped_tokens"] += len(tokens) - took
        return took

    def _make_room(self, growing: Entry) -> None:
        """Give pages back until the reserve is free, oldest step first; running text and what is growing stay."""
        while self.index.free_tokens() < RESERVE_TOKENS:
            if self._to_drop:
                self._drop_some()
                continue
            oldest = self._oldest(growing)
            if oldest is None:
                return
            self.counts["evicted_trajectories"] += 1
            self._leave(oldest)

    def _oldest(self, growing: Entry | None = None) -> Entry | None:
        for step in sorted(self._by_step):
            for entry in self._by_step[step].values():
                if not entry.request and entry is not growing:
                    return entry
        return None

    def _drop_some(self) -> None:
        slot = self._to_drop[0]
        if not self.index.drop(slot, CHUNK_PAGES):
            self._to_drop.popleft()
            self._publishing.discard(slot)

    def _publish(self, entry: Entry) -> None:
        if entry.slot not in self._publishing:
            self._publishing.add(entry.slot)
            self._to_publish.append(entry.slot)

    # -- feed ---------------------------------------------------------------------------------------------------

    def feed(self, items: Iterable[FeedItem]) -> None:
        """Queue text; cheap."""
        for item in items:
            self._queue.append(item)
            self._queued_tokens += len(item.tokens)

    def pending(self) -> int:
        """Tokens that wait to be taken in."""
        return self._queued_tokens

    def ingest(self, until: float, unix_time: Callable[[], float] | None = None) -> bool:
        """Housekeeping, evictions, publishing and the feed, until the clock says ``until``; True if more is waiting.

        One small piece is done even when the time is up: where running requests use up every slice, the feed still
        comes in.
        """
        start = now = self._clock()
        while self._work(unix_time):
            now = self._clock()
            if now >= until:
                break
        self.counts["ingest_max_s"] = max(self.counts["ingest_max_s"], now - start)
        return bool(self._queue or self._to_drop or self._to_publish)

    def _work(self, unix_time: Callable[[], float] | None) -> bool:
        """One small piece of work; False if there was none."""
        if self.index.maintain():
            return True
        if self._to_drop:
            self._drop_some()
        elif self._to_publish:
            self._publish_some()
        elif self._queue:
            self._take(self._queue.popleft(), unix_time)
        else:
            return False
        return True

    def _publish_some(self) -> None:
        slot = self._to_publish[0]
        if slot not in self._publishing or not self.index.publish(slot, CHUNK_TOKENS):
            self._to_publish.popleft()
            self._publishing.discard(slot)

    def _take(self, item: FeedItem, unix_time: Callable[[], float] | None) -> None:
        """A chunk of a feed item; the rest returns to the queue's front. Each position of a trajectory enters once."""
        head, rest = item.tokens[:CHUNK_TOKENS], item.tokens[CHUNK_TOKENS:]
        self._queued_tokens -= len(head)
        if item.trajectory.step < self._step - self._window_steps:
            self._queued_tokens -= len(rest)
            self.counts["feed_stale_items"] += 1
            return
        self._join(item.trajectory, item.start, head)
        if len(rest):
            self._queue.appendleft(FeedItem(item.trajectory, item.start + len(head), rest, item.final, item.sent))
            return
        self.counts["feed_items"] += 1
        if unix_time is not None and item.sent:
            self.counts["feed_lag_s"] = max(0.0, unix_time() - item.sent)

    def _join(self, trajectory: TrajectoryId, start: int, tokens: TokenArray) -> None:
        entry = self._entries.get(trajectory)
        if entry is not None and entry.request:
            return  # It runs here: its text comes from the engine, sooner.
        if entry is not None and start > entry.length:
            self.counts["feed_gaps"] += 1
            self._orphan(entry)
            entry = None
        if entry is None:
            try:
                entry = self._open(trajectory, trajectory, start)
            except MemoryError:
                self.counts["dropped_tokens"] += len(tokens)
                return
        fresh = tokens[entry.length - start :]
        if len(fresh):
            self.counts["feed_tokens"] += self._append(entry, fresh)
            self._publish(entry)

    def _orphan(self, entry: Entry) -> None:
        """Keep the text before a hole draftable under a name of its own."""
        name = f"hole:{entry.slot}:{self._next_group}"
        self._next_group += 1
        del self._entries[entry.name]
        del self._by_step[entry.step][entry.name]
        entry.name = name
        self._entries[name] = entry
        self._by_step[entry.step][name] = entry

    # -- policy updates -----------------------------------------------------------------------------------------

    def forget_group(self, group: GroupId) -> None:
        """The group was dropped: its text leaves (its pages piece by piece), what waits of it in the feed too."""
        for entry in [e for n, e in self._entries.items() if isinstance(n, TrajectoryId) and n.group == group]:
            self._leave(entry)
        self._groups.pop(group, None)
        kept = [i for i in self._queue if i.trajectory.group != group]
        self._queued_tokens -= sum(len(i.tokens) for i in self._queue) - sum(len(i.tokens) for i in kept)
        self._queue = deque(kept)

    def begin_step(self, step: int) -> None:
        """Text of steps older than the window leaves; everything else stays."""
        self._step = max(self._step, step)
        for old in [s for s in self._by_step if s < self._step - self._window_steps]:
            for entry in list(self._by_step[old].values()):
                self._leave(entry)
        for group in [g for g in self._groups if g.step < self._step - self._window_steps]:
            del self._groups[group]

    # -- looks --------------------------------------------------------------------------------------------------

    @property
    def trees(self) -> int:
        """Trajectories and anonymous requests whose text is here."""
        return len(self._entries)

    def was_fed(self, slot: int) -> bool:
        """Whether all of a slot's text came from another replica."""
        return slot not in self._ran_here

    def gauges(self) -> dict[str, float]:
        """Counters and present sizes."""
        return {**self.counts, "bytes": self.index.nbytes(), "live_trees": self.trees, "feed_pending": self.pending()}


def scope_of(name: Name) -> int:
    """Texts that share a scope are siblings: by the dataset's index where there is one, so that an earlier epoch's
    text of the same prompt counts, else by group. Training and validation text of a prompt keep apart."""
    if isinstance(name, TrajectoryId):
        text = f"{name.validate}:{name.index}" if name.index else f"{name.validate}:{name.step}:{name.uid}"
    else:
        text = f"anonymous:{name}"
    # 0 and 1 salt other tables.
    return (zlib.crc32(text.encode()) & 0x7FFFFFFF) | 2
