# SPDX-License-Identifier: Apache-2.0
"""Replay recorded trajectories through the drafter without an engine, and say what drafting would have brought.

Members of a group are in flight together, ``concurrency`` of them on each replica; groups follow each other. Time is
virtual: a step lasts what the step-time table says for one token per running request plus its drafts. A turn's first
token comes from prefill, as in an engine: it is no verify step and costs the same with and without drafting, so it is
left out. Prefill and environments take no time.

Sides: ``war`` is this package's drafter, one per replica. It learns what other replicas wrote as it is written (feed
``live``, after ``feed_lag_s`` of virtual time) or when a turn finishes (feed ``turn``).
``library`` is the suffix cache of arctic-inference as vLLM configures it (a fresh request per turn), but one for all
replicas, which flatters it. ``oracle`` has war's text and knows the truth: of all occurrences that the index found it
takes the best one at exactly the right length. ``length``, on demand, has war's choice of tokens at exactly the right
length: what is between it and ``war`` is the budget's, between it and ``oracle`` the choice's.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from war_rl.config import ConfigError, SpecConfig, load_config
from war_rl.spec.calibration import Calibration
from war_rl.spec.corpus import Corpus, Entry
from war_rl.spec.drafter import Drafter, RequestView
from war_rl.spec.index import PagedIndex
from war_rl.steptime import CPU_TABLE, StepTable
from war_rl.traces.workload import WorkItem
from war_rl.types import FeedItem, TokenArray

SIDES = ("war", "library", "oracle", "length")
DEFAULT_SIDES = SIDES[:3]
SLICE_S = 3600.0
"""Ingestion is not bounded in a replay: its clock is virtual."""


@dataclass(slots=True)
class Tally:
    """What one side did, summed over verify steps. A step here is one request's part of an engine step."""

    steps: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    by_source: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    by_match: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))

    def to_json(self) -> dict[str, Any]:
        """Figures of the side; in the two tables ``drafted`` and ``accepted`` tokens."""
        steps = max(self.steps, 1)
        return {
            "committed_tokens_per_step": self.committed / steps,
            "drafted_tokens_per_step": self.drafted / steps,
            "modelled_speedup": self.plain_seconds / self.seconds if self.seconds else 1.0,
            "acceptance_rate": self.accepted / self.drafted if self.drafted else 0.0,
            "steps": self.steps,
            "by_source": _table(self.by_source),
            "by_match": _table(self.by_match),
        }


def _table(counts: Mapping[str, list[int]]) -> dict[str, dict[str, int]]:
    return {name: {"drafted": d, "accepted": a} for name, (d, a) in sorted(counts.items())}


class _Member:
    """One trajectory on its way through its turns."""

    def __init__(self, item: WorkItem) -> None:
        self.item = item
        self.text = item.tokens()
        self.spans: list[tuple[int, int]] = []
        at = len(item.prompt_tokens)
        for turn in item.turns:
            self.spans.append((at, at + len(turn.model_tokens)))
            at += len(turn.model_tokens) + len(turn.env_tokens)
        self.turn = 0
        self.at = 0
        self.draft: list[int] = []

    @property
    def done(self) -> bool:
        return self.turn >= len(self.spans)

    @property
    def key(self) -> str:
        t = self.item.trajectory
        return f"{t.uid}/{t.session}/{self.turn}"

    def prefilled(self) -> bool:
        return self.at > self.spans[self.turn][0]

    def commit(self) -> tuple[int, int]:
        """Take one step; returns (tokens committed, draft tokens accepted)."""
        start, end = self.spans[self.turn]
        if not self.prefilled():
            self.at = start + 1
            return 1, 0
        accepted = 0
        for token in self.draft:
            if self.at + accepted >= end or token != self.text[self.at + accepted]:
                break
            accepted += 1
        committed = min(accepted + 1, end - self.at)
        self.at += committed
        return committed, accepted


class Side(Protocol):
    """A way of drafting, over all replicas."""

    def wrote(self, replica: int, member: _Member, start: int, now: float, turn_over: bool) -> None:
        """A member's text has grown from ``start`` to ``at`` (``now`` in virtual seconds)."""

    def draft(
        self, replica: int, members: Sequence[_Member], committed: Sequence[int], seconds: float | None, now: float
    ) -> None:
        """Set ``draft`` of every member from its text up to ``at``."""

    def group_over(self) -> None:
        """All members of the group have finished."""

    def explain(self, replica: int, member: _Member) -> list[tuple[str, int]]:
        """Source and match length of each token of the member's draft."""


class _Fanout:
    """Text on its way from one replica to the others, in virtual time."""

    def __init__(self, replicas: int, live: bool, lag_s: float) -> None:
        self._waiting: list[deque[tuple[float, FeedItem]]] = [deque() for _ in range(replicas)]
        self._live = live
        self._lag_s = lag_s

    def wrote(self, replica: int, member: _Member, start: int, now: float, turn_over: bool) -> None:
        if not self._live and not turn_over:
            return
        first = start if self._live else (member.spans[member.turn - 1][1] if member.turn else 0)
        item = FeedItem(member.item.trajectory, first, member.text[first : member.at])
        for other, waiting in enumerate(self._waiting):
            if other != replica:
                waiting.append((now + self._lag_s, item))

    def due(self, replica: int, now: float) -> list[FeedItem]:
        waiting, items = self._waiting[replica], []
        while waiting and waiting[0][0] <= now:
            items.append(waiting.popleft()[1])
        return items


class WarSide:
    """One :class:`Drafter` per replica, fed with the turns that finish elsewhere."""

    def __init__(
        self, replicas: int, spec: SpecConfig, stops: frozenset[int], step_time: StepTable | None, fanout: _Fanout
    ) -> None:
        self._fanout = fanout
        self.drafters = [
            Drafter(spec, stop_token_ids=stops, clock=lambda: 0.0, step_time=step_time, trust_prior=True)
            for _ in range(replicas)
        ]
        self.seconds: list[float] = []

    def draft(
        self, replica: int, members: Sequence[_Member], committed: Sequence[int], seconds: float | None, now: float
    ) -> None:
        views = [
            RequestView(m.key, m.item.trajectory, m.text[: m.at], *_span(m, c), True, m.spans[m.turn][1] - m.at)
            for m, c in zip(members, committed, strict=True)
        ]
        self.drafters[replica].feed(self._fanout.due(replica, now))
        begun = time.perf_counter()
        drafts = self.drafters[replica].propose(views, seconds)
        self.seconds.append((time.perf_counter() - begun) / len(views))
        for member, draft in zip(members, drafts, strict=True):
            member.draft = draft

    def wrote(self, replica: int, member: _Member, start: int, now: float, turn_over: bool) -> None:
        self._fanout.wrote(replica, member, start, now, turn_over)

    def group_over(self) -> None:
        for replica, drafter in enumerate(self.drafters):
            drafter.feed(self._fanout.due(replica, float("inf")))
            while drafter.idle():
                pass

    def explain(self, replica: int, member: _Member) -> list[tuple[str, int]]:
        return self.drafters[replica].explain(member.key)


def _span(member: _Member, committed: int) -> tuple[int, int]:
    return member.spans[member.turn][0], committed


class LibrarySide:
    """The library's cache with vLLM's defaults: depth 24, drafts as long as the match, 0.1 per token."""

    DEPTH = 24
    MIN_PROB = 0.1
    CACHED = 10_000

    def __init__(self) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-untyped,unused-ignore]

        self._cache: Any = SuffixDecodingCache(self.DEPTH, self.CACHED)
        self._at: dict[str, int] = {}

    def draft(
        self, replica: int, members: Sequence[_Member], committed: Sequence[int], seconds: float | None, now: float
    ) -> None:
        for member in members:
            start = member.spans[member.turn][0]
            if member.key not in self._at:
                self._cache.start_request(member.key, member.text[:start])
                self._at[member.key] = start
            self._cache.add_active_response(member.key, member.text[self._at[member.key] : member.at])
            self._at[member.key] = member.at
            tail = member.text[max(0, member.at - self.DEPTH) : member.at]
            found = self._cache.speculate(member.key, tail, self.DEPTH, 1.0, 0.0, self.MIN_PROB)
            member.draft = list(found.token_ids)

    def wrote(self, replica: int, member: _Member, start: int, now: float, turn_over: bool) -> None:
        if turn_over and member.key in self._at:
            self._cache.add_active_response(member.key, member.text[self._at.pop(member.key) : member.at])
            self._cache.stop_request(member.key)

    def group_over(self) -> None:
        pass

    def explain(self, replica: int, member: _Member) -> list[tuple[str, int]]:
        return []


class OracleSide:
    """War's text with perfect choice among the occurrences found, and perfect length."""

    def __init__(self, replicas: int, spec: SpecConfig, fanout: _Fanout) -> None:
        self._fanout = fanout
        self._most = spec.max_draft_tokens
        self._corpora = [
            Corpus(spec.memory_mb << 20, spec.window_steps, lambda: 0.0, PagedIndex) for _ in range(replicas)
        ]
        self._entries: dict[str, Entry] = {}

    def draft(
        self, replica: int, members: Sequence[_Member], committed: Sequence[int], seconds: float | None, now: float
    ) -> None:
        corpus = self._corpora[replica]
        corpus.feed(self._fanout.due(replica, now))
        corpus.ingest(SLICE_S)
        for member in members:
            entry = self._entries.get(member.key)
            if entry is None:
                entry = corpus.enter(member.key, member.item.trajectory, member.text[: member.at])
                self._entries[member.key] = entry
            corpus.extend(entry, member.text[: member.at], SLICE_S)
            end = member.spans[member.turn][1]
            truth = member.text[member.at : min(end, member.at + self._most)]
            assert isinstance(corpus.index, PagedIndex)
            member.draft = truth[: self._right(corpus.index, entry.slot, truth)].tolist()

    @staticmethod
    def _right(index: PagedIndex, slot: int, truth: TokenArray) -> int:
        """How many of the next tokens [m] perfect choice gets right."""
        return index.longest_right(slot, truth)

    def wrote(self, replica: int, member: _Member, start: int, now: float, turn_over: bool) -> None:
        entry = self._entries.pop(member.key, None) if turn_over else None
        if entry is not None:
            self._corpora[replica].extend(entry, member.text[: member.at], SLICE_S)
            self._corpora[replica].leave(entry)
        self._fanout.wrote(replica, member, start, now, turn_over)

    def group_over(self) -> None:
        for replica, corpus in enumerate(self._corpora):
            corpus.feed(self._fanout.due(replica, float("inf")))
            corpus.ingest(SLICE_S)

    def explain(self, replica: int, member: _Member) -> list[tuple[str, int]]:
        return []


class LengthSide(OracleSide):
    """War's text and war's choice of tokens (which learns nothing: votes alone decide it), with perfect length."""

    @staticmethod
    def _right(index: PagedIndex, slot: int, truth: TokenArray) -> int:
        if not len(truth):
            return 0
        cells = Calibration().cells
        found = index.predict([slot], [len(truth)], cells, np.zeros(0, np.int64), 0.0, len(truth))
        right = found.tokens[0, : int(found.counts[0])] == truth[: int(found.counts[0])]
        return int(np.argmin(right)) if not right.all() else len(right)


def replay(
    trajectories: Sequence[WorkItem],
    sides: Sequence[str] = DEFAULT_SIDES,
    step_table: StepTable = CPU_TABLE,
    *,
    spec: SpecConfig | None = None,
    concurrency: int = 1,
    stop_token_ids: frozenset[int] = frozenset(),
    exact_step_time: bool = False,
    feed: str = "live",
    feed_lag_s: float = 0.0,
) -> dict[str, Any]:
    """Replay the trajectories once for every side.

    Args:
        trajectories: group by group; members of one group have one ``trajectory.uid``.
        sides: some of :data:`SIDES`.
        step_table: seconds of a step by its tokens.
        spec: drafting settings of ``war`` and, as far as they are about text, of ``oracle``.
        concurrency: running requests per replica; a group has as many replicas as that takes.
        stop_token_ids: end-of-turn tokens.
        exact_step_time: give ``war`` the table instead of letting it fit a model to the steps it sees.
        feed: ``live`` or ``turn``: when text reaches other replicas.
        feed_lag_s: how much later still, in virtual seconds.

    Returns:
        ``{"sides": {side: figures}, "trajectories":, "generated_tokens":, "concurrency":}``; tokens per request and
        verify step.

    Raises:
        ValueError: an unknown side, no trajectories, or concurrency below 1.
    """
    unknown = [side for side in sides if side not in SIDES]
    if unknown or concurrency < 1 or not trajectories:
        raise ValueError(
            f"sides={list(sides)}, concurrency={concurrency}, {len(trajectories)} trajectories: sides are "
            f"{', '.join(SIDES)}, concurrency is at least 1, and there must be something to replay"
        )
    spec = spec or SpecConfig()
    groups: dict[str, list[WorkItem]] = {}
    for item in trajectories:
        groups.setdefault(item.trajectory.uid, []).append(item)
    replicas = max(-(-len(members) // concurrency) for members in groups.values())
    result: dict[str, Any] = {
        "trajectories": len(trajectories),
        "generated_tokens": sum(item.generated_tokens for item in trajectories),
        "concurrency": concurrency,
        "sides": {},
    }
    for name in sides:
        side: Side
        fanout = _Fanout(replicas, feed == "live", feed_lag_s)
        if name == "war":
            side = WarSide(replicas, spec, stop_token_ids, step_table if exact_step_time else None, fanout)
        elif name == "library":
            side = LibrarySide()
        else:
            side = (OracleSide if name == "oracle" else LengthSide)(replicas, spec, fanout)
        tally = Tally()
        for members in groups.values():
            _fly(side, [_Member(item) for item in members], concurrency, step_table, tally)
        figures = tally.to_json()
        if isinstance(side, WarSide):
            micro = 1e6 * np.array(side.seconds)
            figures["drafting_us"] = {"mean": float(micro.mean()), "p99": float(np.percentile(micro, 99))}
        result["sides"][name] = figures
    return result


def _fly(side: Side, members: list[_Member], concurrency: int, table: StepTable, tally: Tally) -> None:
    """One group, its replicas in the order of their virtual clocks."""
    waiting = [members[i : i + concurrency] for i in range(0, len(members), concurrency)]
    clocks = [(0.0, replica) for replica in range(len(waiting))]
    while clocks:
        now, replica = heapq.heappop(clocks)
        running = [m for m in waiting[replica] if not m.done]
        seconds = _step(side, replica, running, table, tally, now)
        if any(not m.done for m in running):
            heapq.heappush(clocks, (now + seconds, replica))
    side.group_over()


def _step(side: Side, replica: int, running: list[_Member], table: StepTable, tally: Tally, now: float) -> float:
    """What one replica does between two engine steps: commit what the last one gave, draft for the next.

    Nothing is seen before the step that gave it is over. Returns the next step's seconds.
    """
    decoding = [m for m in running if m.prefilled()]
    computed = len(decoding) + sum(len(m.draft) for m in decoding)
    seconds = table.seconds(computed) if decoding else 0.0
    plain = table.seconds(len(decoding)) if decoding else 0.0
    committed = []
    for member in running:
        counted, before = member.prefilled(), member.at
        why = side.explain(replica, member) if counted and member.draft else []
        count, accepted = member.commit()
        committed.append(count)
        if not counted:  # The prompt arrives with the turn's first token.
            before = member.spans[member.turn - 1][1] if member.turn else 0
        side.wrote(replica, member, before, now, member.at >= member.spans[member.turn][1])
        if counted:
            _count(tally, member, count, accepted, why)
            # Without drafts these tokens would have taken one step each, shared by the requests of the batch.
            tally.plain_seconds += count * plain / len(decoding)
    tally.seconds += seconds
    going = []
    for member, count in zip(running, committed, strict=True):
        if member.at >= member.spans[member.turn][1]:
            member.turn += 1
            member.draft = []
        else:
            going.append((member, count))
    if going:
        pure = len(going) == len(decoding) == len(running)
        side.draft(replica, [m for m, _ in going], [c for _, c in going], seconds if pure else None, now)
    return table.seconds(sum(1 + len(m.draft) for m in running if not m.done))


def _count(tally: Tally, member: _Member, count: int, accepted: int, why: list[tuple[str, int]]) -> None:
    tally.steps += 1
    tally.committed += count
    tally.drafted += len(member.draft)
    tally.accepted += accepted
    for position, (source, match) in enumerate(why):
        good = int(position < accepted)
        for table, name in ((tally.by_source, source), (tally.by_match, _bucket(match))):
            table[name][0] += 1
            table[name][1] += good


def _bucket(match: int) -> str:
    for low, high in ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32)):
        if match <= high:
            return f"{low:02d}-{high:02d}"
    return "33+"


# -- command line -----------------------------------------------------------------------------------------------


def read_workload(path: str, fmt: str, tokenizer: str, tasks: int | None, trials: int | None) -> list[WorkItem]:
    """Trajectories of a recording as work, in the tokenizer of a model folder."""
    from transformers import AutoTokenizer  # type: ignore[import-untyped,import-not-found,unused-ignore]

    from war_rl.traces.readers import read_traces
    from war_rl.traces.synthetic import SyntheticTokens
    from war_rl.traces.workload import WorkloadSpec, build_workload, tokenise_traces

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    synthetic = SyntheticTokens(low=0, high=len(loaded))
    traces = tokenise_traces(read_traces(path, fmt), loaded, synthetic)
    return build_workload(traces, WorkloadSpec(groups=tasks, n=trials)).items


def parse_table(text: str) -> StepTable:
    """``1:23,4:28,32:80`` (tokens:milliseconds) as a table."""
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        return StepTable({int(n): float(ms) / 1000.0 for n, ms in pairs})
    except ValueError as error:
        raise ValueError(
            f"--step-table {text!r}: expected tokens:milliseconds pairs such as 1:23,4:28,32:80"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="war-rl replay",
        description="Replay recorded trajectories through the drafter without an engine: tokens committed and drafted "
        "per verify step, and the speed-up that a table of step times makes of them. docs/drafting.md explains sides "
        "and figures.",
    )
    parser.add_argument("trace", metavar="TRACE", help="file or folder of recorded trajectories")
    parser.add_argument("--format", required=True, help="tau-bench, lmcache, swe-agent, messages, mooncake, war")
    parser.add_argument(
        "--tokenizer", default="", metavar="PATH", help="folder of a Hugging Face tokenizer (the demo model's)"
    )
    parser.add_argument("--tasks", type=int, metavar="N", help="groups to take, in order (all)")
    parser.add_argument("--trials", type=int, metavar="N", help="members of each group to take (all)")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="running requests per replica (1)")
    parser.add_argument("--sides", default=",".join(DEFAULT_SIDES), help=f"some of {','.join(SIDES)} (%(default)s)")
    parser.add_argument("--policy", default="", help="war.spec.policy of side war (the configuration's default)")
    parser.add_argument(
        "--max-draft-tokens", type=int, default=0, metavar="N", help="war.spec.max_draft_tokens (its default)"
    )
    parser.add_argument("--step-table", default="", help="tokens:milliseconds pairs (1:23,4:28,8:35,16:47,32:80)")
    parser.add_argument("--exact-step-time", action="store_true", help="give war the table instead of its own fit")
    parser.add_argument(
        "--feed", default="live", choices=("live", "turn"), help="when text reaches other replicas (%(default)s)"
    )
    parser.add_argument("--feed-lag-ms", type=float, default=0.0, help="how much later still, in virtual time (0)")
    parser.add_argument("--stop", default="<|im_end|>", help="end-of-turn token (%(default)s)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``war-rl replay``. Returns 0, or 2 for arguments, a trace or a tokenizer that cannot work."""
    args = _parser().parse_args(argv)
    from war_rl.prepare import default_model_dir
    from war_rl.traces.model import TraceFormatError

    try:
        figures = _figures(args, args.tokenizer or str(default_model_dir()))
    except (ConfigError, TraceFormatError, ValueError, OSError, ModuleNotFoundError) as error:
        print(f"war-rl replay: {error}", file=sys.stderr)
        return 2
    _show(figures)
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _figures(args: argparse.Namespace, tokenizer: str) -> dict[str, Any]:
    if not Path(tokenizer).is_dir():
        # The library would take the path for the name of a repository on a hub.
        raise ValueError(f"no tokenizer at {tokenizer}: `war-rl prepare` makes the demo model's, or give --tokenizer")
    spec = _spec(args.policy, args.max_draft_tokens)
    table = parse_table(args.step_table) if args.step_table else CPU_TABLE
    items = read_workload(args.trace, args.format, tokenizer, args.tasks, args.trials)
    return replay(
        items,
        args.sides.split(","),
        table,
        spec=spec,
        concurrency=args.concurrency,
        stop_token_ids=_stop_ids(tokenizer, args.stop),
        exact_step_time=args.exact_step_time,
        feed=args.feed,
        feed_lag_s=args.feed_lag_ms / 1000.0,
    )


def _spec(policy: str, most: int) -> SpecConfig:
    values = {**({"policy": policy} if policy else {}), **({"max_draft_tokens": most} if most else {})}
    return load_config({"spec": values}).spec


def _stop_ids(tokenizer: str, text: str) -> frozenset[int]:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(tokenizer).convert_tokens_to_ids(text)
    return frozenset([found]) if isinstance(found, int) else frozenset()


def _show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['trajectories']} trajectories, {figures['generated_tokens']} generated tokens, "
        f"{figures['concurrency']} running per replica"
    )
    print(f"{'side':8} {'committed':>9} {'drafted':>8} {'accepted':>8} {'speed-up':>8}")
    for name, side in figures["sides"].items():
        print(
            f"{name:8} {side['committed_tokens_per_step']:9.3f} {side['drafted_tokens_per_step']:8.3f} "
            f"{side['acceptance_rate']:8.1%} {side['modelled_speedup']:8.3f}"
        )
    for table in ("by_source", "by_match"):
        rows = figures["sides"].get("war", {}).get(table, {})
        for name, row in rows.items():
            print(f"  war {table[3:]:6} {name:8} drafted {row['drafted']:7d} accepted {row['accepted']:7d}")


if __name__ == "__main__":
    raise SystemExit(main())
