# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest


@pytest.fixture
def kernels():
    """vLLM's CPU stand-ins, put into the rejection sampler as the CPU runner does; everything restored afterwards."""
    pytest.importorskip("vllm")
    import vllm.utils.cpu_triton_utils as cpu_kernels
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        pytest.skip("a GPU build of vLLM is installed")
    names = [
        "expand_kernel",
        "sample_recovered_tokens_kernel",
        "rejection_greedy_sample_kernel",
        "rejection_random_sample_kernel",
    ]
    functions = {name: getattr(cpu_kernels, name).func for name in names}
    triton = {name: getattr(rejection_sampler, name) for name in names}
    onednn = ops._supports_onednn
    for name in names:
        setattr(rejection_sampler, name, getattr(cpu_kernels, name))
    yield rejection_sampler
    for name in names:
        getattr(cpu_kernels, name).func = functions[name]
        setattr(rejection_sampler, name, triton[name])
    ops._supports_onednn = onednn
