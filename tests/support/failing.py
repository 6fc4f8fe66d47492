# SPDX-License-Identifier: Apache-2.0
"""Worker extensions that make one of a run's engines fail: it computes noise, or dies or hangs in a weight update."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from war_rl.engines.vllm.extension import WarWorkerExtension

FILE_VARIABLE = "WAR_TEST_NOISE"
"""Environment variable: a file that the engine makes which gets there first; that one fails."""

FIRST, LAST = 30, 60
"""Engine steps between which logits are NaN, counted from the engine's first sampled step."""


DIES = "this engine dies in the middle of a weight update"
HANGS = "this engine hangs in the middle of a weight update"


def _chosen() -> bool:
    try:
        Path(os.environ[FILE_VARIABLE]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class MortalExtension(WarWorkerExtension):
    """Dies in the weight update after the first step: the second one, as the first comes before all steps."""

    updates = 0

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        if self.updates == 2 and _chosen():
            print(DIES, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().update_weights_from_ipc(*args, **kwargs)


class HangingExtension(WarWorkerExtension):
    """Hangs in the weight update after the first step, as one whose device does not answer."""

    updates = 0

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> Any:
        self.updates += 1
        if self.updates == 2 and _chosen():
            print(HANGS, flush=True)
            time.sleep(3600)
        return super().update_weights_from_ipc(*args, **kwargs)


class NoisyExtension(WarWorkerExtension):
    """Computes NaN for a while, as a failing device would."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        super().monkey_patch_model(vocab_size, banned_token_ids)
        if not _chosen():
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
