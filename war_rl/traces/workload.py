# SPDX-License-Identifier: Apache-2.0
"""Trajectories in tokens -> the work a closed-loop replayer does, with everything that was left out reported.

The steps, in order: give every trajectory a group, take the wanted groups, members and turns, cut what does not fit the
context, and settle how long the environment takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from war_rl.traces.model import Trace
from war_rl.traces.synthetic import SyntheticTokens
from war_rl.traces.tokenise import ChatFormat, Renderer, Tokenizer, TokenTrace, TokenTurn
from war_rl.types import TokenArray, TrajectoryId


@dataclass(frozen=True, slots=True, eq=False)
class WorkTurn:
    """One turn to replay.

    Attributes:
        model_tokens: int32 [m], m >= 1: what the engine must commit in forced mode; its length in free mode.
        env_tokens: int32 [e] appended afterwards; empty for the last turn, after which nothing is sent.
        tool_seconds: wait between this turn's end and the next one's start, in seconds.
    """

    model_tokens: TokenArray
    env_tokens: TokenArray
    tool_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class WorkItem:
    """One trajectory to replay.

    Attributes:
        trajectory: identity, step 0; replace the step for every run so that no run's text is another's.
        trace_id: id of the recording it came from.
        prompt_tokens: int32 [p], p >= 1: the first turn's prompt.
        turns: in order; at least one.
    """

    trajectory: TrajectoryId
    trace_id: str
    prompt_tokens: TokenArray
    turns: tuple[WorkTurn, ...]

    @property
    def generated_tokens(self) -> int:
        """Tokens the engine generates for the whole trajectory."""
        return sum(len(turn.model_tokens) for turn in self.turns)

    @property
    def requested_prompt_tokens(self) -> int:
        """Prompt tokens summed over all turns' requests: what is then cached and what computed, together."""
        total, context = 0, len(self.prompt_tokens)
        for turn in self.turns:
            total += context
            context += len(turn.model_tokens) + len(turn.env_tokens)
        return total

    def tokens(self) -> TokenArray:
        """The whole trajectory as one sequence, int32 [context length at its end]."""
        parts = [self.prompt_tokens, *(part for t in self.turns for part in (t.model_tokens, t.env_tokens))]
        return np.concatenate(parts)


@dataclass(frozen=True)
class WorkloadSpec:
    """What of the recordings is replayed."""

    groups: int | None = None
    """How many groups, in order of appearance; None takes all. Unit: groups."""
    n: int | None = None
    """How many trajectories of each group; groups with fewer are passed over; None takes all. Unit: trajectories."""
    turns: int | None = None
    """Most turns of a trajectory; None keeps all. Unit: turns."""
    max_context: int | None = None
    """Longest prompt plus generation of any turn; longer trajectories are cut. None cuts nothing. Unit: tokens."""
    tool_scale: float = 1.0
    """Factor on recorded tool times; 0 replays without waiting. Unit: none."""
    default_tool_seconds: float = 0.0
    """Wait, before scaling, where the recording has no tool time. Unit: seconds."""
    tool_range: tuple[float, float] | None = None
    """Made-up waits, evenly spread between the two, in place of the recorded ones; the same ones for the same
    trajectory. Unit: seconds."""

    def __post_init__(self) -> None:
        for name, low in (("groups", 1), ("n", 1), ("turns", 1), ("max_context", 2)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"{name}={value}: must be at least {low}, or left out to take everything")
        for name in ("tool_scale", "default_tool_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}: must be a number >= 0")
        if self.tool_range and not 0 <= self.tool_range[0] <= self.tool_range[1] < float("inf"):
            raise ValueError(f"tool_range={self.tool_range}: must be two numbers >= 0, the smaller one first")


@dataclass(slots=True)
class Cut:
    """What did not fit into ``max_context``. Trajectories that were cut, and the turns and tokens that fell away."""

    trajectories: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    model_tokens: int = 0
    env_tokens: int = 0


@dataclass(slots=True)
class Workload:
    """The work, and how it came about.

    Attributes:
        items: group by group.
        cut: what ``max_context`` took away.
        notes: what else was left out or interpreted, by reason.
    """

    items: list[WorkItem]
    cut: Cut = field(default_factory=Cut)
    notes: dict[str, int] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Plain numbers for the report's ``workload``. Counts in tokens, times in seconds."""
        turns = [turn for item in self.items for turn in item.turns]
        return {
            "trajectories": len(self.items),
            "groups": len({item.trajectory.uid for item in self.items}),
            "turns": len(turns),
            "prompt_tokens": sum(len(item.prompt_tokens) for item in self.items),
            "generated_tokens": sum(item.generated_tokens for item in self.items),
            "env_tokens": sum(len(turn.env_tokens) for turn in turns),
            "requested_prompt_tokens": sum(item.requested_prompt_tokens for item in self.items),
            "longest_context": max(len(item.tokens()) for item in self.items),
            "working_set_tokens": working_set_tokens(self.items),
            "tool_seconds": sum(turn.tool_seconds for turn in turns),
            "cut": asdict(self.cut),
            "notes": dict(self.notes),
        }


def tokenise_traces(
    traces: Iterable[Trace], tokenizer: Tokenizer | None, synthetic: SyntheticTokens, chat: ChatFormat | None = None
) -> list[TokenTrace]:
    """Every trace in tokens: text through the tokenizer, ids as recorded, lengths as synthetic tokens.

    Raises:
        ValueError: text without a tokenizer, or a recorded id at or beyond ``synthetic.high`` (another tokenizer's).
    """
    renderer = Renderer(tokenizer, chat) if tokenizer is not None else None
    out = []
    for trace in traces:
        if trace.kind == "length":
            out.append(synthetic.trace(trace))
            continue
        if renderer is None:
            raise ValueError(f"trace {trace.id!r} is {trace.kind}: a tokenizer is needed")
        made = renderer.trace(trace)
        top = max(int(part.max(initial=0)) for part in _parts(made))
        if top >= synthetic.high:
            raise ValueError(
                f"trace {trace.id!r} has token id {top}, the model's vocabulary ends at {synthetic.high}: "
                "it was recorded with another tokenizer; replay it on that model, or a recording that has text"
            )
        out.append(made)
    return out


def _parts(trace: TokenTrace) -> list[TokenArray]:
    return [trace.prompt, *(part for turn in trace.turns for part in (turn.model, turn.env))]


def build_workload(traces: Sequence[TokenTrace], spec: WorkloadSpec, notes: dict[str, int] | None = None) -> Workload:
    """Select, cut and time the trajectories.

    Args:
        traces: in tokens; the same selection always gives the same work.
        spec: what to take.
        notes: the reader's notes, carried into the workload.

    Raises:
        ValueError: fewer groups of the wanted size than asked for, or nothing left; the message says what there is.
    """
    work = Workload([], notes=dict(notes or {}))
    for group, members in _select(traces, spec):
        for session, trace in enumerate(members):
            prompt, turns = _without_empty_turns(trace, work.notes)
            kept = turns[: spec.turns] if spec.turns else turns
            _note(work.notes, "turns beyond --turns left out", len(turns) - len(kept))
            prompt, kept = _fit(prompt, kept, spec.max_context, work.cut)
            if not kept:
                _note(work.notes, "trajectory without generated tokens left out", 1)
                continue
            identity = TrajectoryId(group, session, 0, group)
            work.items.append(WorkItem(identity, trace.id, prompt, _timed(kept, spec, work.notes, trace.id)))
    if not work.items:
        raise ValueError("the selection leaves no trajectory to replay")
    return work


def _note(notes: dict[str, int], reason: str, count: int) -> None:
    if count:
        notes[reason] = notes.get(reason, 0) + count


def _select(traces: Sequence[TokenTrace], spec: WorkloadSpec) -> list[tuple[str, list[TokenTrace]]]:
    groups: dict[str, list[TokenTrace]] = {}
    for trace in traces:
        groups.setdefault(group_of(trace), []).append(trace)
    wanted = spec.n or 1
    large = [(name, members[: spec.n]) for name, members in groups.items() if len(members) >= wanted]
    if len(large) < (spec.groups or 1):
        sizes = sorted((len(members) for members in groups.values()), reverse=True)
        # The size the recordings could serve for as many groups as were asked for.
        possible = sizes[spec.groups - 1] if spec.groups and spec.groups <= len(sizes) else 0
        hint = f"--n {possible} would work" if possible else f"--groups {max(len(large), 1)} is the most"
        raise ValueError(
            f"--groups {spec.groups or 1} --n {wanted}: the recordings have {len(large)} groups of at least {wanted} "
            f"trajectories ({len(groups)} groups in all, the largest of {sizes[0] if sizes else 0}); {hint}"
        )
    return large[: spec.groups]


def group_of(trace: TokenTrace) -> str:
    """The trajectory's group; without a recorded one, trajectories with the same first prompt are siblings."""
    if trace.group:
        return trace.group
    return "prompt:" + blake2b(trace.prompt.astype("<i4").tobytes(), digest_size=8).hexdigest()


def _without_empty_turns(trace: TokenTrace, notes: dict[str, int]) -> tuple[TokenArray, list[TokenTurn]]:
    """An engine cannot be asked for nothing: what follows an empty generation joins the text before it."""
    prompt, turns = trace.prompt, list[TokenTurn]()
    for turn in trace.turns:
        if len(turn.model):
            turns.append(turn)
            continue
        _note(notes, "turn without generated tokens joined to the one before", 1)
        if turns:
            last = turns[-1]
            turns[-1] = TokenTurn(last.model, np.concatenate([last.env, turn.env]), last.tool_seconds)
        else:
            prompt = np.concatenate([prompt, turn.env])
    return prompt, turns


def _fit(prompt: TokenArray, turns: list[TokenTurn], limit: int | None, cut: Cut) -> tuple[TokenArray, list[TokenTurn]]:
    """Ends the trajectory before the first turn that does not fit.

    A first turn that does not fit is shortened: a quarter of the context at least is left to its generation (less if it
    is shorter), and the prompt keeps its head, which is what siblings share.
    """
    if limit is None or not turns:
        return prompt, turns
    kept: list[TokenTurn] = []
    context = len(prompt)
    for turn in turns:
        if context + len(turn.model) > limit:
            break
        kept.append(turn)
        context += len(turn.model) + len(turn.env)
    if len(kept) == len(turns):
        return prompt, turns
    cut.trajectories += 1
    if not kept:
        room = min(len(turns[0].model), max(1, limit // 4))
        head = prompt[: max(1, limit - room)]
        first = turns[0].model[: limit - len(head)]
        cut.prompt_tokens += len(prompt) - len(head)
        cut.model_tokens += len(turns[0].model) - len(first)
        cut.env_tokens += len(turns[0].env)
        prompt = head
        kept = [TokenTurn(first, turns[0].env[:0], turns[0].tool_seconds)]
    dropped = turns[len(kept) :]
    cut.turns += len(dropped)
    cut.model_tokens += sum(len(turn.model) for turn in dropped)
    cut.env_tokens += sum(len(turn.env) for turn in dropped)
    return prompt, kept


def _timed(turns: list[TokenTurn], spec: WorkloadSpec, notes: dict[str, int], name: str) -> tuple[WorkTurn, ...]:
    out = []
    for number, turn in enumerate(turns):
        if number + 1 == len(turns):
            out.append(WorkTurn(turn.model, turn.env[:0], 0.0))
            continue
        if spec.tool_range:
            out.append(WorkTurn(turn.model, turn.env, _made_up(spec.tool_range, f"{name}/{number}")))
            continue
        known = turn.tool_seconds
        if known is None:
            _note(notes, "tool time unknown: default_tool_seconds used", 1)
        wait = spec.default_tool_seconds if known is None else known
        out.append(WorkTurn(turn.model, turn.env, wait * spec.tool_scale))
    return tuple(out)


def _made_up(bounds: tuple[float, float], name: str) -> float:
    """A number between the bounds that depends on the name alone."""
    share = int.from_bytes(blake2b(name.encode(), digest_size=6).digest(), "big") / (1 << 48)
    return bounds[0] + share * (bounds[1] - bounds[0])


def parse_tool_seconds(text: str) -> float | tuple[float, float]:
    """What ``--tool-seconds`` says: a factor on the recorded times (``recorded`` is 1, ``zero`` 0, ``0.5x`` half of
    them), or the range of made-up times (``0-2``, in seconds).

    Raises:
        ValueError: anything else.
    """
    named = {"recorded": 1.0, "zero": 0.0, "0": 0.0}
    if text in named:
        return named[text]
    if made_up := re.fullmatch(r"(\d+\.?\d*)-(\d+\.?\d*)", text):
        low, high = (float(number) for number in made_up.groups())
        if low <= high:
            return low, high
    try:
        factor = float(text[:-1]) if text.endswith("x") else -1.0
    except ValueError:
        factor = -1.0
    if not 0 <= factor < float("inf"):
        raise ValueError(
            f"--tool-seconds {text}: expected recorded, zero, a factor such as 0.5x, or seconds such as 0-2"
        )
    return factor


def working_set_tokens(items: Iterable[WorkItem], block_size: int = 16) -> int:
    """KV tokens that hold all trajectories at their ends at once, shared prefixes counted once.

    Counted in started blocks of ``block_size`` tokens, as a prefix cache stores them.
    """
    blocks: set[bytes] = set()
    for item in items:
        tokens = item.tokens().astype("<i4")
        chain = b""
        for at in range(0, len(tokens), block_size):
            chain = blake2b(chain + tokens[at : at + block_size].tobytes(), digest_size=12).digest()
            blocks.add(chain)
    return len(blocks) * block_size


def least_prefill_tokens(items: Iterable[WorkItem], block_size: int = 16) -> int:
    """Prompt tokens that must be computed whatever the schedule: the bound for ``prefill_computed_tokens``.

    It is what one replica with an endless cache computes if each turn comes at the best moment. A prefix cache serves
    whole blocks and never a prompt's last token, so of a prompt of p tokens the ``p - (p - 1) // block_size *
    block_size`` last ones are computed in any case. Of the blocks before them, each distinct one (with all that
    precedes it) is computed at least once over all turns and trajectories, unless some turn makes it anyhow: those
    from a prompt's last block on that fill up while the turn generates. The last token a turn generates is sampled but
    never computed.
    """
    tails = 0
    wanted: set[bytes] = set()
    made: set[bytes] = set()
    for item in items:
        data = item.tokens().astype("<i4")
        chain, names = b"", []
        for at in range(0, len(data) - block_size + 1, block_size):
            chain = blake2b(chain + data[at : at + block_size].tobytes(), digest_size=12).digest()
            names.append(chain)
        prompt = len(item.prompt_tokens)
        for turn in item.turns:
            served = (prompt - 1) // block_size
            tails += prompt - served * block_size
            wanted.update(names[:served])
            made.update(names[served : (prompt + len(turn.model_tokens) - 1) // block_size])
            prompt += len(turn.model_tokens) + len(turn.env_tokens)
    return tails + len(wanted - made) * block_size
