# SPDX-License-Identifier: Apache-2.0
"""A real engine with the drafter in it, in fp32: greedy tokens, log-probs and sampled distributions stay the model's.

The tiny model's exact probabilities come from transformers. One engine, in a process of its own, does everything: about
two minutes, `make extended`. Drafts come from text that the engine wrote before and that was fed back to it.

Error rate of the distribution test: four settings, each fails a correct engine with probability 1e-4.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.extended]

GREEDY_TOKENS = 48
TIE = 1e-4
"""Logits closer than this are a tie in fp32: which of them is the greatest depends on the order of additions."""
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "top-k": {"temperature": 0.7, "top_k": 4},
}
SAMPLES = 6000
SAMPLED_TOKENS = 4
LEAST_VISITS = 200


def _prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [[int(t) for t in rng.integers(10, 440, 12)] * 2 for _ in range(count)]


class Engine:
    """vLLM in this process, its drafter, and switches for the test."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        from war_rl.config import WarConfig, to_dict

        spec = {**to_dict(WarConfig())["spec"], "policy": "war", "max_running": 64, "max_draft_tokens": 4}
        proposer = "war_rl.engines.vllm.proposer.WarProposer"
        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            block_size=16,
            enforce_eager=True,
            gpu_memory_utilization=0.1,
            disable_log_stats=False,
            worker_extension_cls="war_rl.engines.vllm.extension.WarWorkerExtension",
            speculative_config={"method": "custom_class", "model": proposer, "num_speculative_tokens": 4},
            additional_config={"war": {"spec": spec, "stop_token_ids": []}},
        )
        self.llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": 10_000, "banned_token_ids": None})
        self.runner = self.llm.collective_rpc(lambda worker: _HOLD.append(worker.model_runner)) and _HOLD[-1]
        self._propose = self.runner.drafter.propose

    def draft(self, on: bool) -> None:
        silent = lambda sampled, *args, **kwargs: [[] for _ in sampled]  # noqa: E731
        self.runner.drafter.propose = self._propose if on else silent

    def feed(self, texts: list[list[int]]) -> None:
        """Text of other prompts' trajectories, as another replica would send it."""
        from war_rl.types import FeedItem, TrajectoryId, as_tokens

        ids = [TrajectoryId(f"fed{i}", 0, 1, f"fed{i}") for i in range(len(texts))]
        self.runner.drafter.feed([FeedItem(i, 0, as_tokens(t)) for i, t in zip(ids, texts, strict=True)])
        while self.runner.drafter._drafter.idle():
            pass

    def generate(self, prompts: list[list[int]], tokens: int, **values: Any) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **values)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [o.outputs[0] for o in self.llm.generate(asked, params, use_tqdm=False)]

    def counts(self) -> tuple[int, int]:
        """Draft tokens and accepted ones so far, as the engine counts them."""
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        metrics = self.llm.get_metrics()
        drafted, accepted = (sum(int(m.value) for m in metrics if m.name == name) for name in names)
        return drafted, accepted


_HOLD: list[Any] = []


class Exact:
    """The same model in transformers."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype="float32", attn_implementation="eager")

    def logits(self, text: list[int]) -> Any:
        """Logits [len(text), vocabulary] in float64: row i is what follows text[: i + 1]."""
        import torch

        with torch.no_grad():
            return self._model(torch.tensor([text])).logits[0].double()

    def probabilities(self, text: list[int], temperature: float, top_p: float = 1.0, top_k: int = 0) -> np.ndarray:
        """What follows ``text`` under the sampling parameters."""
        logits = self.logits(text)[-1].numpy() / temperature
        p = np.exp(logits - logits.max())
        order = np.argsort(-p)
        if top_k:
            p[order[top_k:]] = 0.0
        p /= p.sum()
        p[order[int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-9)) + 1 :]] = 0.0
        return p / p.sum()


def p_value(outputs: dict[int, list[list[int]]], prompts: list[list[int]], exact: Exact, values: dict[str, Any]) -> Any:
    """Chi-square over every prefix that was seen often enough: p-value, positions counted. Rare tokens are pooled."""
    from scipy.stats import chi2

    visits: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for which, texts in outputs.items():
        for text in texts:
            for at, token in enumerate(text):
                visits.setdefault((which, tuple(text[:at])), []).append(token)
    statistic, freedom, positions = 0.0, 0, 0
    for (which, prefix), tokens in visits.items():
        if len(tokens) < LEAST_VISITS:
            continue
        positions += len(tokens)
        p = exact.probabilities([*prompts[which], *prefix], **values)
        seen = np.bincount(tokens, minlength=len(p))[: len(p)]
        if seen[p == 0.0].sum():
            return 0.0, positions
        expected = p * len(tokens)
        big = expected >= 5.0
        bins = [*zip(seen[big], expected[big], strict=True), (seen[~big].sum(), expected[~big].sum())]
        bins = [(o, e) for o, e in bins if e > 1e-9]
        statistic += sum((o - e) ** 2 / e for o, e in bins)
        freedom += len(bins) - 1
    return float(chi2.sf(statistic, freedom)), positions


def _greedy(engine: Engine, exact: Exact) -> dict[str, Any]:
    prompts = _prompts(24)
    engine.draft(False)
    plain = [list(o.token_ids) for o in engine.generate(prompts, GREEDY_TOKENS, temperature=0.0)]
    engine.feed([[*prompt, *text] for prompt, text in zip(prompts[::2], plain[::2], strict=True)])
    engine.draft(True)
    before = engine.counts()
    outputs = engine.generate(prompts, GREEDY_TOKENS, temperature=0.0, logprobs=0)
    drafted, accepted = (now - then for now, then in zip(engine.counts(), before, strict=True))
    gaps = []
    for prompt, without, output in zip(prompts, plain, outputs, strict=True):
        text = list(output.token_ids)
        at = next((i for i in range(GREEDY_TOKENS) if text[i] != without[i]), None)
        if at is not None:
            row = exact.logits([*prompt, *text[:at]])[-1]
            gaps.append(abs(float(row[text[at]] - row[without[at]])))
    return {"gaps": gaps, "drafted": drafted, "accepted": accepted, "error": _error(exact, prompts, outputs)}


def _error(exact: Exact, prompts: list[list[int]], outputs: list[Any]) -> float:
    """Greatest difference of a reported log-probability to the recomputed one."""
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        text = [*prompt, *output.token_ids]
        logprobs = exact.logits(text).log_softmax(-1)
        for i, token in enumerate(output.token_ids):
            reported = output.logprobs[i][token].logprob
            worst = max(worst, abs(reported - float(logprobs[len(prompt) + i - 1, token])))
    return worst


def _sampled(engine: Engine, exact: Exact) -> dict[str, Any]:
    prompts = _prompts(2)
    many = [prompts[i % 2] for i in range(SAMPLES)]
    engine.draft(False)
    early = engine.generate(many[:60], SAMPLED_TOKENS, temperature=1.0)
    engine.feed([[*prompt, *o.token_ids] for prompt, o in zip(many, early, strict=False)])
    engine.draft(True)
    result: dict[str, Any] = {}

    def measure(name: str, values: dict[str, Any]) -> None:
        before = engine.counts()
        outputs: dict[int, list[list[int]]] = {0: [], 1: []}
        for i, o in enumerate(engine.generate(many, SAMPLED_TOKENS, **values)):
            outputs[i % 2].append(list(o.token_ids))
        drafted, accepted = (now - then for now, then in zip(engine.counts(), before, strict=True))
        p, positions = p_value(outputs, prompts, exact, values)
        result[name] = {"p": p, "positions": positions, "drafted": drafted, "accepted": accepted}

    for name, values in SETTINGS.items():
        measure(name, values)
    outputs = engine.generate(many[:200], SAMPLED_TOKENS, temperature=1.0, logprobs=0)
    result["error"] = _error(exact, many[:200], outputs)
    _plant_bias()
    measure("biased", SETTINGS["temperature 1"])
    return result


def _plant_bias() -> None:
    """From now on a rejected token stays in the distribution that its replacement is drawn from."""
    import torch
    from vllm.v1.sample import rejection_sampler

    def sample(*args: Any, **kwargs: Any) -> Any:
        return torch.multinomial(args[5], 1)[:, 0].to(torch.int32)

    rejection_sampler.sample_recovered_tokens = sample


def _run() -> dict[str, Any]:
    from tests.support.tiny_run import tiny_model

    model = str(tiny_model())
    engine, exact = Engine(model), Exact(model)
    return {"greedy": _greedy(engine, exact), "sampled": _sampled(engine, exact)}


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    code = "import json; from tests.engines.vllm.test_lossless import _run; print('RESULT', json.dumps(_run()))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=900)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return dict(json.loads(lines[0].removeprefix("RESULT ")))


def test_greedy_tokens_are_those_without_drafting(result: dict[str, Any]) -> None:
    greedy = result["greedy"]
    assert greedy["drafted"] > 0 and greedy["accepted"] > 0
    assert all(gap < TIE for gap in greedy["gaps"]), greedy


def test_log_probs_are_the_recomputed_ones(result: dict[str, Any]) -> None:
    assert result["greedy"]["error"] < 1e-5
    assert result["sampled"]["error"] < 1e-5


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_the_sampled_distribution_is_the_models(result: dict[str, Any], setting: str) -> None:
    measured = result["sampled"][setting]
    assert measured["positions"] > 5000
    assert measured["accepted"] > 300 and measured["drafted"] - measured["accepted"] > 300, measured
    assert measured["p"] > 1e-4, measured


def test_a_biased_verifier_is_caught(result: dict[str, Any]) -> None:
    assert result["sampled"]["biased"]["p"] < 1e-6
