# SPDX-License-Identifier: Apache-2.0
"""vLLM worker extensions: what runs inside the engine's worker process besides the proposer.

``WarWorkerExtension`` serves replicas of ``trainer.rollout=war``. ``CpuWorkerExtension`` only mends vLLM on machines
without an accelerator and serves the stock rollout there, so that both sides of a comparison run the same engine.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.platforms import current_platform

from war_rl.types import decode_feed

# Layer norms: replicated over tensor parallel ranks, never fused, changed by every optimizer step.
_PROBED = ("input_layernorm.weight", "post_attention_layernorm.weight", ".norm.weight")


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's own extension plus the fixes that vLLM needs on CPUs; nothing else changes."""

    def __new__(cls, **kwargs: Any) -> CpuWorkerExtension:
        if current_platform.is_cpu():
            from war_rl.engines.vllm import cpu_fixes

            cpu_fixes.apply()
        return super().__new__(cls, **kwargs)


class WarWorkerExtension(CpuWorkerExtension):
    """Adds the drafter's control calls. Each is reached by ``collective_rpc`` between two engine steps."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """verl calls this once, right after the engine has started: the first moment when the runner is complete."""
        super().monkey_patch_model(vocab_size, banned_token_ids)
        proposer = self._war_proposer()
        if proposer is not None:
            proposer.bind(self.model_runner)

    def war_feed(self, blob: bytes) -> None:
        """Queue other replicas' text (an encoded feed message) for the drafter."""
        proposer = self._war_proposer()
        if proposer is not None:
            proposer.feed(decode_feed(blob))

    def war_begin_step(self, step: int) -> None:
        """The weights of ``step`` are loaded."""
        proposer = self._war_proposer()
        if proposer is not None:
            proposer.begin_step(step)

    def war_counters(self) -> dict[str, float]:
        """The drafter's cumulative counters; empty where this replica cannot draft."""
        proposer = self._war_proposer()
        return proposer.counters() if proposer is not None else {}

    def war_weights(self) -> dict[str, float]:
        """Sums of a few weights that training changes and that vLLM neither fuses nor shards away.

        The same sums over the trainer's weights must agree, and those of all replicas with each other; a weight update
        that was lost, or reached one replica only, shows here.
        """
        model = self.model_runner.model
        names = [name for name, _ in model.named_parameters() if name.endswith(_PROBED)]
        parameters = dict(model.named_parameters())
        return {name: float(parameters[name].detach().double().sum()) for name in names}

    def _war_proposer(self) -> Any:
        from war_rl.engines.vllm.proposer import WarProposer

        drafter = getattr(self.model_runner, "drafter", None)
        return drafter if isinstance(drafter, WarProposer) else None
