# SPDX-License-Identifier: Apache-2.0
"""Claims of first prompts against a count of every block."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from war_rl.rollout.shared import SharedPrompts
from war_rl.types import GroupId

BLOCK = 16


def prompt(path):
    """Chained: a block's hash tells all before it."""
    hashes, parent = [], 0
    for word in path:
        parent = hash((parent, word)) & ((1 << 63) - 1)
        hashes.append(parent)
    return tuple(hashes)


PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=4).map(prompt)
KINDS = ("claim", "claim", "unclaim", "begin", "begin", "end", "ask")
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2), PROMPTS), min_size=8, max_size=40)


class Book:
    """Every claim by itself, every block counted anew."""

    def __init__(self):
        self.claims = {}
        self.members = Counter()
        self.running = Counter()

    def tokens(self, groups):
        blocks = {h for g in groups for h in self.claims[g][0]}
        return len(blocks) * BLOCK + sum(covered for g in groups for h, covered in [self.claims[g]] if not h)

    @property
    def busy(self):
        return [g for g in self.claims if self.running[g]]

    def with_prompt(self, groups, hashes, tokens):
        """Tokens of these groups and one prompt more."""
        if not hashes:
            return self.tokens(groups) + tokens
        known = {h for g in groups for h in self.claims[g][0]}
        return self.tokens(groups) + len(set(hashes) - known) * BLOCK


@settings(max_examples=400)
@given(EVENTS)
def test_claims_and_what_runs_of_them_are_as_if_each_block_was_counted(events):
    shared, book = SharedPrompts(BLOCK), Book()
    for kind, number, hashes in events:
        group, tokens = GroupId(f"g{number}", 1), len(hashes) * BLOCK + 5
        known = book.claims.get(group)
        if kind == "ask":
            price = 0 if known else book.with_prompt(book.claims, hashes, tokens) - book.tokens(book.claims)
            assert shared.price(group, hashes, tokens) == price
            asked = known or (hashes, tokens)
            expected = book.tokens(book.busy) if group in book.busy else book.with_prompt(book.busy, *asked)
            assert shared.in_use(group, hashes, tokens) == expected
        elif kind == "claim":
            covered = shared.claim(group, hashes, tokens)
            book.members[group] += 1
            if known is None:
                book.claims[group] = (hashes, len(hashes) * BLOCK if hashes else tokens)
                assert covered == book.claims[group][1]
            elif known[0] and hashes:
                assert covered == sum(1 for a, b in zip(known[0], hashes, strict=False) if a == b) * BLOCK
            else:
                assert covered == min(known[1], tokens)
        elif kind == "begin" and known:
            shared.begin(group)
            book.running[group] += 1
        elif kind == "end" and book.running[group]:
            shared.end(group)
            book.running[group] -= 1
        elif kind == "unclaim" and known and (book.members[group] > 1 or not book.running[group]):
            shared.unclaim(group)
            book.members[group] -= 1
            if not book.members[group]:
                del book.claims[group]
        assert shared.tokens == book.tokens(book.claims)
        assert shared.busy == book.tokens(book.busy)


def test_who_shares_with_a_running_group_adds_only_the_rest():
    shared = SharedPrompts(BLOCK)
    first, second, third = GroupId("a", 1), GroupId("b", 1), GroupId("c", 1)
    shared.claim(first, prompt([7] * 4 + [1, 1]), 100)
    shared.claim(second, prompt([7] * 4 + [2]), 100)
    assert shared.tokens == 7 * BLOCK and shared.busy == 0
    shared.begin(first)
    assert shared.busy == 6 * BLOCK
    assert shared.in_use(second, prompt([7] * 4 + [2]), 100) == 7 * BLOCK
    assert shared.in_use(third, prompt([7] * 4 + [3, 3]), 100) == 8 * BLOCK
    shared.end(first)
    assert shared.busy == 0 and shared.in_use(third, prompt([7] * 4), 64) == 4 * BLOCK


def test_the_last_member_takes_its_claim_along_and_leaves_the_others_theirs():
    shared = SharedPrompts(BLOCK)
    first, second = GroupId("a", 1), GroupId("b", 1)
    shared.claim(first, prompt([7, 1]), 40)
    shared.claim(second, prompt([7, 2]), 40)
    shared.begin(second)
    shared.unclaim(first)
    assert shared.tokens == shared.busy == 2 * BLOCK
    with pytest.raises(KeyError):
        shared.unclaim(first)
