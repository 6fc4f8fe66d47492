# SPDX-License-Identifier: Apache-2.0
"""The inner loops of the index: plain Python over numpy arrays, compiled by numba where it is installed.

vLLM depends on numba, so in an engine they are compiled; without it they give the same answers, slowly.

Layout. Text lives in pages of ``PAGE`` tokens; a *slot* (one trajectory) owns a linked list of pages, so its text is
contiguous within a page and may grow at its end while other slots grow too. A *position* is page * PAGE + offset;
page 0 stays empty, so position 0 means none. For every position and order k the k tokens that end there are hashed,
together with a scope (the prompt's, or the whole workload's), into a table of heads; ``chain`` links a position to the
previous one in its bucket. Nothing found through a bucket is believed before its tokens have been compared, so stale
heads, hash collisions and pages that were given to other text can cost time but never a wrong match.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

try:  # pragma: no cover - depends on the installation
    from numba import njit  # type: ignore[import-untyped,unused-ignore]

    COMPILED = True

    def kernel(function: F) -> F:
        compiled: F = njit(cache=True, nogil=True)(function)
        return compiled

except ImportError:  # pragma: no cover
    COMPILED = False

    def kernel(function: F) -> F:
        return function


SHIFT = 8
PAGE = 1 << SHIFT
"""Tokens in a page."""
OFFSET = PAGE - 1
ORDERS = 5
"""How many context lengths are hashed."""
ORDER_LENGTHS = (1, 2, 3, 5, 9)
"""The context lengths that are hashed, in tokens; longer matches are found by comparing on from these."""
SCOPES = 2
"""0: texts of the same prompt (own text and siblings). 1: the whole workload."""
CONTEXT = 48
"""Longest context that is compared, in tokens."""
CURSORS = 12
"""Most occurrences that vote on one request's draft."""
PER_SCOPE = 4
"""Most recent occurrences that are taken from each scope, longest contexts first."""
ENOUGH = 3
"""A draft goes on looking for further occurrences only while fewer than these agree with it."""
SETTLED = 2
"""Shorter contexts are not looked up any more once a scope has given this many occurrences."""
WALK = 8
"""Most chain links followed in one bucket: bounds the worst case."""
LINKS = 256
"""Most chain links followed for one request's prediction, over all its tokens: bounds the worst case of a step. Agent
text takes 100 on average, and up to 530 without the bound, which costs nothing in replay."""
SKIPS = 8
"""Ways in which two texts may differ in a gap that the comparison beyond the match steps over."""
SKIP_HERE = (1, 0, 1, 2, 2, 1, 0, 2)
SKIP_THERE = (1, 1, 0, 2, 1, 2, 2, 0)

MATCHES = 10
"""Buckets of match length: 1, 2, 3, 4, 5-6, 7-10, 11-16, 17-32, more; 0 is unused."""
SHARES = 6
SOURCES = 4
"""own, group, prompt, window"""
COUNTS = 4
DEPTHS = 4
CELLS_1 = MATCHES
CELLS_2 = MATCHES * SHARES * SOURCES
CELLS_3 = CELLS_2 * COUNTS * DEPTHS
CELLS = CELLS_1 + CELLS_2 + CELLS_3
PRIOR_WEIGHT = 8.0
"""How many observations the coarser estimate counts for in the finer one."""
TOKEN_CELLS = 1 << 12
PAIR_CELLS = 1 << 13
SHAPES = 64
"""How many weights there are for tokens, for pairs of them (hashed), and for how the vote went."""
FEATURES = 4
"""Weights of one prediction: predicted token, the token before it, both, the vote."""
INFO = 6 + FEATURES
SLOPE = CELLS
BIAS = CELLS + 1
BY_TOKEN = CELLS + 2
BY_CONTEXT = BY_TOKEN + TOKEN_CELLS
BY_PAIR = BY_CONTEXT + TOKEN_CELLS
BY_SHAPE = BY_PAIR + PAIR_CELLS
ROWS = BY_SHAPE + SHAPES
RATE = 0.3
"""Learning rate of the correction (Adagrad). Between 0.12 and 0.5 the replay of tau-bench changes by less than 1 %."""
WEIGHT_BOUND = 4.0
"""No weight leaves plus or minus this, in log-odds."""
SURE = 1e-4
"""Estimates are kept this far from 0 and 1 before their log-odds are taken."""

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Floats = NDArray[np.float64]


class State(NamedTuple):
    """The arrays of one index. P pages, S slots, H heads per table."""

    text: Ints  # [P * PAGE]
    chain: Ints  # [P * PAGE, SCOPES * ORDERS]
    page_slot: Ints  # [P], -1 for a free page
    page_fill: Ints  # [P]
    page_prev: Ints  # [P], 0 for none
    page_next: Ints  # [P], 0 for none
    slot_last: Ints  # [S], 0 for none
    slot_scope: Longs  # [S]
    slot_group: Longs  # [S]
    slot_first: Ints  # [S]


class Heads(NamedTuple):
    """Newest position of every bucket; ``old`` is the table of half the size that is being left, or the same table."""

    new: Ints  # [SCOPES * ORDERS, H]
    old: Ints  # [SCOPES * ORDERS, H or H / 2]


@kernel
def _mix(value: int, token: int) -> int:
    return ((value * 1000003) ^ (token + 0x9E37)) & 0x7FFFFFFF


@kernel
def _finish(value: int) -> int:
    value = (value ^ (value >> 15)) * 0x2C1B3C6D & 0x7FFFFFFF
    value = (value ^ (value >> 12)) * 0x297A2D39 & 0x7FFFFFFF
    return value ^ (value >> 15)


@kernel
def _before(page_prev: Ints, position: int) -> int:
    if position & OFFSET:
        return position - 1
    page = int(page_prev[position >> SHIFT])
    return (page << SHIFT) + OFFSET if page else 0


@kernel
def _after(page_fill: Ints, page_next: Ints, position: int) -> int:
    page = position >> SHIFT
    offset = (position & OFFSET) + 1
    if offset < int(page_fill[page]):
        return position + 1
    following = int(page_next[page])
    if offset == PAGE and following and int(page_fill[following]) > 0:
        return following << SHIFT
    return 0


@kernel
def _order(order: int) -> int:
    return ORDER_LENGTHS[order]


@kernel
def index_position(state: State, heads: Heads, position: int, scope: int, salt: int) -> None:
    """Enter the contexts that end at ``position`` into the tables of one scope."""
    text, page_prev, chain = state.text, state.page_prev, state.chain
    value = salt & 0x7FFFFFFF
    at, length, order = position, 0, 0
    mask_new = heads.new.shape[1] - 1
    mask_old = heads.old.shape[1] - 1
    while at and order < ORDERS:
        value = _mix(value, int(text[at]))
        length += 1
        if length == _order(order):
            table = scope * ORDERS + order
            hashed = _finish(value)
            newest = int(heads.new[table, hashed & mask_new])
            if newest == 0:
                newest = int(heads.old[table, hashed & mask_old])
            chain[position, table] = newest if newest != position else 0
            heads.new[table, hashed & mask_new] = position
            order += 1
        at = _before(page_prev, at)
    while order < ORDERS:
        chain[position, scope * ORDERS + order] = 0
        order += 1


@kernel
def append(state: State, heads: Heads, slot: int, tokens: Ints, start: int, publish: bool, free: Ints) -> int:
    """Append tokens[start:] to a slot, taking pages from ``free`` (a stack: free[0] is its height).

    Returns how many tokens were entered; fewer than asked when the pages ran out.
    """
    salt = int(state.slot_scope[slot])
    page = int(state.slot_last[slot])
    count = 0
    for i in range(start, tokens.shape[0]):
        if page == 0 or int(state.page_fill[page]) == PAGE:
            height = int(free[0])
            if height == 0:
                break
            fresh = int(free[height])
            free[0] = height - 1
            state.page_slot[fresh] = slot
            state.page_fill[fresh] = 0
            state.page_prev[fresh] = page
            state.page_next[fresh] = 0
            if page:
                state.page_next[page] = fresh
            else:
                state.slot_first[slot] = fresh
            page = fresh
            state.slot_last[slot] = page
        position = page * PAGE + int(state.page_fill[page])
        state.text[position] = tokens[i]
        state.page_fill[page] += 1
        index_position(state, heads, position, 0, salt)
        if publish:
            index_position(state, heads, position, 1, 1)
        else:
            for order in range(ORDERS):
                state.chain[position, ORDERS + order] = 0
        count += 1
    return count


@kernel
def publish(state: State, heads: Heads, page: int, offset: int, count: int) -> tuple[int, int]:
    """Enter ``count`` positions from (page, offset) on into the workload's tables; returns where it stopped."""
    while count > 0 and page:
        if offset >= int(state.page_fill[page]):
            if offset < PAGE or int(state.page_next[page]) == 0:
                break
            page = int(state.page_next[page])
            offset = 0
            continue
        index_position(state, heads, page * PAGE + offset, 1, 1)
        offset += 1
        count -= 1
    return page, offset


@kernel
def drop(state: State, slot: int, free: Ints, most: int) -> int:
    """Give up to ``most`` pages of a slot back, newest first; returns 1 when there are more, else 0."""
    page = int(state.slot_last[slot])
    while page and most > 0:
        previous = int(state.page_prev[page])
        state.page_slot[page] = -1
        state.page_fill[page] = 0
        free[0] += 1
        free[free[0]] = page
        page = previous
        if page:
            state.page_next[page] = 0
        most -= 1
    state.slot_last[slot] = page
    return 1 if page else 0


@kernel
def migrate(heads: Heads, start: int, count: int) -> None:
    """Copy buckets [start, start + count) of the old heads to the two buckets of the new heads they split into."""
    half = heads.old.shape[1]
    for table in range(heads.old.shape[0]):
        for bucket in range(start, min(start + count, half)):
            newest = heads.old[table, bucket]
            if newest:
                if heads.new[table, bucket] == 0:
                    heads.new[table, bucket] = newest
                if heads.new[table, bucket + half] == 0:
                    heads.new[table, bucket + half] = newest


@kernel
def match_bucket(length: int) -> int:
    if length < 5:
        return length
    if length < 7:
        return 5
    if length < 11:
        return 6
    if length < 17:
        return 7
    return 8 if length < 33 else 9


@kernel
def _match(text: Ints, page_prev: Ints, position: int, context: Ints, length: int) -> int:
    """How many tokens ending at ``position`` equal the last ones of context[:length], at most CONTEXT."""
    count = 0
    most = min(length, CONTEXT)
    while count < most and position and text[position] == context[length - 1 - count]:
        count += 1
        position = _before(page_prev, position)
    return count


@kernel
def _beyond(text: Ints, page_prev: Ints, position: int, context: Ints, length: int, match: int) -> int:
    """Tokens that agree again beyond a small difference before the match: aligned siblings that differ in a name."""
    for _ in range(match):
        position = _before(page_prev, position)
    for skip in range(SKIPS):
        there = position
        for _ in range(SKIP_THERE[skip]):
            there = _before(page_prev, there) if there else 0
        here = length - match - SKIP_HERE[skip]
        count = 0
        while count < 24 and here > 0 and there and text[there] == context[here - 1]:
            count += 1
            here -= 1
            there = _before(page_prev, there)
        if count >= 4:
            return count
    return 0


@kernel
def _seed(
    state: State,
    heads: Heads,
    slot: int,
    context: Ints,
    length: int,
    cursors: Longs,
    used: int,
    hashes: Longs,
    work: Longs,
) -> int:
    """Add the most recent occurrences of the longest contexts to cursors[:used]; returns the new number.

    A cursor is (position of the context's last token, match, beyond, source). work[0] counts the links followed.
    """
    text, page_prev, page_fill, page_next = state.text, state.page_prev, state.page_fill, state.page_next
    mask_new = heads.new.shape[1] - 1
    mask_old = heads.old.shape[1] - 1
    scope_of_slot = int(state.slot_scope[slot])
    for scope in range(SCOPES):
        value = (scope_of_slot if scope == 0 else 1) & 0x7FFFFFFF
        order = 0
        for back in range(min(length, 9)):
            value = _mix(value, int(context[length - 1 - back]))
            if back + 1 == _order(order):
                hashes[order] = _finish(value)
                order += 1
                if order == ORDERS:
                    break
        got = 0
        while order > 0 and got < SETTLED:
            order -= 1
            table = scope * ORDERS + order
            hashed = int(hashes[order])
            position = int(heads.new[table, hashed & mask_new])
            if position == 0:
                position = int(heads.old[table, hashed & mask_old])
            for _ in range(WALK):
                if position == 0 or got >= PER_SCOPE or used >= CURSORS or work[0] >= LINKS:
                    break
                work[0] += 1
                page = position >> SHIFT
                owner = int(state.page_slot[page])
                here = position
                position = int(state.chain[here, table])
                if owner < 0 or (here & OFFSET) >= int(page_fill[page]):
                    continue
                same = int(state.slot_scope[owner]) == scope_of_slot
                if same != (scope == 0) or _after(page_fill, page_next, here) == 0:
                    continue
                known = False
                for i in range(used):
                    if int(cursors[i, 0]) == here:
                        known = True
                        break
                if known:
                    continue
                match = _match(text, page_prev, here, context, length)
                if match < _order(order):
                    continue
                if owner == slot:
                    source = 0
                elif not same:
                    source = 3
                else:
                    source = 1 if int(state.slot_group[owner]) == int(state.slot_group[slot]) else 2
                cursors[used, 0] = here
                cursors[used, 1] = match
                cursors[used, 2] = _beyond(text, page_prev, here, context, length, match) if match < 32 else 0
                cursors[used, 3] = source
                used += 1
                got += 1
    return used


@kernel
def _load(state: State, position: int, context: Ints) -> int:
    """Copy the tokens up to ``position`` to the front of ``context``, at most CONTEXT; returns how many."""
    text, page_prev = state.text, state.page_prev
    length = 0
    at = position
    while at and length < CONTEXT:
        length += 1
        at = _before(page_prev, at)
    at = position
    for i in range(length):
        context[length - 1 - i] = text[at]
        at = _before(page_prev, at)
    return length


@kernel
def estimate(cells: Floats, one: int, two: int, three: int) -> float:
    """Calibrated probability: the fine cell, with the coarser cells' estimate as its prior."""
    p = (cells[one, 0]) / cells[one, 1]
    p = (cells[two, 0] + PRIOR_WEIGHT * p) / (cells[two, 1] + PRIOR_WEIGHT)
    return float((cells[three, 0] + PRIOR_WEIGHT * p) / (cells[three, 1] + PRIOR_WEIGHT))


@kernel
def _log_odds(p: float) -> float:
    p = min(max(p, SURE), 1.0 - SURE)
    return float(np.log(p / (1.0 - p)))


@kernel
def corrected(cells: Floats, p: float, info: Longs) -> float:
    """The estimate ``p`` moved by what the tokens themselves say: a weight for each of the features in info [INFO].

    Within a word nearly everything is predictable, after a full stop nearly nothing, however long the match.
    """
    z = cells[SLOPE, 0] * _log_odds(p) + cells[BIAS, 0]
    for i in range(6, INFO):
        z += cells[int(info[i]), 0]
    return float(1.0 / (1.0 + np.exp(-z)))


@kernel
def _correct(cells: Floats, p: float, info: Longs, good: float) -> None:
    """One step of logistic regression (Adagrad; cells[:, 1] sums squared gradients) on a settled token."""
    error = corrected(cells, p, info) - good
    for i in range(INFO - FEATURES - 2, INFO):
        row, value = int(info[i]), 1.0
        if i == INFO - FEATURES - 2:
            row, value = SLOPE, _log_odds(p)
        elif i == INFO - FEATURES - 1:
            row = BIAS
        gradient = error * value
        cells[row, 1] += gradient * gradient
        moved = cells[row, 0] - RATE * gradient / np.sqrt(1.0 + cells[row, 1])
        cells[row, 0] = min(max(moved, -WEIGHT_BOUND), WEIGHT_BOUND)


@kernel
def _features(info: Longs, token: int, before: int, rows: int, used: int, depth: int) -> None:
    """Which weights belong to a prediction: ``token`` after ``before``, by ``used`` votes for ``rows`` tokens."""
    info[6] = BY_TOKEN + (_finish(token) & (TOKEN_CELLS - 1))
    info[7] = BY_CONTEXT + (_finish(before) & (TOKEN_CELLS - 1))
    info[8] = BY_PAIR + (_finish(_mix(token, before)) & (PAIR_CELLS - 1))
    info[9] = BY_SHAPE + min(rows - 1, 3) * 16 + min(used - 1, 3) * 4 + min(depth // 2, 3)


@kernel
def predict_one(
    state: State,
    heads: Heads,
    slot: int,
    most: int,
    cells: Floats,
    stops: Longs,
    floor: float,
    tokens: Ints,
    info: Longs,
    probs: Floats,
    context: Ints,
    cursors: Longs,
    votes: Floats,
    hashes: Longs,
    work: Longs,
) -> int:
    """Predict up to ``most`` tokens after a slot's text; returns how many.

    Fills tokens [most], probs [most] (each token's calibrated probability given the ones before it) and info [most,
    INFO]: the three calibration cells, source, match, the slot whose text the token was read from, and the weights of
    its correction. Ends where the chance
    to get that far falls below ``floor``, where nothing matches, and after a stop token.
    """
    text, page_fill, page_next = state.text, state.page_fill, state.page_next
    page = int(state.slot_last[slot])
    if page == 0 or int(page_fill[page]) == 0:
        return 0
    position = page * PAGE + int(page_fill[page]) - 1
    length = _load(state, position, context)
    work[0] = 0
    used = _seed(state, heads, slot, context, length, cursors, 0, hashes, work)
    reach = 1.0
    depth = 0
    while depth < most and used > 0:
        # Votes: one row per distinct continuation: token, weight, longest support, occurrences, its source.
        rows = 0
        total = 0.0
        for i in range(used):
            match = int(cursors[i, 1])
            beyond = int(cursors[i, 2])
            source = int(cursors[i, 3])
            token = int(text[_after(page_fill, page_next, int(cursors[i, 0]))])
            weight = match * match * (1.0 if source == 0 else 0.4 if source == 3 else 0.7) * (1.0 + 0.2 * beyond)
            total += weight
            row = 0
            while row < rows and int(votes[row, 0]) != token:
                row += 1
            if row == rows:
                rows += 1
                votes[row, 0] = token
                votes[row, 1] = 0.0
                votes[row, 2] = -1.0
                votes[row, 3] = 0.0
            support = match + 0.5 * beyond
            votes[row, 1] += weight
            votes[row, 3] += 1.0
            if support > votes[row, 2]:
                votes[row, 2] = support
                votes[row, 4] = source
                votes[row, 5] = match
                votes[row, 6] = state.page_slot[int(cursors[i, 0]) >> SHIFT]
        best = 0
        for row in range(1, rows):
            if votes[row, 1] > votes[best, 1]:
                best = row
        share = votes[best, 1] / total
        token, source = int(votes[best, 0]), int(votes[best, 4])
        coarse = match_bucket(int(votes[best, 2]))
        fine = 5 if share > 0.995 else int(share * 4.999)
        two = (coarse * SHARES + fine) * SOURCES + source
        three = (two * COUNTS + min(int(votes[best, 3]), COUNTS - 1)) * DEPTHS + min(depth, DEPTHS - 1)
        info[depth, 0] = coarse
        info[depth, 1] = two + CELLS_1
        info[depth, 2] = three + CELLS_1 + CELLS_2
        _features(info[depth], token, int(context[length - 1]), rows, used, depth)
        probability = corrected(cells, estimate(cells, coarse, int(info[depth, 1]), int(info[depth, 2])), info[depth])
        reach *= probability
        if reach < floor:
            break
        tokens[depth] = token
        probs[depth] = probability
        info[depth, 3] = source
        info[depth, 4] = int(votes[best, 5])
        info[depth, 5] = int(votes[best, 6])
        depth += 1
        stopped = False
        for i in range(stops.shape[0]):
            if int(stops[i]) == token:
                stopped = True
        if stopped or depth == most:
            break
        context[length] = token
        length += 1
        # Occurrences that went the same way stay, one token further on; then the grown context may find others.
        kept = 0
        for i in range(used):
            following = _after(page_fill, page_next, int(cursors[i, 0]))
            if int(text[following]) == token and _after(page_fill, page_next, following) != 0:
                cursors[kept, 0] = following
                cursors[kept, 1] = min(int(cursors[i, 1]) + 1, CONTEXT)
                cursors[kept, 2] = cursors[i, 2]
                cursors[kept, 3] = cursors[i, 3]
                kept += 1
        used = kept
        if kept < ENOUGH:
            used = _seed(state, heads, slot, context, length, cursors, kept, hashes, work)
    return depth


@kernel
def predict(
    state: State,
    heads: Heads,
    slots: Longs,
    limits: Longs,
    cells: Floats,
    stops: Longs,
    floor: float,
    tokens: Ints,
    info: Longs,
    probs: Floats,
    counts: Longs,
    links: Longs,
) -> None:
    """:func:`predict_one` for R requests: tokens [R, D], info [R, D, INFO], probs [R, D], counts [R], links [R]."""
    context = np.zeros(CONTEXT + tokens.shape[1] + 1, np.int32)
    cursors = np.zeros((CURSORS, 4), np.int64)
    votes = np.zeros((CURSORS, 7), np.float64)
    hashes = np.zeros(ORDERS, np.int64)
    work = np.zeros(1, np.int64)
    for r in range(slots.shape[0]):
        counts[r] = predict_one(
            state,
            heads,
            int(slots[r]),
            int(limits[r]),
            cells,
            stops,
            floor,
            tokens[r],
            info[r],
            probs[r],
            context,
            cursors,
            votes,
            hashes,
            work,
        )
        links[r] = work[0]


@kernel
def longest_right(state: State, heads: Heads, slot: int, truth: Ints) -> int:
    """The longest prefix of ``truth`` that follows one of the occurrences :func:`predict_one` starts from."""
    text, page_fill, page_next = state.text, state.page_fill, state.page_next
    context = np.zeros(CONTEXT, np.int32)
    cursors = np.zeros((CURSORS, 4), np.int64)
    page = int(state.slot_last[slot])
    if page == 0:
        return 0
    position = page * PAGE + int(page_fill[page]) - 1
    length = _load(state, position, context)
    used = _seed(state, heads, slot, context, length, cursors, 0, np.zeros(ORDERS, np.int64), np.zeros(1, np.int64))
    best = 0
    for i in range(used):
        count = 0
        at = _after(page_fill, page_next, int(cursors[i, 0]))
        while at and count < truth.shape[0] and text[at] == truth[count]:
            count += 1
            at = _after(page_fill, page_next, at)
        best = max(best, count)
    return best


@kernel
def learn(cells: Floats, tokens: Ints, info: Longs, count: int, actual: Ints) -> int:
    """Settle a prediction against the tokens that came; returns how many of its first ones were right."""
    right = 0
    for i in range(min(count, actual.shape[0])):
        good = 1.0 if tokens[i] == actual[i] else 0.0
        _correct(cells, estimate(cells, int(info[i, 0]), int(info[i, 1]), int(info[i, 2])), info[i], good)
        for level in range(3):
            cell = int(info[i, level])
            cells[cell, 0] += good
            cells[cell, 1] += 1.0
        if good == 0.0:
            break
        right += 1
    return right
