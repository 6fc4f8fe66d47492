# SPDX-License-Identifier: Apache-2.0
"""Engines to simulate. Each says where its figures come from; what is derived is derived here, in code.

Nothing on GPUs was measured by this project.
"""

from __future__ import annotations

from dataclasses import dataclass

from war_rl.sim.engine import EngineSettings
from war_rl.sim.times import StepTimes
from war_rl.sim.work import Shape

GB = 1e9

# Llama-3.3-70B-Instruct, FP8, TP2 on two H100 80 GB, NIM 1.8.0, 5,000 tokens in and 500 out: NVIDIA's table
# (docs.nvidia.com/nim/benchmarking/llm/1.0.0/performance): concurrency -> ms to the first token, between tokens.
NIM_70B = {1: (406.77, 18.58), 5: (546.7, 21.83), 25: (688.69, 38.75), 50: (834.51, 59.73)}
NIM_70B_SOURCE = "fitted to NVIDIA's published NIM 1.8.0 table, Llama-3.3-70B FP8 TP2 on 2 H100, 5000 in / 500 out"

# NVIDIA H100 SXM data sheet: bytes per second of HBM, dense FP8 and BF16 operations per second.
H100_BANDWIDTH, H100_FP8, H100_BF16 = 3.35e12, 1979e12, 989e12


def llama_70b_times() -> StepTimes:
    """From the table: the lone request's prefill, and what is left of each latency beside the prefill that goes on.

    In a steady state with ``c`` requests each output token comes with c * 5000 / 500 prompt tokens. What is left grows
    with ``c``; all of that is put down to the token, none to its KV, which makes drafting look dearer than it is.
    """
    first, alone = NIM_70B[1]
    per_prefill = (first - alone) / 1e3 / 5000
    left = [(c, itl / 1e3 - c * 10 * per_prefill) for c, (_, itl) in NIM_70B.items()]
    n = len(left)
    mean_c, mean_t = sum(c for c, _ in left) / n, sum(t for _, t in left) / n
    slope = sum((c - mean_c) * (t - mean_t) for c, t in left) / sum((c - mean_c) ** 2 for c, _ in left)
    return StepTimes(
        mean_t - slope * mean_c, max(0.0, slope), 0.0, per_prefill, name="llama-70b", source=NIM_70B_SOURCE
    )


def published_efficiency() -> tuple[float, float]:
    """Shares of the data sheet's bandwidth and FP8 rate that the table's figures reach: (decode, prefill).

    70.6e9 parameters of one byte each on two GPUs; two operations per parameter and token.
    """
    times = llama_70b_times()
    weights = 70.6e9
    return weights / 2 / H100_BANDWIDTH / times.base, 2 * weights / 2 / H100_FP8 / times.per_prefill


def qwen3_32b_times() -> StepTimes:
    """Qwen3-32B (32.8e9 parameters, 64 layers, 8 KV heads of 128: its model card) in BF16 on four H100: the roofline of
    the data sheet at the efficiency of :func:`published_efficiency`. A derivation, not a measurement."""
    memory, compute = published_efficiency()
    weights = 32.8e9
    per_token = 2 * weights / 4 / H100_BF16 / compute
    return StepTimes(
        2 * weights / 4 / H100_BANDWIDTH / memory,
        per_token,
        QWEN3_32B_KV_BYTES / 4 / H100_BANDWIDTH / memory,
        per_token,
        name="qwen3-32b",
        source="roofline of the H100 data sheet and model card, at the efficiency of NVIDIA's published 70B figures",
    )


QWEN3_32B_KV_BYTES = 2 * 64 * 8 * 128 * 2
"""Keys and values, 64 layers, 8 heads, 128 numbers of two bytes."""
LLAMA_70B_KV_BYTES = 2 * 80 * 8 * 128
"""80 layers, 8 heads, 128 numbers of one byte. The table's latencies stop growing near 85 requests of 5,500 tokens,
which is what this leaves room for."""


def kv_capacity(gpus: int, weight_bytes: float, kv_bytes: float, share: float = 0.9) -> int:
    """KV tokens in ``share`` (vLLM's default 0.9) of 80 GB each, beside the weights."""
    return int((gpus * 80 * GB * share - weight_bytes) / kv_bytes)


@dataclass(frozen=True)
class Preset:
    """A cluster: its engines, and the work it is shown with."""

    about: str
    times: StepTimes
    engine: EngineSettings
    replicas: int
    shape: Shape


def presets() -> dict[str, Preset]:
    """All presets by name."""
    return {
        "war-paper": Preset(
            "WAR's published setting: Qwen3-32B, TP4 on 16 H100, groups of 8, up to 120 turns; lengths and tool time "
            "are not published and taken from mini-SWE-agent traces (LMCache)",
            qwen3_32b_times(),
            EngineSettings(kv_capacity(4, 2 * 32.8 * GB, QWEN3_32B_KV_BYTES), 16, 256, 8192),
            4,
            SWE,
        ),
        "llama-70b": Preset(
            "Llama-3.3-70B FP8, TP2 on H100 pairs, step times fitted to NVIDIA's published NIM table",
            llama_70b_times(),
            EngineSettings(kv_capacity(2, 70.6 * GB, LLAMA_70B_KV_BYTES), 16, 256, 8192),
            8,
            SWE,
        ),
        "cpu-demo": Preset(
            "SmolLM2-135M on two CPU cores, two replicas: this project's own machine (docs/scaling.md)",
            CPU,
            EngineSettings(16384, 16, 64, 1024),
            2,
            Shape(
                groups=4,
                n=4,
                turns=5,
                system=256,
                prompt=256,
                model=60,
                env=80,
                tool=0.0,
                max_context=2560,
                max_turns=12,
            ),
        ),
    }


SWE = Shape(
    # Means and sigmas of 20 mini-SWE-agent recordings (LMCache's agent traces) in SmolLM2's tokens; the likeness of a
    # group's members is that of tau-bench airline's trials (recordings of mini-SWE-agent have one per task). Tool time
    # is recorded in neither: a guess, and swept over.
    groups=64,
    n=8,
    turns=20.0,
    turns_sigma=0.6,
    likeness=0.63,
    max_turns=120,
    system=1335,
    prompt=672,
    model=129.0,
    model_sigma=0.43,
    env=410.0,
    env_sigma=1.5,
    tool=1.0,
    tool_sigma=1.0,
)
CPU = StepTimes(0.0213, 0.00183, 0.0, 1 / 1200, name="cpu-demo", source="design measurements, two CPU cores")
