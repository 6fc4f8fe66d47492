# SPDX-License-Identifier: Apache-2.0
"""Text becomes one growing token sequence; synthetic tokens keep what is shared shared."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.traces.model import Length, Message, Text, Tokens, Trace, Turn
from war_rl.traces.synthetic import SyntheticTokens, no_repeat_traces
from war_rl.traces.tokenise import ChatFormat, Renderer, TokenTrace
from war_rl.types import as_tokens


class Characters:
    """One token per character; insists on being asked for no special tokens."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return [ord(c) for c in text]


class Encoded:
    """Answers with an object that has ``ids``, as some tokenizers do."""

    class _Result:
        def __init__(self, ids: list[int]) -> None:
            self.ids = ids

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoded._Result:
        return self._Result([ord(c) for c in text])


TALK = Trace(
    "t",
    "g",
    Text((Message("system", "S"), Message("user", "Q"))),
    (
        Turn(Text((Message("assistant", "A"),)), Text((Message("tool", "E"), Message("user", "F"))), 0.5),
        Turn(Text((Message("assistant", "B"),)), Text()),
    ),
    "x",
)


def decoded(trace: TokenTrace) -> str:
    parts = [trace.prompt, *(part for turn in trace.turns for part in (turn.model, turn.env))]
    return "".join(chr(t) for part in parts for t in part)


@pytest.mark.parametrize("tokenizer", [Characters(), Encoded()])
def test_pieces_join_to_the_chat_template(tokenizer: Characters | Encoded) -> None:
    made = Renderer(tokenizer).trace(TALK)
    assert decoded(made) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>tool\nE<|im_end|>\n<|im_start|>user\nF<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert "".join(map(chr, made.turns[0].model)) == "A<|im_end|>"
    assert [turn.tool_seconds for turn in made.turns] == [0.5, None]
    assert made.prompt.dtype == made.turns[0].env.dtype == np.int32
    assert (made.id, made.group, made.source) == ("t", "g", "x")


def test_another_chat_format() -> None:
    made = Renderer(Characters(), ChatFormat("[{role}]", "|", "", "bot")).trace(TALK)
    assert decoded(made) == "[system]S|[user]Q|[bot]A|[tool]E|[user]F|[bot]B|[bot]"


def test_recorded_ids_pass_through_and_lengths_are_refused() -> None:
    ids = Trace("t", "", Tokens(as_tokens([1, 2])), (Turn(Tokens(as_tokens([3])), Tokens(as_tokens([]))),), "war")
    made = Renderer(Characters()).trace(ids)
    assert (made.prompt.tolist(), made.turns[0].model.tolist(), made.turns[0].env.tolist()) == ([1, 2], [3], [])
    with pytest.raises(ValueError, match="no text to tokenise"):
        Renderer(Characters()).trace(Trace("t", "", Length(1), (Turn(Length(1), Length(0)),), "x"))


def lengths(name: str, prompt: int, turns: list[tuple[int, int]], blocks: tuple[int, ...]) -> Trace:
    return Trace(name, "", Length(prompt), tuple(Turn(Length(m), Length(e)) for m, e in turns), "mooncake", blocks, 8)


def whole(trace: TokenTrace) -> list[int]:
    parts = [trace.prompt, *(part for turn in trace.turns for part in (turn.model, turn.env))]
    return np.concatenate(parts).tolist()


@given(shared=st.integers(0, 4), own=st.integers(1, 3), seed=st.integers(0, 5))
def test_shared_blocks_give_shared_tokens_and_others_do_not(shared: int, own: int, seed: int) -> None:
    make = SyntheticTokens(100, 50_000, seed)
    prompt = (shared + own) * 8 - 3
    common = tuple(range(shared))
    one = make.trace(lengths("a", prompt, [(5, 0)], common + tuple(range(100, 100 + own))))
    two = make.trace(lengths("b", prompt, [(5, 0)], common + tuple(range(200, 200 + own))))
    assert one.prompt[: shared * 8].tolist() == two.prompt[: shared * 8].tolist()
    # 5 or more values out of 49,900 that all agree by chance: not in the lifetime of this test.
    assert one.prompt[shared * 8 :].tolist() != two.prompt[shared * 8 :].tolist()
    assert one.turns[0].model.tolist() != two.turns[0].model.tolist()
    assert min(whole(one)) >= 100 and max(whole(one)) < 50_000


def test_synthetic_tokens_depend_on_seed_and_identity_only() -> None:
    trace = lengths("a", 12, [(3, 2), (4, 0)], (1, 2, 3))
    assert whole(SyntheticTokens(0, 1000, 1).trace(trace)) == whole(SyntheticTokens(0, 1000, 1).trace(trace))
    assert whole(SyntheticTokens(0, 1000, 1).trace(trace)) != whole(SyntheticTokens(0, 1000, 2).trace(trace))
    made = SyntheticTokens(0, 1000, 1).trace(trace)
    assert [len(made.prompt), *(len(p) for t in made.turns for p in (t.model, t.env))] == [12, 3, 2, 4, 0]
    # A later request's blocks cover the turns before it: a trajectory that shares them shares those tokens too.
    longer = SyntheticTokens(0, 1000, 1).trace(lengths("b", 17, [(4, 0)], (1, 2, 3)))
    assert whole(longer)[:17] == whole(made)[:17]


def test_lengths_without_blocks_are_the_trajectorys_own() -> None:
    make = SyntheticTokens(0, 50_000)
    one, two = (make.trace(Trace(n, "", Length(9), (Turn(Length(2), Length(0)),), "x")) for n in "ab")
    assert whole(one) != whole(two)
    with pytest.raises(ValueError, match="has text, not just lengths"):
        make.trace(TALK)


def test_no_repeat_has_nothing_twice() -> None:
    traces = no_repeat_traces(
        groups=3, n=2, turns=4, prompt_tokens=20, model_tokens=7, env_tokens=5, tokens=SyntheticTokens(10, 5000, 3)
    )
    tokens = [t for trace in traces for t in whole(trace)]
    assert len(tokens) == 6 * (20 + 4 * 7 + 3 * 5) == len(set(tokens))
    assert {trace.group for trace in traces} == {"no-repeat/0", "no-repeat/1", "no-repeat/2"}
    assert len({trace.id for trace in traces}) == 6


def test_no_repeat_in_a_small_vocabulary_repeats_only_after_every_id_was_used() -> None:
    (trace,) = no_repeat_traces(
        groups=1, n=1, turns=1, prompt_tokens=25, model_tokens=5, env_tokens=0, tokens=SyntheticTokens(0, 10)
    )
    tokens = whole(trace)
    assert [sorted(tokens[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3


def test_bad_ranges_and_counts() -> None:
    with pytest.raises(ValueError, match=r"got \[5, 5\)"):
        SyntheticTokens(5, 5)
    with pytest.raises(ValueError, match="turns=0"):
        no_repeat_traces(
            groups=1, n=1, turns=0, prompt_tokens=1, model_tokens=1, env_tokens=0, tokens=SyntheticTokens(0, 9)
        )
