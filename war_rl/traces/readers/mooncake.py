# SPDX-License-Identifier: Apache-2.0
"""Mooncake request traces: JSONL with lengths and block identities, no text.

Keys: ``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one per started block of 512 prompt tokens; an id
stands for the block and everything before it), and ``timestamp`` (milliseconds).

Lines are single requests. A request that contains the last full block of an earlier one, a block nobody had used
before that one, and is long enough to hold its prompt and its output, is that trajectory's next turn. Timestamps do not
part tool time from generation time, so tool seconds are unknown; there is no group identity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from war_rl.traces.model import Length, Notes, Trace, TraceFormatError, Turn
from war_rl.traces.readers.common import field as get
from war_rl.traces.readers.common import json_lines

BLOCK_SIZE = 512
"""Tokens per block of ``hash_ids``, fixed by the published traces."""


@dataclass(slots=True)
class _Request:
    prompt: int
    output: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Chain:
    line: int
    requests: list[_Request] = field(default_factory=list)


def read(path: Path, notes: Notes) -> Iterator[Trace]:
    """Trajectories of one file, in order of their first request."""
    chains: list[_Chain] = []
    ends: dict[int, _Chain] = {}  # last full block of a chain's last prompt, if that chain was its first user
    seen: set[int] = set()
    for line, record in json_lines(path):
        request = _request(record, path, line)
        full = request.blocks[: request.prompt // BLOCK_SIZE]
        end = _continued_block(request, full, ends)
        if end is None:
            chain = _Chain(line)
            chains.append(chain)
        else:
            # A second continuation of the same turn is a branch, so a trajectory of its own.
            chain = ends.pop(end)
            notes["request joined to an earlier one as its next turn"] += 1
        chain.requests.append(request)
        if full and (full[-1] == end or full[-1] not in seen):
            ends[full[-1]] = chain
        seen.update(request.blocks)
    for chain in chains:
        yield _trace(chain, path)


def _request(record: dict[str, object], path: Path, line: int) -> _Request:
    prompt = get(record, "input_length", int, "the prompt's tokens", path, line)
    output = get(record, "output_length", int, "the generated tokens", path, line)
    blocks = get(record, "hash_ids", list, "the array of block ids", path, line)
    if prompt < 1 or output < 0:
        raise TraceFormatError(path, line, f"expected input_length >= 1 and output_length >= 0, got {prompt}, {output}")
    if not all(isinstance(block, int) and not isinstance(block, bool) for block in blocks):
        raise TraceFormatError(path, line, "expected whole numbers in 'hash_ids'")
    needed = -(-prompt // BLOCK_SIZE)
    if len(blocks) != needed:
        raise TraceFormatError(
            path,
            line,
            f"expected {needed} hash_ids for {prompt} tokens in blocks of {BLOCK_SIZE}, got {len(blocks)}",
        )
    return _Request(prompt, output, tuple(blocks))


def _continued_block(request: _Request, full: tuple[int, ...], ends: dict[int, _Chain]) -> int | None:
    """The block that ties the request to an earlier trajectory, None if it starts one."""
    for block in reversed(full):
        if block in ends:
            last = ends[block].requests[-1]
            return block if request.prompt >= last.prompt + last.output else None
    return None


def _trace(chain: _Chain, path: Path) -> Trace:
    requests = chain.requests
    turns = []
    for request, following in zip(requests, [*requests[1:], None], strict=True):
        env = 0 if following is None else following.prompt - request.prompt - request.output
        turns.append(Turn(Length(request.output), Length(env)))
    return Trace(
        id=f"{path.name.split('.')[0]}:{chain.line}",
        group="",
        prompt=Length(requests[0].prompt),
        turns=tuple(turns),
        source="mooncake",
        block_hashes=requests[-1].blocks,
        block_size=BLOCK_SIZE,
    )
