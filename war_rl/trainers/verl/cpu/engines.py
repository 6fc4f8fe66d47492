# SPDX-License-Identifier: Apache-2.0
"""verl's FSDP2 engines for device ``cpu``: actor, reference policy and critic.

Imported right after ``verl.workers.engine`` on the CPU platform (see :mod:`war_rl.trainers.verl.plugin`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.utils import model as verl_model
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead


class _WithoutOffload:
    """Build the FSDP module without CPU offload.

    verl (0.9.1) forces ``CPUOffloadPolicy(pin_memory=True)`` on every forward-only engine, the reference policy.
    Pinning asks for an NVIDIA driver, and parameters that live in CPU memory have nowhere to be moved to.
    """

    def _build_fsdp_module(self: Any, module: Any) -> Any:
        config = self.engine_config
        resident = copy.copy(config)
        for field in ("forward_only", "offload_policy"):
            object.__setattr__(resident, field, False)  # verl's configs are frozen after construction
        self.engine_config = resident
        try:
            return super()._build_fsdp_module(module)  # type: ignore[misc]
        finally:
            self.engine_config = config


@contextmanager
def _value_head_with(attention: str) -> Iterator[None]:
    """While open, ``load_valuehead_model`` uses this attention implementation.

    verl (0.9.1, utils/model.py) writes flash_attention_2 into that function, which has no CPU kernel. Only models
    that transformers can load for token classification are supported; verl's other way needs trl.
    """
    original = verl_model.load_valuehead_model

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )

    verl_model.load_valuehead_model = load_valuehead_model
    try:
        yield
    finally:
        verl_model.load_valuehead_model = original


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuEngineWithLMHead(_WithoutOffload, FSDPEngineWithLMHead):
    """Actor and reference policy."""


@EngineRegistry.register(model_type="value_model", backend="fsdp2", device="cpu")
class CpuEngineWithValueHead(_WithoutOffload, FSDPEngineWithValueHead):
    """Critic. Attention as configured for the model, ``sdpa`` where the configuration asks for flash attention."""

    def _build_module(self) -> Any:
        configured = getattr(self.model_config.hf_config, "_attn_implementation", None)
        attention = configured if configured in ("sdpa", "eager") else "sdpa"
        with _value_head_with(attention):
            return super()._build_module()
