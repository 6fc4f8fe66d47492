# SPDX-License-Identifier: Apache-2.0
"""``war-rl bench drafter``: what drafting itself costs, against the library's cache in the same process.

The corpus is synthetic agent text: trajectories made of phrases from a common stock, with noise, so that matches of all
lengths occur. A few requests decode; at every step one token of each is committed and a draft asked for, as an engine
would. Time is taken around the whole call and divided by the requests: on the wall, and as this thread's processor
time, which on a busy machine tells the work from the waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from war_rl.config import SpecConfig
from war_rl.spec.corpus import CHUNK_TOKENS
from war_rl.spec.drafter import Drafter, RequestView
from war_rl.spec.index import TABLES
from war_rl.types import FeedItem, TokenArray, TrajectoryId

SIZES = (10_000, 100_000, 500_000, 2_000_000, 4_000_000)
TRAJECTORY_TOKENS = 10_000
PHRASES = 4000
VOCABULARY = 30_000
PIECE_ACCESSES = CHUNK_TOKENS * TABLES
"""Random accesses of one piece of text taken in: each token enters each table."""


def phrases(rng: np.random.Generator) -> list[TokenArray]:
    """The stock of phrases: 4 to 60 tokens each, tokens with a skewed frequency."""
    return [_skewed(rng, int(rng.integers(4, 60))) for _ in range(PHRASES)]


def _skewed(rng: np.random.Generator, count: int) -> TokenArray:
    return np.minimum(rng.zipf(1.3, count), VOCABULARY - 1).astype(np.int32)


def trajectory_text(rng: np.random.Generator, stock: list[TokenArray], count: int) -> TokenArray:
    """About ``count`` tokens: phrases with a skewed frequency, three tokens in a hundred replaced."""
    parts, total = [], 0
    while total < count:
        part = stock[min(int(rng.zipf(1.2)), PHRASES) - 1]
        parts.append(part)
        total += len(part)
    text = np.concatenate(parts)[:count]
    noise = rng.random(count) < 0.03
    text[noise] = _skewed(rng, int(noise.sum()))
    return text


class _Watch:
    """Collects durations, wall and processor time, in seconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def __enter__(self) -> None:
        self._begun = (time.perf_counter(), time.thread_time())

    def __exit__(self, *_: object) -> None:
        self.wall.append(time.perf_counter() - self._begun[0])
        self.cpu.append(time.thread_time() - self._begun[1])


def _figures(watch: _Watch, requests: int) -> dict[str, float]:
    figures = {}
    for name, seconds in (("", watch.wall), ("cpu_", watch.cpu)):
        micro = 1e6 * np.array(seconds) / requests
        figures[f"{name}mean_us"] = float(micro.mean())
        figures[f"{name}p99_us"] = float(np.percentile(micro, 99))
        figures[f"{name}max_us"] = float(micro.max())
    return figures


def _stalls(watch: _Watch, size: int) -> dict[str, float]:
    return {
        "ingest_us_per_token": 1e6 * sum(watch.cpu) / size,
        "ingest_stall_max_ms": 1e3 * max(watch.wall),
        "ingest_stall_cpu_max_ms": 1e3 * max(watch.cpu),
        "ingest_stall_p99_ms": 1e3 * float(np.percentile(watch.wall, 99)),
        "ingest_slices": float(len(watch.cpu)),
        "ingest_slices_over_2_ms": float(sum(s > 0.002 for s in watch.cpu)),
    }


def machine_stalls(size: int, pieces: int) -> dict[str, float]:
    """How long the machine itself takes for the random accesses of one piece, with nothing of ours: the yardstick for
    ``ingest_stall_*``.

    Args:
        size: tokens of the corpus; the memory is about as large as its tables.
        pieces: how often, in a row.
    """
    rng = np.random.default_rng(0)
    memory = np.ones(max(1 << 16, 2 * TABLES * size), np.int32)
    watch = _Watch()
    for _ in range(pieces):
        places = rng.integers(0, len(memory), PIECE_ACCESSES)
        with watch:
            memory[places] += 1
    milli = 1e3 * np.array(watch.cpu)
    return {
        "pieces": float(pieces),
        "access_p50_cpu_ms": float(np.median(milli)),
        "access_p99_cpu_ms": float(np.percentile(milli, 99)),
        "access_max_cpu_ms": float(milli.max()),
    }


def bench_war(corpus: list[TokenArray], live: list[TokenArray], start: int, steps: int) -> dict[str, float]:
    """The drafter with everything on; ``corpus`` arrives through the feed."""
    # The published rule looks in every step; a budget without measured steps would not draft, or sleep.
    spec = dataclasses.replace(SpecConfig(), policy="war", max_running=1024)
    drafter = Drafter(spec, clock=time.perf_counter)
    stalls = _Watch()
    for number, text in enumerate(corpus):
        drafter.feed([FeedItem(TrajectoryId(f"g{number // 8}", number % 8, 1, f"{number // 8}"), 0, text, True)])
        more = True
        while more:
            with stalls:
                more = drafter.idle()
    size = max(sum(map(len, corpus)), 1)
    bytes_per_token = drafter.counters()["bytes"] / size

    def views(at: int, sampled: int) -> list[RequestView]:
        return [
            RequestView(f"r{i}", TrajectoryId("live", i, 1, "live"), text[:at], start, sampled, True, 1000)
            for i, text in enumerate(live)
        ]

    for _ in range(200):  # the prompts
        drafter.propose(views(start, 0))
    watch = _Watch()
    for at in range(start + 1, start + 1 + steps):
        requests = views(at, 1)
        with watch:
            drafter.propose(requests)
    return {**_figures(watch, len(live)), **_stalls(stalls, size), "bytes_per_token": bytes_per_token}


def bench_library(corpus: list[TokenArray], live: list[TokenArray], start: int, steps: int) -> dict[str, float]:
    """The library's cache, used as vLLM uses it."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-untyped,unused-ignore]

    cache: Any = SuffixDecodingCache(24, 100_000)
    stalls = _Watch()
    for number, text in enumerate(corpus):
        with stalls:
            cache.start_request(number, text[:1])
            cache.add_active_response(number, text)
            cache.stop_request(number)
    size = max(sum(map(len, corpus)), 1)
    bytes_per_token = cache._global_tree.estimate_memory() / size
    for i, text in enumerate(live):
        cache.start_request(f"r{i}", text[:start])
    watch = _Watch()
    for at in range(start + 1, start + 1 + steps):
        with watch:
            for i, text in enumerate(live):
                cache.add_active_response(f"r{i}", text[at - 1 : at])
                cache.speculate(f"r{i}", text[at - 24 : at], 24, 1.0, 0.0, 0.1)
    figures = {**_figures(watch, len(live)), **_stalls(stalls, size), "bytes_per_token": bytes_per_token}
    with stalls:
        cache.evict_cached_response(0)
    figures["removal_cpu_ms"] = 1e3 * stalls.cpu[-1]
    return figures


def bench(sizes: Sequence[int] = SIZES, requests: int = 4, steps: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Figures of both by corpus size in tokens; times in microseconds per request and step."""
    result: dict[str, Any] = {"requests": requests, "steps": steps, "sizes": {}, "machine": {}}
    for size in sizes:
        rng = np.random.default_rng(seed)
        stock = phrases(rng)
        start = 4000
        live = [trajectory_text(rng, stock, start + steps + 1) for _ in range(requests)]
        corpus = [trajectory_text(rng, stock, TRAJECTORY_TOKENS) for _ in range(max(1, size // TRAJECTORY_TOKENS))]
        result["sizes"][str(size)] = {
            "war": bench_war(corpus, live, start, steps),
            "library": bench_library(corpus, live, start, steps),
        }
        result["machine"][str(size)] = machine_stalls(size, 2 * sum(map(len, corpus)) // CHUNK_TOKENS)
    return result


def show(result: dict[str, Any]) -> None:
    """The figures as a table."""
    print(f"{result['requests']} requests, {result['steps']} steps; us per request and step")
    columns = ["mean_us", "cpu_mean_us", "cpu_p99_us", "cpu_max_us", "max_us", "ingest_us_per_token"]
    columns += ["ingest_stall_max_ms", "ingest_stall_cpu_max_ms", "bytes_per_token"]
    print(f"{'tokens':>9} {'side':8}" + "".join(f"{c:>24}" for c in columns))
    for size, sides in result["sizes"].items():
        for name, figures in sides.items():
            print(f"{size:>9} {name:8}" + "".join(f"{figures[c]:24.2f}" for c in columns))
        war, machine = sides["war"], result["machine"][size]
        p50, p99, longest = (machine[f"access_{of}_cpu_ms"] for of in ("p50", "p99", "max"))
        print(
            f"{size:>9} {war['ingest_slices_over_2_ms']:.0f} of {war['ingest_slices']:.0f} slices held the caller over "
            f"2 ms; the machine alone: {PIECE_ACCESSES} random accesses took {p50:.3f} ms (median), {p99:.2f} (p99), "
            f"{longest:.2f} (longest of {machine['pieces']:.0f})"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """``war-rl bench drafter``. Returns 0, or 2 for arguments or an installation that cannot work."""
    parser = argparse.ArgumentParser(
        prog="war-rl bench drafter",
        description="What drafting itself costs per request and engine step, by corpus size, against the library's "
        "cache in the same process. Synthetic text, no engine. docs/drafting.md explains the figures.",
    )
    parser.add_argument("--sizes", type=_sizes, default=SIZES, metavar="N,N", help="corpus sizes in tokens (10k to 4M)")
    parser.add_argument("--requests", type=_positive, default=4, help="requests that decode at once (%(default)s)")
    parser.add_argument("--steps", type=_positive, default=2000, help="engine steps that are timed (%(default)s)")
    parser.add_argument("--json", default="", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args(argv)
    try:
        result = bench(args.sizes, args.requests, args.steps)
    except ModuleNotFoundError as error:
        print(f"war-rl bench drafter: {error}; it compares with arctic-inference==0.3.0", file=sys.stderr)
        return 2
    show(result)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(size) for size in text.split(","))


if __name__ == "__main__":
    raise SystemExit(main())
