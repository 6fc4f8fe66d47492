# SPDX-License-Identifier: Apache-2.0
"""Selection, cutting and timing of the work, and that all of it is reported."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.traces.model import Length, Message, Text, Tokens, Trace, Turn
from war_rl.traces.synthetic import SyntheticTokens
from war_rl.traces.tokenise import TokenTrace, TokenTurn
from war_rl.traces.workload import (
    WorkItem,
    WorkloadSpec,
    WorkTurn,
    build_workload,
    least_prefill_tokens,
    parse_tool_seconds,
    tokenise_traces,
    working_set_tokens,
)
from war_rl.types import TrajectoryId, as_tokens

_fresh = count(1000)


def trace(
    group: str, prompt: int, turns: list[tuple[int, int]], seconds: float | None = None, name: str = ""
) -> TokenTrace:
    """Tokens that occur nowhere else, so that a misplaced one shows."""
    made = tuple(TokenTurn(fresh(m), fresh(e), seconds) for m, e in turns)
    return TokenTrace(name or f"id{next(_fresh)}", group, fresh(prompt), made, "x")


def fresh(size: int):  # type: ignore[no-untyped-def]
    return as_tokens([next(_fresh) for _ in range(size)])


def shape(item: WorkItem) -> list[int]:
    return [len(item.prompt_tokens), *(n for t in item.turns for n in (len(t.model_tokens), len(t.env_tokens)))]


def test_groups_and_members_in_order_of_appearance() -> None:
    traces = [trace(g, 4, [(2, 0)], name=f"{g}{i}") for i, g in enumerate("abacbac")]
    work = build_workload(traces, WorkloadSpec(groups=2, n=2))
    assert [item.trace_id for item in work.items] == ["a0", "a2", "b1", "b4"]
    assert [(i.trajectory.uid, i.trajectory.session) for i in work.items] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    # b and c have too few members for n=3 and are passed over.
    assert [i.trace_id for i in build_workload(traces, WorkloadSpec(n=3)).items] == ["a0", "a2", "a5"]
    assert len(build_workload(traces, WorkloadSpec()).items) == 7


def test_too_few_groups_says_what_would_work() -> None:
    traces = [trace(g, 4, [(2, 0)]) for g in "abacbac"]
    with pytest.raises(ValueError, match=r"1 groups of at least 3 trajectories \(3 groups .* --n 2 would work"):
        build_workload(traces, WorkloadSpec(groups=2, n=3))
    with pytest.raises(ValueError, match="--groups 3 is the most"):
        build_workload(traces, WorkloadSpec(groups=9, n=2))


def test_without_a_group_equal_prompts_are_siblings() -> None:
    one, two, three = (trace("", 4, [(2, 0)]) for _ in range(3))
    two = TokenTrace(two.id, "", one.prompt.copy(), two.turns, "x")
    work = build_workload([one, three, two], WorkloadSpec())
    assert [item.trace_id for item in work.items] == [one.id, two.id, three.id]
    assert len({item.trajectory.uid for item in work.items}) == 2


def test_the_last_turn_appends_nothing_and_the_sequence_is_the_recordings() -> None:
    recording = trace("a", 3, [(2, 4), (5, 6), (1, 9)])
    (item,) = build_workload([recording], WorkloadSpec(turns=2)).items
    assert shape(item) == [3, 2, 4, 5, 0]
    expected = [*recording.prompt, *recording.turns[0].model, *recording.turns[0].env, *recording.turns[1].model]
    assert item.tokens().tolist() == expected
    assert (item.generated_tokens, item.requested_prompt_tokens) == (7, 3 + (3 + 2 + 4))


def test_a_turn_that_does_not_fit_ends_the_trajectory_and_is_reported() -> None:
    work = build_workload(
        [trace("a", 10, [(5, 5), (5, 5), (5, 5)]), trace("a", 10, [(5, 3)])], WorkloadSpec(max_context=25)
    )
    assert [shape(item) for item in work.items] == [[10, 5, 5, 5, 0], [10, 5, 0]]
    cut = work.summary()["cut"]
    assert cut == {"trajectories": 1, "turns": 1, "prompt_tokens": 0, "model_tokens": 5, "env_tokens": 5}


def test_a_first_turn_that_does_not_fit_keeps_the_prompts_head() -> None:
    recording = trace("a", 100, [(50, 5), (5, 5)])
    work = build_workload([recording], WorkloadSpec(max_context=40))
    (item,) = work.items
    assert shape(item) == [30, 10, 0]
    assert item.prompt_tokens.tolist() == recording.prompt[:30].tolist()
    assert item.turns[0].model_tokens.tolist() == recording.turns[0].model[:10].tolist()
    assert work.summary()["cut"] == {
        "trajectories": 1,
        "turns": 1,
        "prompt_tokens": 70,
        "model_tokens": 45,
        "env_tokens": 10,
    }


@given(
    prompt=st.integers(1, 60),
    turns=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6),
    limit=st.integers(2, 80),
)
def test_nothing_exceeds_the_context_and_no_generated_token_goes_missing(
    prompt: int, turns: list[tuple[int, int]], limit: int
) -> None:
    recording = trace("a", prompt, turns)
    recorded = sum(m for m, _ in turns)
    if recorded == 0:
        with pytest.raises(ValueError, match="no trajectory"):
            build_workload([recording], WorkloadSpec(max_context=limit))
        return
    work = build_workload([recording], WorkloadSpec(max_context=limit))
    (item,) = work.items
    assert len(item.tokens()) <= limit
    assert len(item.prompt_tokens) >= 1 and all(len(turn.model_tokens) >= 1 for turn in item.turns)
    assert item.generated_tokens + work.cut.model_tokens == recorded
    # What is replayed is the recording's beginning, apart from what a shortened first prompt dropped.
    if not work.cut.prompt_tokens:
        full = [*recording.prompt, *(t for turn in recording.turns for part in (turn.model, turn.env) for t in part)]
        assert item.tokens().tolist() == full[: len(item.tokens())]


def test_empty_generations_join_their_neighbours() -> None:
    work = build_workload([trace("a", 3, [(0, 2), (4, 1), (0, 6), (2, 0)])], WorkloadSpec())
    assert shape(work.items[0]) == [5, 4, 7, 2, 0]
    assert work.notes["turn without generated tokens joined to the one before"] == 2


def test_tool_seconds_are_scaled_and_unknown_ones_noted() -> None:
    known, unknown = trace("a", 2, [(1, 1), (1, 1), (1, 1)], 2.0), trace("b", 2, [(1, 1), (1, 1)])
    spec = WorkloadSpec(tool_scale=0.5, default_tool_seconds=3.0)
    one, two = build_workload([known, unknown], spec, {"from the reader": 1}).items
    assert [turn.tool_seconds for turn in one.turns] == [1.0, 1.0, 0.0]
    assert [turn.tool_seconds for turn in two.turns] == [1.5, 0.0]
    notes = build_workload([known, unknown], spec, {"from the reader": 1}).notes
    assert notes == {"from the reader": 1, "tool time unknown: default_tool_seconds used": 1}
    assert [parse_tool_seconds(t) for t in ("recorded", "zero", "0.25x", "2x")] == [1.0, 0.0, 0.25, 2.0]
    assert [parse_tool_seconds(t) for t in ("0-2", "0.5-1.5")] == [(0.0, 2.0), (0.5, 1.5)]
    for bad in ("fast", "x", "-1x", "nanx", "infx", "2"):
        with pytest.raises(ValueError, match="expected recorded, zero"):
            parse_tool_seconds(bad)


def test_made_up_tool_seconds_depend_on_the_trajectory_alone() -> None:
    traces = [trace("g", 2, [(1, 1)] * 40, 9.0, name) for name in ("a", "b")]
    items = build_workload(traces, WorkloadSpec(tool_range=(1.0, 3.0))).items
    waits = {item.trace_id: [turn.tool_seconds for turn in item.turns[:-1]] for item in items}
    assert all(1.0 <= wait <= 3.0 for row in waits.values() for wait in row)
    assert min(waits["a"]) < 1.5 and max(waits["a"]) > 2.5 and waits["a"] != waits["b"]
    again = build_workload(traces[::-1], WorkloadSpec(tool_range=(1.0, 3.0))).items
    assert waits == {item.trace_id: [turn.tool_seconds for turn in item.turns[:-1]] for item in again}
    assert all(item.turns[-1].tool_seconds == 0 for item in items)


def test_bad_specs() -> None:
    with pytest.raises(ValueError, match="tool_range"):
        WorkloadSpec(tool_range=(2.0, 1.0))
    for field in ("groups", "n", "turns", "max_context"):
        with pytest.raises(ValueError, match=f"{field}=0"):
            WorkloadSpec(**{field: 0})
    with pytest.raises(ValueError, match="tool_scale=-1"):
        WorkloadSpec(tool_scale=-1)


class Characters:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]


def test_each_form_becomes_tokens() -> None:
    said = Trace("t", "", Text((Message("user", "q"),)), (Turn(Text((Message("assistant", "a"),)), Text()),), "x")
    coded = Trace("i", "", Tokens(as_tokens([1])), (Turn(Tokens(as_tokens([300])), Tokens(as_tokens([]))),), "war")
    counted = Trace("l", "", Length(5), (Turn(Length(2), Length(0)),), "mooncake")
    made = tokenise_traces([said, coded, counted], Characters(), SyntheticTokens(0, 301))
    assert [t.id for t in made] == ["t", "i", "l"]
    assert made[1].turns[0].model.tolist() == [300] and len(made[2].prompt) == 5
    with pytest.raises(ValueError, match="token id 300, the model's vocabulary ends at 300"):
        tokenise_traces([coded], Characters(), SyntheticTokens(0, 300))
    with pytest.raises(ValueError, match="a tokenizer is needed"):
        tokenise_traces([said], None, SyntheticTokens(0, 300))
    assert len(tokenise_traces([counted], None, SyntheticTokens(0, 300))) == 1


def test_working_set_counts_shared_prefixes_once() -> None:
    one = trace("a", 32, [(8, 0)])
    two = TokenTrace("b", "a", one.prompt, (TokenTurn(fresh(20), fresh(0), None),), "x")
    items = build_workload([one, two], WorkloadSpec()).items
    # 2 shared blocks, then 1 block for 8 tokens and 2 for 20.
    assert working_set_tokens(items, 16) == 16 * (2 + 1 + 2)
    assert working_set_tokens(items[:1], 16) == 16 * 3
    # The same text after another beginning is another block.
    again = TokenTrace("c", "a", as_tokens([*fresh(16), *one.prompt[16:]]), one.turns, "x")
    assert working_set_tokens(build_workload([one, again], WorkloadSpec()).items, 16) == 16 * 6
    summary = build_workload([one, two], WorkloadSpec()).summary()
    assert (summary["trajectories"], summary["groups"], summary["turns"]) == (2, 1, 2)
    assert (summary["prompt_tokens"], summary["generated_tokens"], summary["longest_context"]) == (64, 28, 52)


def item(session, prompt, *turns):
    made = tuple(WorkTurn(np.array(m, np.int32), np.array(e, np.int32), 0.0) for m, e in turns)
    return WorkItem(TrajectoryId("g", session, 0), f"t{session}", np.array(prompt, np.int32), made)


def test_least_prefill_by_hand():
    # Blocks of 4. Turn 1 computes its 6 tokens and fills block 1 while it generates 7 and 8 (9 is never computed);
    # turn 2 finds blocks 0 and 1 and computes the 5 tokens after them.
    one = item(0, range(6), ([6, 7, 8], [9, 10, 11, 12]), ([13, 14], []))
    assert least_prefill_tokens([one], 4) == 6 + 5
    # A sibling finds block 0, computes the 2 tokens after it, and 5 in its second turn.
    other = item(1, range(6), ([66, 67, 68], [9, 10, 11, 12]), ([13, 14], []))
    assert least_prefill_tokens([one, other], 4) == 6 + 5 + 2 + 5
    # A prompt that ends with a block computes that block again each time: its last token is never served.
    whole = [item(s, range(8), ([50 + s], [])) for s in range(3)]
    assert least_prefill_tokens(whole, 4) == 8 + 4 + 4


@given(st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4), min_size=1, max_size=4), st.integers(0, 9))
def test_no_order_of_trajectories_on_an_endless_cache_computes_less(lengths, seed):
    rng = np.random.default_rng(seed)

    def words(count):
        return rng.integers(0, 2, count).tolist()

    items = [item(i, words(n[0] + 3), *((words(g), words(3)) for g in n[1:])) for i, n in enumerate(lengths)]
    assert least_prefill_tokens(items, 4) <= min(_computed(items), _computed(items[::-1]))


def _computed(items):
    """Prompt tokens an engine with an endless prefix cache of blocks of 4 computes, one trajectory after another."""
    cache, computed = set(), 0
    for one in items:
        text, prompt = one.tokens().tolist(), len(one.prompt_tokens)
        for turn in one.turns:
            hit = 0
            while hit + 4 < prompt and tuple(text[: hit + 4]) in cache:
                hit += 4
            computed += prompt - hit
            cache.update(tuple(text[: 4 * (b + 1)]) for b in range((prompt + len(turn.model_tokens) - 1) // 4))
            prompt += len(turn.model_tokens) + len(turn.env_tokens)
    return computed
