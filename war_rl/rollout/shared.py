# SPDX-License-Identifier: Apache-2.0
"""What the first prompts of the groups on one replica have in common, so that it is promised once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from war_rl.rollout.blocks import same_blocks
from war_rl.types import GroupId


@dataclass(slots=True, eq=False)
class _Stem:
    """Consecutive blocks that the same groups have claimed: ``size`` of ``hashes``, from ``start``.

    ``claims`` counts those groups, ``running`` those of them with a running turn.
    """

    parent: _Stem | None
    hashes: Sequence[int]
    start: int
    size: int
    claims: int = 0
    running: int = 0
    children: dict[int, _Stem] = field(default_factory=dict)


@dataclass(slots=True)
class _Claim:
    """One group's first prompt on a replica. Lengths in tokens."""

    hashes: Sequence[int]
    stem: _Stem
    """The last of those that hold its blocks."""
    covered: int
    members: int = 1
    running: int = 0


class SharedPrompts:
    """Prompt blocks that the groups on one replica have in common are promised once.

    The first prompt of a group is claimed while a member lives there. Hashes are chained, so what a prompt shares with
    the claimed ones is a prefix, and the claimed ones are a tree.
    """

    def __init__(self, block_size: int) -> None:
        self._block = block_size
        self._root = _Stem(None, (), 0, 0)
        self._groups: dict[GroupId, _Claim] = {}
        self.tokens = 0
        """Tokens of all distinct claimed blocks."""
        self.busy = 0
        """Those of them that the groups with a running turn keep in the cache."""

    def covered(self, group: GroupId, hashes: Sequence[int], tokens: int) -> int | None:
        """Tokens of a member's first prompt that the group's claim pays for; None without a claim."""
        known = self._groups.get(group)
        if known is None:
            return None
        if not known.hashes or not hashes:
            # Without hashes on both sides, the members of a group are taken at their word: one prompt.
            return min(known.covered, tokens)
        return same_blocks(known.hashes, 0, len(known.hashes), hashes, 0) * self._block

    def members(self, group: GroupId) -> int:
        """How many of the group live there."""
        claim = self._groups.get(group)
        return claim.members if claim is not None else 0

    def price(self, group: GroupId, hashes: Sequence[int], tokens: int) -> int:
        """Tokens that claiming this first prompt would add. Changes nothing."""
        if group in self._groups:
            return 0
        if not hashes:
            return tokens
        return (len(hashes) - self._known(hashes, 0)) * self._block

    def claim(self, group: GroupId, hashes: Sequence[int], tokens: int) -> int:
        """One more member. Returns the tokens of its first prompt that are paid for by the claim."""
        covered = self.covered(group, hashes, tokens)
        if covered is not None:
            self._groups[group].members += 1
            return covered
        stem, added = self._grow(hashes)
        self.tokens += added * self._block if hashes else tokens
        covered = len(hashes) * self._block if hashes else tokens
        self._groups[group] = _Claim(hashes, stem, covered)
        return covered

    def unclaim(self, group: GroupId) -> None:
        """One member less."""
        claim = self._groups[group]
        claim.members -= 1
        if claim.members:
            return
        del self._groups[group]
        if not claim.hashes:
            self.tokens -= claim.covered
        stem = claim.stem
        while stem.parent is not None:
            stem.claims -= 1
            if not stem.claims:
                self.tokens -= stem.size * self._block
                del stem.parent.children[stem.hashes[stem.start]]
            stem = stem.parent

    def begin(self, group: GroupId) -> None:
        """A turn of a member starts to run."""
        claim = self._groups[group]
        claim.running += 1
        if claim.running == 1:
            self._use(claim, 1)

    def end(self, group: GroupId) -> None:
        """A turn of a member runs no more."""
        claim = self._groups[group]
        claim.running -= 1
        if claim.running == 0:
            self._use(claim, -1)

    def in_use(self, group: GroupId, hashes: Sequence[int], tokens: int) -> int:
        """:attr:`busy` if a turn of ``group`` ran too, whose first prompt this is."""
        claim = self._groups.get(group)
        if claim is not None:
            if claim.running:
                return self.busy
            hashes, tokens = claim.hashes, claim.covered
        if not hashes:
            return self.busy + tokens
        return self.busy + (len(hashes) - self._known(hashes, 1)) * self._block

    def _use(self, claim: _Claim, change: int) -> None:
        stem, edge = claim.stem, max(change, 0)
        if not claim.hashes:
            self.busy += change * claim.covered
        while stem.parent is not None:
            stem.running += change
            if stem.running == edge:
                self.busy += change * stem.size * self._block
            stem = stem.parent

    def _known(self, hashes: Sequence[int], running: int) -> int:
        """How many of the blocks are claimed by groups of which at least ``running`` run."""
        known, stem = 0, self._root
        while known < len(hashes):
            child = stem.children.get(hashes[known])
            if child is None or child.running < running:
                break
            same = same_blocks(child.hashes, child.start, child.size, hashes, known)
            known, stem = known + same, child
            if same < child.size:
                break
        return known

    def _grow(self, hashes: Sequence[int]) -> tuple[_Stem, int]:
        """One more claim on each of these blocks. Returns the last one's stem, and how many were not there."""
        known, stem = 0, self._root
        while known < len(hashes):
            child = stem.children.get(hashes[known])
            if child is None:
                break
            same = same_blocks(child.hashes, child.start, child.size, hashes, known)
            if same < child.size:
                child = self._split(child, same)
            child.claims += 1
            known, stem = known + same, child
        added = len(hashes) - known
        if added:
            fresh = _Stem(stem, hashes, known, added, 1)
            stem.children[hashes[known]] = fresh
            stem = fresh
        return stem, added

    @staticmethod
    def _split(stem: _Stem, at: int) -> _Stem:
        """Cut a stem in two; returns the new head. The old object is the tail: claims that end there still do."""
        assert stem.parent is not None
        key = stem.hashes[stem.start]
        head = _Stem(stem.parent, stem.hashes, stem.start, at, stem.claims, stem.running)
        stem.parent.children[key] = head
        stem.parent, stem.start, stem.size = head, stem.start + at, stem.size - at
        head.children[stem.hashes[stem.start]] = stem
        return head
