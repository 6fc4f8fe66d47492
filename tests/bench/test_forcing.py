# SPDX-License-Identifier: Apache-2.0
"""Forced generation: which rows are forced, and that a real engine then commits the recording on every side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

# Each side starts an engine of its own, a minute each: `make extended`.
SIDES = tuple(pytest.param(name, marks=pytest.mark.extended) for name in ("vllm", "vllm+suffix", "vllm+ngram", "war"))
PROMPT = [40, 41, 42, 43, 44, 45, 46, 47] * 4
# Repeats itself, so that drafts are accepted, and breaks off, so that others are rejected.
RECORDING = [40, 41, 42, 43, 50, 51, 40, 41, 42, 43, 44, 45, 46, 60, 40, 41, 42, 43, 50, 51, 52, 40, 41, 42]


def test_each_row_gets_the_token_of_its_position() -> None:
    from war_rl.bench.forcing import forced_rows

    recorded = [np.array([7, 8, 9], np.int32), None, np.array([1, 2, 3, 4], np.int32)]
    # Three requests with 1, 3 and 2 rows; the first has one committed token, the last has three: one row too many.
    assert forced_rows(recorded, [1, 0, 3], [0, 2, 1]) == ([0, 4], [8, 4])


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.lists(st.integers(0, 99), max_size=6)), st.integers(0, 8), st.integers(0, 4)),
        max_size=6,
    )
)
def test_rows_stay_within_their_request_and_tokens_are_the_recordings(requests: list[Any]) -> None:
    from war_rl.bench.forcing import forced_rows

    recorded = [None if text is None else np.array(text, np.int32) for text, _, _ in requests]
    rows, tokens = forced_rows(recorded, [c for _, c, _ in requests], [d for _, _, d in requests])
    expected = {}
    first = 0
    for text, committed, drafts in requests:
        for i in range(drafts + 1):
            if text is not None and committed + i < len(text):
                expected[first + i] = text[committed + i]
        first += drafts + 1
    assert dict(zip(rows, tokens, strict=True)) == expected and len(rows) == len(expected)


def test_requests_without_a_recording_keep_their_logits() -> None:
    import torch

    from war_rl.bench.forcing import Forcing

    seen = []
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=["a", "b"], num_tokens_no_spec=np.array([5, 9]), num_prompt_tokens=np.array([5, 7])
        ),
        requests={
            "a": SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)),
            "b": SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"war_forced": [0, 1, 2]})),
        },
        _sample=lambda logits, metadata: seen.append(logits.clone()),
        execute_model=lambda scheduled: None,
    )
    Forcing(runner)
    logits = torch.tensor([[0.5, 0.25, 0.125], [3.0, 2.0, 1.0]])
    runner._sample(logits.clone(), None)
    assert torch.equal(seen[0][0], logits[0])
    assert seen[0][1].tolist() == [float("-inf"), float("-inf"), 0.0]


def test_another_model_runner_is_refused() -> None:
    from war_rl.bench.forcing import Forcing

    with pytest.raises(RuntimeError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        Forcing(SimpleNamespace())


def test_drafters_forget() -> None:
    from war_rl.bench.forcing import forget_drafts

    class Cache:
        def __init__(self, max_tree_depth: int, max_cached_requests: int) -> None:
            self.made_with = (max_tree_depth, max_cached_requests)

    spec = SimpleNamespace(suffix_decoding_max_tree_depth=7, suffix_decoding_max_cached_requests=11)
    old = Cache(0, 0)
    runner = SimpleNamespace(
        drafter=SimpleNamespace(suffix_cache=old), vllm_config=SimpleNamespace(speculative_config=spec)
    )
    assert forget_drafts(runner)
    assert runner.drafter.suffix_cache is not old and runner.drafter.suffix_cache.made_with == (7, 11)
    forgotten = []
    assert forget_drafts(SimpleNamespace(drafter=SimpleNamespace(war_forget=lambda: forgotten.append(True))))
    assert forgotten == [True]
    assert not forget_drafts(SimpleNamespace()) and not forget_drafts(SimpleNamespace(drafter=SimpleNamespace()))


def test_the_war_replica_takes_extensions_derived_from_its_own() -> None:
    from war_rl.bench.forcing import STOCK_EXTENSION, WAR_EXTENSION
    from war_rl.trainers.verl.replica import WORKER_EXTENSION, is_war_extension

    assert is_war_extension(WORKER_EXTENSION) and is_war_extension(WAR_EXTENSION)
    for other in (STOCK_EXTENSION, "nowhere.at.All", "plain", "war_rl.types.as_tokens"):
        assert not is_war_extension(other)


def _speculative(side: str) -> dict[str, Any]:
    from war_rl.config import WarConfig, to_dict

    if side == "vllm+suffix":
        return {"speculative_config": {"method": "suffix", "num_speculative_tokens": 6}}
    if side == "vllm+ngram":
        return {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 6,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            }
        }
    if side == "war":
        proposer = "war_rl.engines.vllm.proposer.WarProposer"
        return {
            "speculative_config": {"method": "custom_class", "model": proposer, "num_speculative_tokens": 8},
            "additional_config": {"war": {"spec": to_dict(WarConfig())["spec"], "stop_token_ids": []}},
        }
    return {}


def _run_side(side: str) -> dict[str, Any]:
    """In a process of its own: what one engine generates, greedily and sampling, forced and not."""
    from vllm import LLM, SamplingParams

    from tests.support.tiny_run import tiny_model
    from war_rl.bench.forcing import KEY, STOCK_EXTENSION, WAR_EXTENSION

    llm = LLM(
        str(tiny_model()),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=16,
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        disable_log_stats=False,
        worker_extension_cls=WAR_EXTENSION if side == "war" else STOCK_EXTENSION,
        **_speculative(side),
    )
    prompts = [{"prompt_token_ids": [*PROMPT, 70 + i]} for i in range(3)]
    length = len(RECORDING)

    def generate(temperature: float, forced: bool | list[bool]) -> list[list[int]]:
        wanted = forced if isinstance(forced, list) else [forced] * len(prompts)
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=length,
                ignore_eos=True,
                logprobs=0,
                extra_args={KEY: [*RECORDING[i:], *RECORDING[:i]]} if on else None,
            )
            for i, on in enumerate(wanted)
        ]
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    free_before = generate(0.0, False) if side != "war" else []
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": 10_000, "banned_token_ids": None})
    result: dict[str, Any] = {"free_before": free_before, "free": generate(0.0, False)}
    before = _counts(llm)
    result["forced_sampled"] = generate(1.0, True)
    result["forced_greedy"] = generate(0.0, True)
    result["mixed"] = generate(0.0, [False, True, False])
    result["counts"] = {name: value - before[name] for name, value in _counts(llm).items()}
    result["steps"] = llm.collective_rpc("war_bench_counters")[0]
    result["forgot"] = llm.collective_rpc("war_bench_forget")[0]
    result["after_forgetting"] = generate(1.0, True)
    return result


def _counts(llm: Any) -> dict[str, int]:
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return {name: sum(m.value for m in llm.get_metrics() if m.name == name) for name in names}


@pytest.fixture(scope="module", params=SIDES)
def side(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    run = f"print('RESULT', json.dumps(_run_side({request.param!r})))"
    code = f"import json; from tests.bench.test_forcing import _run_side; {run}"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return request.param, json.loads(lines[0].removeprefix("RESULT "))


def _expected() -> list[list[int]]:
    return [[*RECORDING[i:], *RECORDING[:i]] for i in range(3)]


def test_forced_output_is_the_recording(side: tuple[str, dict[str, Any]]) -> None:
    _, result = side
    assert result["forced_sampled"] == _expected()
    assert result["forced_greedy"] == _expected()
    assert result["after_forgetting"] == _expected()


def test_greedy_output_is_untouched_when_nothing_is_forced(side: tuple[str, dict[str, Any]]) -> None:
    name, result = side
    if name != "war":  # its drafter needs the extension to be in place before it sees a request
        assert result["free"] == result["free_before"]
    assert result["free"] != _expected()
    # A forced neighbour in the batch changes nothing either.
    assert result["mixed"] == [result["free"][0], _expected()[1], result["free"][2]]


def test_drafts_are_accepted_where_they_match_and_rejected_where_not(side: tuple[str, dict[str, Any]]) -> None:
    name, result = side
    drafted, accepted = result["counts"].values()
    if name == "vllm":
        assert drafted == 0
    else:
        assert 0 < accepted < drafted


def test_steps_are_counted_and_memory_is_dropped(side: tuple[str, dict[str, Any]]) -> None:
    name, result = side
    assert result["steps"]["engine_steps"] > 0
    assert result["steps"]["scheduled_tokens"] > result["steps"]["engine_steps"]
    assert result["forgot"] is (name in ("war", "vllm+suffix"))
