# SPDX-License-Identifier: Apache-2.0
"""Settings for every test: reproducible property tests that no clock can fail, and no test that reaches the network."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before anything imports torch, vLLM or wandb. Two cores: one thread per process, and none that spins.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Each engine would otherwise compile and run a test program for every vector instruction set.
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)

# A machine shared with engines is slow at times: that is not a failure of the property under test.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
