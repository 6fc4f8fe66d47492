# SPDX-License-Identifier: Apache-2.0
"""The vLLM side of drafting: turns the model runner's batch into what :class:`war_rl.spec.drafter.Drafter` reads.

vLLM loads the class by its dotted name (``speculative_config={"method": "custom_class", "model": PROPOSER}``) and calls
``propose`` after each engine step's bookkeeping. It passes neither request ids nor sampling parameters, so the worker
extension binds the model runner once.
"""

from __future__ import annotations

import logging
import time
from typing import Any, NamedTuple

import numpy as np
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams

from war_rl.config import SpecConfig, load_config
from war_rl.spec.drafter import Drafter, RequestView
from war_rl.types import FeedItem, TrajectoryId, decode_request_id

logger = logging.getLogger(__name__)

PROPOSER = "war_rl.engines.vllm.proposer.WarProposer"


_VERIFIED = (
    *("temperature", "top_p", "top_k", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_ENDS = ("max_tokens", "stop", "stop_token_ids", "ignore_eos", "_eos_token_id", "_all_stop_token_ids")
_OUTPUT = (
    *("n", "logprobs", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "output_kind", "output_text_buffer_length", "skip_clone"),
    *("skip_reading_prefix_cache", "routed_experts_prompt_start", "extra_args"),
)
HONOURED = frozenset(_VERIFIED + _ENDS + _OUTPUT)
"""Sampling parameters that drafting leaves as they are. Any other, one of a newer vLLM included, switches it off.

What the rejection sampler verifies against; what ends a request, where the engine cuts whatever was committed beyond;
what only shapes the output. (A custom logits processor, which could read extra_args, vLLM refuses beside drafting.)
"""


def verifier_honours(params: SamplingParams | None) -> str:
    """Name of the first sampling parameter that vLLM's rejection sampler does not honour; "" when all are fine.

    min-p and logit bias, for example, are ignored there (vllm#42744), and structured output and prompt log-probs take
    other paths. An unknown request must not draft either.
    """
    if params is None:
        return "unknown sampling parameters"
    plain = type(params)()
    for name in params.__struct_fields__:
        value = getattr(params, name)
        # Empty and absent are the same to vLLM.
        if name not in HONOURED and value != getattr(plain, name) and value not in (None, [], {}):
            return name
    return ""


class _Known(NamedTuple):
    """What does not change about a request. ``stops``: end-of-turn tokens of its own."""

    trajectory: TrajectoryId | None
    draftable: bool
    stops: frozenset[int]


class WarProposer:
    """Drafts from suffix trees keyed by trajectory. One instance for each model runner."""

    def __init__(self, vllm_config: Any) -> None:
        settings = vllm_config.additional_config["war"]
        self._config: SpecConfig = load_config({"spec": settings["spec"]}).spec
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._max_draft: int = vllm_config.speculative_config.num_speculative_tokens
        self._stop = frozenset(int(t) for t in settings.get("stop_token_ids", ()))
        self._drafter = self._new_drafter()
        self._runner: Any = None
        self._known: dict[str, _Known] = {}
        self._step_began = 0.0
        self._refused: set[str] = set()
        self._refusals = 0

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM asks every proposer to load its model; this one has none."""

    def bind(self, runner: Any) -> None:
        """Give the proposer the model runner whose ``input_batch`` and ``requests`` it reads, and time its steps.

        The runner's ``execute_model`` begins an engine step; nothing else that vLLM offers a proposer says when.
        """
        execute_model = runner.execute_model

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._step_began = time.perf_counter()
            return execute_model(*args, **kwargs)

        runner.execute_model = timed
        self._runner = runner

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Draft tokens for each row of the batch, in batch order; called by vLLM after every engine step."""
        if self._runner is None:
            # Only vLLM's own warm-up runs before bind().
            return [[] for _ in sampled_token_ids]
        step_seconds = time.perf_counter() - self._step_began if self._step_began else None
        views = [
            self._view(row, len(sampled), int(num_tokens_no_spec[row]), token_ids_cpu)
            for row, sampled in enumerate(sampled_token_ids)
        ]
        if len(self._known) > 4 * len(views) + 64:
            self._known = {view.key: self._known[view.key] for view in views}
        return self._drafter.propose(views, step_seconds)

    def _view(self, row: int, sampled: int, length: int, token_ids_cpu: np.ndarray) -> RequestView:
        batch = self._runner.input_batch
        key = batch.req_ids[row]
        known = self._identify(key)
        state = self._runner.requests.get(key)
        prompt = int(batch.num_prompt_tokens[row])
        room = self._max_model_len - length - 1
        params = state.sampling_params if state is not None else None
        if params is not None and params.max_tokens is not None:
            # The step that verifies k drafts commits up to k + 1 tokens.
            room = min(room, params.max_tokens - (length - prompt) - 1)
        if sampled and not (params is not None and params.ignore_eos):
            last = int(token_ids_cpu[row, length - 1])
            if last in self._stop or last in known.stops:
                room = 0  # The turn is over; the request leaves before the next step.
        return RequestView(
            key=key,
            trajectory=known.trajectory,
            tokens=token_ids_cpu[row, :length],
            prompt_tokens=prompt,
            sampled=sampled,
            draftable=known.draftable,
            max_draft=max(0, min(self._max_draft, room)),
            stops=known.stops,
        )

    def _identify(self, key: str) -> _Known:
        known = self._known.get(key)
        if known is None:
            decoded = decode_request_id(key)
            state = self._runner.requests.get(key)
            params = state.sampling_params if state is not None else None
            reason = verifier_honours(params)
            if reason:
                self._refuse(reason)
            stops = frozenset((params.stop_token_ids if params is not None else None) or ()) - self._stop
            known = _Known(decoded[0] if decoded else None, not reason, stops)
            self._known[key] = known
        return known

    def _refuse(self, reason: str) -> None:
        self._refusals += 1
        if reason not in self._refused:
            self._refused.add(reason)
            logger.warning("War-RL does not draft for requests with %s: vLLM's verifier does not honour it", reason)

    def feed(self, items: list[FeedItem]) -> None:
        # Only queued: propose() takes it in, in slices, so that no engine step is held up.
        self._drafter.feed(items)

    def _new_drafter(self) -> Drafter:
        return Drafter(
            self._config,
            stop_token_ids=self._stop,
            clock=time.perf_counter,
            unix_time=time.time,
            # The prior was measured on CPUs; elsewhere drafting waits until steps have been measured.
            trust_prior=current_platform.is_cpu(),
        )

    def war_forget(self) -> None:
        """Forget all text and counts, as a new engine would; only while no request runs. Used by the benchmark."""
        self._drafter = self._new_drafter()
        self._known.clear()

    def begin_step(self, step: int) -> None:
        self._drafter.begin_step(step)

    def counters(self) -> dict[str, float]:
        return {**self._drafter.counters(), "requests_not_draftable": float(self._refusals)}
