# SPDX-License-Identifier: Apache-2.0
"""A worker extension whose engine, one of the run's, computes NaN for a while, as a failing device would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from war_rl.engines.vllm.extension import WarWorkerExtension

FILE_VARIABLE = "WAR_TEST_NOISE"
"""Environment variable: a file that the engine makes which gets there first; that one turns bad."""

FIRST, LAST = 30, 60
"""Engine steps between which logits are NaN, counted from the engine's first sampled step."""


class NoisyExtension(WarWorkerExtension):
    """As War-RL's, with noise."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        super().monkey_patch_model(vocab_size, banned_token_ids)
        try:
            Path(os.environ[FILE_VARIABLE]).touch(exist_ok=False)
        except FileExistsError:
            return
        runner = self.model_runner
        sample, steps = runner._sample, [0]

        def noisy(logits: Any, spec_decode_metadata: Any) -> Any:
            if logits is not None:
                steps[0] += 1
                if FIRST <= steps[0] < LAST:
                    logits.fill_(float("nan"))
            return sample(logits, spec_decode_metadata)

        runner._sample = noisy
