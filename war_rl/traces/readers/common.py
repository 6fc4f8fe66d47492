# SPDX-License-Identifier: Apache-2.0
"""What several readers need: JSON with line numbers in its errors, and chat messages cut into turns."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from war_rl.traces.model import Message, Notes, Text, TraceFormatError, Turn


def read_text(path: Path) -> str:
    """The file's text, unzipped when its name ends in ``.gz``.

    Raises:
        TraceFormatError: the file is not UTF-8 text, or not a whole gzip file.
    """
    raw = path.read_bytes()
    try:
        return (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TraceFormatError(path, line, "expected UTF-8 text") from error
    except (OSError, EOFError) as error:
        raise TraceFormatError(path, 1, f"expected a whole gzip file ({error})") from error


def json_lines(path: Path, cut: Notes | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each non-empty line of a JSONL file.

    With ``cut``, a last line that does not end and is not JSON is noted there and left out: a killed writer's.

    Raises:
        TraceFormatError: a line is not JSON or not an object.
    """
    lines = read_text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            if cut is not None and number == len(lines):
                cut["last line cut short by its writer's death, skipped"] += 1
                return
            raise TraceFormatError(path, number, f"expected one JSON object per line ({error.msg})") from error
        yield number, as_object(value, path, number, "the line")


def json_array(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number where it starts, element) of a JSON document that is one array.

    Elements are decoded one at a time, so that an error can name the line its element starts on.

    Raises:
        TraceFormatError: the document is not an array, is cut short, or has text after its end.
    """
    text = read_text(path)
    decoder = json.JSONDecoder()
    at, line = _skip_space(text, 0), 1
    if text[at : at + 1] != "[":
        raise TraceFormatError(path, text.count("\n", 0, at) + 1, "expected a JSON array ([...]) of trajectories")
    seen, at = 0, _skip_space(text, at + 1)
    closed = text[at : at + 1] == "]"
    while not closed:
        line, seen = line + text.count("\n", seen, at), at
        try:
            element, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise TraceFormatError(path, error.lineno, f"expected a JSON value ({error.msg})") from error
        yield line, element
        at = _skip_space(text, end)
        if text[at : at + 1] not in (",", "]"):
            raise TraceFormatError(path, text.count("\n", 0, at) + 1, "expected ',' or ']' after an array element")
        closed = text[at] == "]"
        at = at if closed else _skip_space(text, at + 1)
    if text[at + 1 :].strip():
        raise TraceFormatError(path, text.count("\n", 0, at) + 1, "expected nothing after the array's ']'")


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def as_object(value: Any, path: Path, line: int, what: str) -> dict[str, Any]:
    """``value`` as a JSON object, or a TraceFormatError that says what it was."""
    if not isinstance(value, dict):
        raise TraceFormatError(path, line, f"expected {what} to be a JSON object, got {type_name(value)}")
    return value


def field(
    record: Mapping[str, Any], key: str, kinds: type | tuple[type, ...], words: str, path: Path, line: int
) -> Any:
    """``record[key]`` if it has one of the types.

    Raises:
        TraceFormatError: missing or of another type; ``words`` says what was expected.
    """
    if key not in record:
        raise TraceFormatError(path, line, f"expected key {key!r} ({words}); keys here: {', '.join(record) or 'none'}")
    value = record[key]
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    # A JSON true is an int to Python, never to a recording.
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise TraceFormatError(path, line, f"expected {key!r} to be {words}, got {type_name(value)}")
    return value


def seconds(value: Any, key: str, path: Path, line: int) -> float | None:
    """A duration in seconds; None stays None.

    Raises:
        TraceFormatError: not a number, negative, or not finite.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise TraceFormatError(path, line, f"expected {key!r} to be seconds (a number >= 0), got {value!r:.40}")
    return float(value)


def type_name(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "an array", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


def parse_message(value: Any, path: Path, line: int, where: str) -> Message:
    """One OpenAI-style message; text parts are joined and tool calls become text after the content.

    Raises:
        TraceFormatError: no role, or content that is neither text, text parts nor null.
    """
    record = as_object(value, path, line, where)
    role = field(record, "role", str, f"the role of {where}", path, line)
    text = content_text(record.get("content"), path, line, where)
    calls = record.get("tool_calls") or []
    if isinstance(record.get("function_call"), dict):
        calls = [{"function": record["function_call"]}]
    if not isinstance(calls, list):
        raise TraceFormatError(path, line, f"expected 'tool_calls' of {where} to be an array, got {type_name(calls)}")
    rendered = [_tool_call(call, path, line, where) for call in calls]
    return Message(role, "\n".join(part for part in (text, *rendered) if part))


def content_text(content: Any, path: Path, line: int, where: str) -> str:
    """The text of a message's content: text as it is, the text parts of a list, "" for null."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text", ""), str) for p in content):
        return "".join(part.get("text", "") for part in content)
    raise TraceFormatError(path, line, f"expected 'content' of {where} to be text, text parts or null")


def _tool_call(call: Any, path: Path, line: int, where: str) -> str:
    function = as_object(call, path, line, f"a tool call of {where}").get("function")
    function = as_object(function, path, line, f"'function' of a tool call of {where}")
    name = field(function, "name", str, "the called function's name", path, line)
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    # The layout most chat templates with tools train on; arguments stay as the model wrote them.
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def split_messages(messages: Sequence[Message], waits: Sequence[float | None]) -> tuple[Text, tuple[Turn, ...]]:
    """Messages cut at the assistant's: everything before the first is the prompt, everything after each its answer.

    Args:
        messages: the conversation in order.
        waits: per message, the seconds it took the environment to produce it; None when unknown.

    Returns:
        the prompt and the turns; no turns when the assistant never spoke. A turn's ``tool_seconds`` is the sum of the
        known waits of its answer, None when none is known.
    """
    starts = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not starts:
        return Text(tuple(messages)), ()
    turns = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        known = [wait for wait in waits[start + 1 : end] if wait is not None]
        turns.append(
            Turn(Text((messages[start],)), Text(tuple(messages[start + 1 : end])), sum(known) if known else None)
        )
    return Text(tuple(messages[: starts[0]])), tuple(turns)
