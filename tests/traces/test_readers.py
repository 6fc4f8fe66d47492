# SPDX-License-Identifier: Apache-2.0
"""Readers on hand-made recordings, whole and broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from war_rl.traces.model import Length, Message, Notes, Text, Tokens, Trace, TraceFormatError, Turn
from war_rl.traces.readers import READERS, read_traces, war
from war_rl.types import TrajectoryId


def write(path: Path, content: str | list[dict[str, Any]]) -> Path:
    text = content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content)
    path.write_text(text)
    return path


def text(role: str, *contents: str) -> Text:
    return Text(tuple(Message(role, content) for content in contents))


TAU = [
    {
        "task_id": 3,
        "trial": 1,
        "reward": 1.0,
        "traj": [
            {"role": "system", "content": "policy"},
            {"role": "user", "content": "book"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "function": {"name": "find", "arguments": '{"to":"SEA"}'}}],
            },
            {"role": "tool", "name": "find", "content": "[1, 2]"},
            {"role": "assistant", "content": "done"},
            {"role": "user", "content": "###STOP###"},
        ],
    },
    {"task_id": 3, "trial": 2, "traj": [{"role": "user", "content": "alone"}]},
]


def test_tau_bench(tmp_path: Path) -> None:
    notes = Notes()
    (trace,) = read_traces(write(tmp_path / "air.json", json.dumps(TAU, indent=1)), "tau-bench", notes)
    assert (trace.id, trace.group, trace.reward, trace.kind) == ("air/task-3/trial-1", "air/task-3", 1.0, "text")
    assert trace.prompt == Text((Message("system", "policy"), Message("user", "book")))
    call = '<tool_call>\n{"name": "find", "arguments": {"to":"SEA"}}\n</tool_call>'
    assert trace.turns == (
        Turn(text("assistant", call), text("tool", "[1, 2]")),
        Turn(text("assistant", "done"), text("user", "###STOP###")),
    )
    assert notes == {"trajectory without an assistant message skipped": 1}


def lm(session: str, stamp: int, inp: str, out: str) -> dict[str, Any]:
    return {"session_id": session, "timestamp": stamp, "input": inp, "output": out}


def test_lmcache_orders_lines_and_gives_the_same_trajectory_with_or_without_outputs_in_the_input(
    tmp_path: Path,
) -> None:
    without = [lm("s", 2, "task[env1]", "two"), lm("s", 1, "task", "one")]
    with_output = [lm("s", 1, "task", "one"), lm("s", 2, "task\none[env1]", "two")]
    expected = (Turn(text("assistant", "one"), text("user", "[env1]")), Turn(text("assistant", "two"), Text()))
    for name, lines in (("a.jsonl", without), ("b.jsonl", with_output)):
        (trace,) = read_traces(write(tmp_path / name, lines), "lmcache")
        assert (trace.id, trace.group, trace.prompt) == ("s", "", text("user", "task"))
        assert trace.turns == expected


def test_lmcache_rewritten_history_starts_a_new_trajectory(tmp_path: Path) -> None:
    notes = Notes()
    lines = [lm("s", 1, "long task", "one"), lm("s", 2, "short", "two"), lm("s", 3, "short!", "three")]
    first, second = read_traces(write(tmp_path / "a.jsonl", lines), "lmcache", notes)
    assert (first.id, len(first.turns), second.id, len(second.turns)) == ("s#0", 1, "s#1", 2)
    assert notes == {"history rewritten by the agent: trajectory split": 1}


SWE = {
    "trajectory": [
        {
            "response": "look\n```\nls\n```",
            "action": "ls\n",
            "observation": "a.py",
            "execution_time": 0.25,
            "query": [{"role": "system", "content": "you fix"}, {"role": "user", "content": "bug"}],
        },
        {"response": "submit it", "action": "submit", "observation": "", "execution_time": 1.5},
        {"response": "think", "action": "cat x", "observation": "text"},
        {"response": "", "action": "", "observation": "Exited"},
    ],
    "history": [],
}


def test_swe_agent(tmp_path: Path) -> None:
    notes = Notes()
    for attempt in ("one", "two"):
        (tmp_path / attempt).mkdir()
        write(tmp_path / attempt / "repo__1.traj", json.dumps(SWE))
    first, second = read_traces(tmp_path, "swe-agent", notes)
    assert (first.id, second.id) == ("one/repo__1", "two/repo__1")
    assert first.group == second.group == "repo__1"
    assert first.prompt == Text((Message("system", "you fix"), Message("user", "bug")))
    assert first.turns == (
        Turn(text("assistant", "look\n```\nls\n```"), text("user", "a.py"), 0.25),
        Turn(text("assistant", "submit it"), Text(), 1.5),
        Turn(text("assistant", "think\n<tool_call>\ncat x\n</tool_call>"), text("user", "text"), None),
    )
    assert notes == {"step without a model response skipped": 2}


def test_swe_agent_takes_the_prompt_from_the_history_with_its_demonstration(tmp_path: Path) -> None:
    document = {
        "trajectory": [{"response": "go", "action": "go", "observation": "ok"}],
        "history": [
            {"role": "system", "content": [{"type": "text", "text": "sys"}]},
            {"role": "assistant", "content": "shown", "is_demo": True},
            {"role": "user", "content": "bug"},
            {"role": "assistant", "content": "go"},
        ],
    }
    (trace,) = read_traces(write(tmp_path / "i.traj", json.dumps(document)), "swe-agent")
    assert trace.prompt == Text((Message("system", "sys"), Message("assistant", "shown"), Message("user", "bug")))


def test_messages_groups_and_tool_seconds(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d", "tool_seconds": 0.5},
        {"role": "tool", "content": "e", "tool_seconds": 1},
        {"role": "assistant", "content": "f"},
        {"role": "assistant", "content": "g"},
    ]
    lines: list[dict[str, Any]] = [{"messages": talk, "task_id": 0}, {"messages": talk, "id": "x", "group": "y"}]
    first, second = read_traces(write(tmp_path / "m.jsonl", lines), "messages")
    assert (first.id, first.group, second.id, second.group) == ("m:1", "0", "x", "y")
    assert first.prompt == text("user", "ab")
    assert [turn.tool_seconds for turn in first.turns] == [1.5, None, None]
    assert first.turns[0].env == text("tool", "d", "e")
    assert first.turns[1].env == Text()


def moon(prompt: int, output: int, *blocks: int) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": prompt, "output_length": output, "hash_ids": list(blocks)}


def test_mooncake_joins_turns_and_keeps_branches_apart(tmp_path: Path) -> None:
    lines = [
        moon(1030, 10, 0, 1, 2),  # line 1
        moon(1039, 7, 0, 1, 6),  # has its last full block, but one token less than its prompt and output
        moon(1100, 20, 0, 1, 3),  # continues line 1 without filling a block: 1040 + 60 from the environment
        moon(1540, 5, 0, 1, 4, 5),  # continues it again
        moon(600, 1, 0, 9),  # shares one block only
        moon(2060, 5, 0, 1, 4, 10, 11),  # follows line 4
        moon(2070, 5, 0, 1, 4, 12, 13),  # follows line 4 too: a branch
    ]
    notes = Notes()
    traces = read_traces(write(tmp_path / "m.jsonl", lines), "mooncake", notes)
    assert [(t.id, len(t.turns)) for t in traces] == [("m:1", 4), ("m:2", 1), ("m:5", 1), ("m:7", 1)]
    first = traces[0]
    assert first.prompt == Length(1030)
    assert [(t.model, t.env) for t in first.turns] == [
        (Length(10), Length(60)),
        (Length(20), Length(420)),
        (Length(5), Length(515)),
        (Length(5), Length(0)),
    ]
    assert (first.block_hashes, first.block_size) == ((0, 1, 4, 10, 11), 512)
    assert notes == {"request joined to an earlier one as its next turn": 3}


IDENTITY = TrajectoryId("u1", 2, 7, "idx", False)


def test_war_round_trip_through_dump(tmp_path: Path) -> None:
    path = tmp_path / "new" / "w.jsonl"
    war.dump_trajectory(
        path,
        IDENTITY,
        prompt_ids=np.array([1, 2]),
        response_ids=[9, 3, 4, 5, 6, 7],
        response_mask=[0, 1, 1, 0, 1, 0],
        tool_seconds=[0.5],
        reward=1,
        seconds=2.5,
    )
    war.dump_trajectory(path, IDENTITY, prompt_ids=[1], response_ids=[2], response_mask=[0])
    notes = Notes()
    (trace,) = read_traces(path, "war", notes)
    assert (trace.id, trace.group, trace.reward, trace.kind) == ("7/u1/2", "7/u1", 1.0, "tokens")
    assert ids(trace) == [[1, 2, 9], [3, 4], [5], [6], [7]]
    assert [turn.tool_seconds for turn in trace.turns] == [0.5, None]
    assert notes == {"trajectory without generated tokens skipped": 1}


def test_a_line_that_a_killed_writer_cut_short_is_left_out_and_noted(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    war.dump_trajectory(path, IDENTITY, prompt_ids=[1], response_ids=[2], response_mask=[1])
    whole = path.read_text()
    path.write_text(whole + whole[:-9])
    notes = Notes()
    assert len(read_traces(path, "war", notes)) == 1 and sum(notes.values()) == 1
    path.write_text(whole[:-9] + "\n" + whole)
    with pytest.raises(TraceFormatError, match=r"w\.jsonl:1: expected one JSON object per line"):
        read_traces(path, "war")


def ids(trace: Trace) -> list[list[int]]:
    spans = [trace.prompt, *(span for turn in trace.turns for span in (turn.model, turn.env))]
    return [span.ids.tolist() for span in spans if isinstance(span, Tokens)]


def test_war_turns_and_gzip(tmp_path: Path) -> None:
    line = {"version": 1, "group": "g", "prompt_ids": [1], "turns": [{"model_ids": [2], "env_ids": [3]}]}
    line["turns"] = [*line["turns"], {"model_ids": [4], "tool_seconds": 0.0}]  # type: ignore[misc]
    path = tmp_path / "w.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line).encode()))
    (trace,) = read_traces(tmp_path, "war")
    assert ids(trace) == [[1], [2], [3], [4], []]
    assert [turn.tool_seconds for turn in trace.turns] == [None, 0.0]


@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), max_size=5),
    response=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 1)), min_size=1, max_size=30),
)
def test_war_keeps_every_token_and_who_wrote_it(
    tmp_path_factory: pytest.TempPathFactory, prompt: list[int], response: list[tuple[int, int]]
) -> None:
    tokens, mask = [t for t, _ in response], [m for _, m in response]
    path = tmp_path_factory.mktemp("w") / "w.jsonl"
    path.write_text(
        war.encode_trajectory(IDENTITY, prompt_ids=prompt, response_ids=tokens, response_mask=mask), encoding="utf-8"
    )
    traces = list(war.read(path, Notes()))
    if 1 not in mask:
        assert traces == []
        return
    pieces = ids(traces[0])
    assert [t for piece in pieces for t in piece] == prompt + tokens
    generated = [t for piece in pieces[1::2] for t in piece]
    assert generated == [t for t, m in response if m]


def test_war_refuses_what_it_cannot_write() -> None:
    with pytest.raises(ValueError, match="response_ids has 1 entries, response_mask 2"):
        war.encode_trajectory(IDENTITY, prompt_ids=[1], response_ids=[1], response_mask=[1, 1])
    with pytest.raises(ValueError, match="0 and 1 only"):
        war.encode_trajectory(IDENTITY, prompt_ids=[1], response_ids=[1], response_mask=[2])


GOOD_WAR = {"version": 1, "group": "g", "prompt_ids": [1], "response_ids": [2], "response_mask": [1]}
ROLES = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize(
    ("fmt", "content", "line", "expected"),
    [
        ("tau-bench", "", 1, r"expected a JSON array"),
        ("tau-bench", '\n{"a": 1}', 2, r"expected a JSON array"),
        ("tau-bench", '[\n{"task_id": 1, "traj": []},\n{"task_id": 1,,}]', 3, "expected a JSON value"),
        ("tau-bench", '[\n{"task_id": 1, "traj": []}', 2, "expected ',' or ']'"),
        ("tau-bench", '[\n{"task_id": 1, "traj": []},\n\n7]', 4, "expected each array element to be a JSON object"),
        ("tau-bench", '[\n\n{"traj": []}]', 3, "expected key 'task_id'"),
        ("tau-bench", '[{"task_id": 1, "traj": [{"content": "x"}]}]', 1, "expected key 'role' .*message 0 of 'traj'"),
        ("tau-bench", "[]\nmore", 1, "expected nothing after"),
        ("lmcache", [lm("s", 1, "a", "b"), {"input": "a"}], 2, "expected key 'output'"),
        ("lmcache", [{"input": 3, "output": "b"}], 1, "expected 'input' to be .* got a number"),
        ("lmcache", '{"input": "a", "output": "b"}\n\n{"input": "a", "out', 3, "expected one JSON object per line"),
        ("lmcache", "[1]\n", 1, "expected the line to be a JSON object, got an array"),
        ("swe-agent", '{"trajectory":\n 1,,}', 2, "expected one JSON object"),
        ("swe-agent", '{"trajectory": 1}', 1, "expected 'trajectory' to be the array of steps"),
        ("swe-agent", '{"trajectory": [{"response": "a"}]}', 1, "expected key 'observation'"),
        ("swe-agent", '{"trajectory": [{"response": "a", "observation": "b"}]}', 1, "to know the prompt"),
        ("messages", [ROLES, {"messages": "x"}], 2, "expected 'messages' to be the array of messages, got text"),
        ("messages", [{"messages": [{"role": "user", "content": 5}]}], 1, "expected 'content' of message 0"),
        ("messages", [{"messages": [{"role": "tool", "content": "", "tool_seconds": -1}]}], 1, "'tool_seconds'"),
        ("mooncake", [moon(10, 1, 0), moon(1025, 1, 0, 1)], 2, "expected 3 hash_ids for 1025 tokens"),
        ("mooncake", [{"input_length": True, "output_length": 1, "hash_ids": [0]}], 1, "expected 'input_length'"),
        ("mooncake", [moon(0, 1)], 1, "expected input_length >= 1"),
        ("war", [GOOD_WAR, {**GOOD_WAR, "version": 2}], 2, "expected version 1, got 2"),
        ("war", [{**GOOD_WAR, "response_mask": [1, 1]}], 1, "expected 1 entries in 'response_mask', got 2"),
        ("war", [{**GOOD_WAR, "response_mask": [0.5]}], 1, "expected only 0 and 1"),
        ("war", [{**GOOD_WAR, "prompt_ids": [-1]}], 1, "expected token ids"),
        ("war", [{**GOOD_WAR, "tool_seconds": ["x"]}], 1, "expected 'tool_seconds' to be seconds"),
        ("war", [{"version": 1, "group": "g", "prompt_ids": [], "turns": [{}]}], 1, "expected key 'model_ids'"),
    ],
)
def test_bad_lines_name_file_line_and_expectation(
    tmp_path: Path, fmt: str, content: str | list[dict[str, Any]], line: int, expected: str
) -> None:
    path = write(tmp_path / f"bad{READERS[fmt].endings[0]}", content)
    with pytest.raises(TraceFormatError, match=expected) as caught:
        read_traces(path, fmt)
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert str(caught.value).startswith(f"{path}:{line}: expected")


def test_files_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"messages": []}\n\xff\xfe')
    with pytest.raises(TraceFormatError, match=r"a\.jsonl:2: expected UTF-8"):
        read_traces(tmp_path / "a.jsonl", "messages")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}" * 100)[:-9])
    with pytest.raises(TraceFormatError, match="whole gzip"):
        read_traces(tmp_path / "a.jsonl.gz", "messages")


def test_wrong_paths_and_formats(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--format tau: not one of tau-bench, lmcache"):
        read_traces(tmp_path, "tau")
    with pytest.raises(ValueError, match=r"no file ending in \.traj"):
        read_traces(tmp_path, "swe-agent")
    with pytest.raises(FileNotFoundError, match="no such trace file"):
        read_traces(tmp_path / "nope.json", "tau-bench")
    with pytest.raises(ValueError, match="no tau-bench trajectory in"):
        read_traces(write(tmp_path / "e.json", "[ ]"), "tau-bench")


def test_trace_refuses_mixed_forms() -> None:
    with pytest.raises(ValueError, match="mixes length and text"):
        Trace("t", "", Length(1), (Turn(Text(), Text()),), "x")
    with pytest.raises(ValueError, match="has no turns"):
        Trace("t", "", Length(1), (), "x")
    with pytest.raises(ValueError, match="block_size=0"):
        Trace("t", "", Length(1), (Turn(Length(1), Length(0)),), "x", block_hashes=(1,))
