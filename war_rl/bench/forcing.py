# SPDX-License-Identifier: Apache-2.0
"""Forced generation: the engine computes everything for real, and commits the recorded tokens.

A request that carries ``extra_args={"war_forced": [token, ...]}`` has each of its rows of logits replaced, right before
the runner samples or verifies, by certainty of the token recorded for that position. Prefill, decode, drafting,
sampling and verification run as always; a draft is accepted exactly where it equals the recording. Requests without the
key are not touched. Only the benchmark loads these classes.

They count engine steps and scheduled tokens on the way, and can make the worker's drafter forget what it has seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from war_rl.bench.driver import FORCED_KEY
from war_rl.engines.vllm.extension import CpuWorkerExtension, WarWorkerExtension
from war_rl.types import TokenArray

KEY = FORCED_KEY
"""Key in a request's ``extra_args``: the tokens to commit, from the first generated one on."""

_MODULE = "war_rl.bench.forcing"
STOCK_EXTENSION = f"{_MODULE}.ForcedCpuWorkerExtension"
WAR_EXTENSION = f"{_MODULE}.ForcedWarWorkerExtension"


def forced_rows(
    recorded: list[TokenArray | None], committed: list[int], drafts: list[int]
) -> tuple[list[int], list[int]]:
    """Which rows of logits to force, and to which token.

    Args:
        recorded: per request in batch order, the recorded tokens; None leaves the request alone.
        committed: per request, generated tokens committed so far.
        drafts: per request, draft tokens to verify in this step. A request has ``drafts + 1`` rows.

    Returns:
        Row indices and as many tokens. Rows beyond the end of a recording are left out: what is sampled there lies
        beyond the request's ``max_tokens``.
    """
    rows: list[int] = []
    tokens: list[int] = []
    first = 0
    for text, done, drafted in zip(recorded, committed, drafts, strict=True):
        if text is not None:
            part = text[done : done + drafted + 1]
            rows.extend(range(first, first + len(part)))
            tokens.extend(part.tolist())
        first += drafted + 1
    return rows, tokens


class Forcing:
    """Stands in front of a model runner's ``_sample`` and ``execute_model``.

    Raises:
        RuntimeError: the runner has no ``_sample``: it is not vLLM's first model runner.
    """

    def __init__(self, runner: Any) -> None:
        if not hasattr(runner, "_sample"):
            raise RuntimeError(
                f"{type(runner).__name__} has no _sample: the benchmark forces tokens in vLLM's model runner V1 only; "
                "set VLLM_USE_V2_MODEL_RUNNER=0 for all sides"
            )
        self._runner = runner
        self._sample = runner._sample
        self._execute = runner.execute_model
        self._recorded: dict[str, TokenArray | None] = {}
        self.counters = {"engine_steps": 0.0, "scheduled_tokens": 0.0}
        runner._sample = self._forced_sample
        runner.execute_model = self._counted_execute

    def _counted_execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            self.counters["engine_steps"] += 1
            self.counters["scheduled_tokens"] += scheduler_output.total_num_scheduled_tokens
        return self._execute(scheduler_output, *args, **kwargs)

    def _forced_sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        if logits is not None:
            self._force(logits, spec_decode_metadata)
        return self._sample(logits, spec_decode_metadata)

    def _force(self, logits: Any, spec_decode_metadata: Any) -> None:
        batch = self._runner.input_batch
        keys = batch.req_ids
        recorded = [self._recording(key) for key in keys]
        if not any(text is not None for text in recorded):
            return
        count = len(keys)
        drafts = [0] * count if spec_decode_metadata is None else list(spec_decode_metadata.num_draft_tokens)
        # Not the request's list of outputs: with asynchronous scheduling that one lags a step behind.
        committed = (batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]).tolist()
        rows, tokens = forced_rows(recorded, committed, drafts)
        if rows:
            where = logits.new_tensor(rows, dtype=_long())
            logits[where] = float("-inf")
            logits[where, logits.new_tensor(tokens, dtype=_long())] = 0.0

    def _recording(self, key: str) -> TokenArray | None:
        if key not in self._recorded:
            if len(self._recorded) > 4 * len(self._runner.input_batch.req_ids) + 64:
                self._recorded.clear()
            state = self._runner.requests.get(key)
            extra = getattr(getattr(state, "sampling_params", None), "extra_args", None) or {}
            tokens = extra.get(KEY)
            self._recorded[key] = None if tokens is None else np.asarray(tokens, dtype=np.int32)
        return self._recorded[key]


def _long() -> Any:
    import torch

    return torch.long


def forget_drafts(runner: Any) -> bool:
    """Make the runner's drafter forget all text; False where there is nothing that remembers."""
    drafter: Any = getattr(runner, "drafter", None)
    if hasattr(drafter, "war_forget"):
        drafter.war_forget()
        return True
    cache = getattr(drafter, "suffix_cache", None)
    if cache is None:
        return False
    spec = runner.vllm_config.speculative_config
    drafter.suffix_cache = type(cache)(
        max_tree_depth=spec.suffix_decoding_max_tree_depth,
        max_cached_requests=spec.suffix_decoding_max_cached_requests,
    )
    return True


class _Forced:
    """What the benchmark adds to a worker extension."""

    _war_forcing: Forcing
    model_runner: Any

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl calls this once, right after the engine has started."""
        super().monkey_patch_model(vocab_size, banned_token_ids)  # type: ignore[misc]
        self._war_forcing = Forcing(self.model_runner)

    def war_bench_counters(self) -> dict[str, float]:
        """Cumulative ``engine_steps`` and ``scheduled_tokens`` (everything computed: prefill, decode and drafts)."""
        return dict(self._war_forcing.counters)

    def war_bench_forget(self) -> bool:
        """See :func:`forget_drafts`."""
        return forget_drafts(self.model_runner)


class ForcedCpuWorkerExtension(_Forced, CpuWorkerExtension):
    """For replicas of verl's stock rollout; on GPUs the CPU fixes do nothing."""


class ForcedWarWorkerExtension(_Forced, WarWorkerExtension):
    """For replicas of ``trainer.rollout=war``."""
