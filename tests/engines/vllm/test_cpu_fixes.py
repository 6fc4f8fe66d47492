# SPDX-License-Identifier: Apache-2.0
"""Each fix of vLLM's CPU engine: what it repairs, shown by a test that fails without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from war_rl.engines.vllm import cpu_fixes
from war_rl.engines.vllm.cpu_fixes import Fix, FixFailedError, _apply
from war_rl.engines.vllm.fixes import expand_kernel, packed_weights, recovered_tokens
from war_rl.engines.vllm.fixes.seed import refuse_seed

torch = pytest.importorskip("torch")


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("values", "replace_from", "replace_to", "wanted"),
    [
        (torch.tensor([0.7, 1.3, 0.0]), 0, 1, [0.7, 0.7, 1.3, 1.3, 1.3, 1.0]),  # temperature; 0 means greedy
        (torch.tensor([50, -1, 7], dtype=torch.int32), 0, 0, [50, 50, -1, -1, -1, 7]),  # top_k
        (torch.tensor([0.9, 1.0, 0.25]), 0, 0, [0.9, 0.9, 1.0, 1.0, 1.0, 0.25]),  # top_p
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_each_draft_token_gets_its_requests_value(kernels, values, replace_from, replace_to, wanted):
    if expand_kernel.is_present():
        expand_kernel.mend()
    cu_num_tokens = torch.tensor([2, 5, 6], dtype=torch.int32)
    expanded = kernels.expand_batch_to_tokens(values, cu_num_tokens, 6, replace_from, replace_to)
    assert expanded.dtype == values.dtype
    assert torch.equal(expanded, torch.tensor(wanted, dtype=values.dtype))


def test_expand_skips_requests_without_drafts_and_leaves_the_rest_alone():
    output = torch.full((4,), -1.0)
    expand_kernel.expand(output, torch.tensor([0.5, 2.0, 3.0]), torch.tensor([1, 1, 3]), 0, 1, MAX_NUM_TOKENS=128)
    assert output.tolist() == [0.5, 3.0, 3.0, -1.0]


def _sample_first_tokens(sampler, logits, draft, temperature, n):
    """First committed token of ``n`` requests that all see the same logits and the same one-token draft."""
    batch = logits.repeat(n, 1)
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.full((n,), temperature),
        top_k=None,
        top_p=None,
        generators={},
    )
    cu = torch.arange(1, n + 1, dtype=torch.int32)
    constrained = sampler.apply_sampling_constraints(batch, cu, metadata)
    drafts = torch.full((n,), draft, dtype=torch.int32)
    bonus = torch.zeros((n, 1), dtype=torch.int32)
    out = sampler.rejection_sample(drafts, [1] * n, 1, cu, None, constrained, bonus, metadata)
    return out[:, 0]


@pytest.mark.vllm
@pytest.mark.parametrize("draft", [0, 3])
def test_drafted_samples_follow_the_target_distribution(kernels, draft):
    """The whole CPU verifier, kernels and all: a likely and an unlikely draft leave the distribution as it is."""
    from scipy.stats import chisquare

    cpu_fixes.apply()
    torch.manual_seed(0)
    logits, temperature, n = torch.tensor([[2.0, 1.0, 0.5, -1.0, 0.0]]), 0.7, 40_000
    tokens = _sample_first_tokens(kernels, logits, draft, temperature, n)
    counts = torch.bincount(tokens.long(), minlength=5).numpy()
    wanted = torch.softmax(logits[0] / temperature, dim=0).double().numpy()
    assert chisquare(counts, wanted / wanted.sum() * n).pvalue > 1e-3


@pytest.mark.vllm
def test_recovered_tokens_kernel_takes_what_the_sampler_passes(kernels):
    if recovered_tokens.is_present():
        recovered_tokens.mend()
    metadata = SimpleNamespace(generators={})
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    drafts = torch.tensor([0, 0], dtype=torch.int32)
    cu = torch.tensor([1, 2], dtype=torch.int32)
    recovered = kernels.sample_recovered_tokens(1, [1, 1], cu, drafts, None, probs, metadata, torch.device("cpu"))
    assert recovered.tolist() == [1, 2]  # never the rejected draft token


@pytest.mark.vllm
def test_float64_noise_is_refused_not_misread(kernels):
    if not recovered_tokens.is_present():
        pytest.skip("this vLLM takes the argument itself")
    recovered_tokens.mend()
    with pytest.raises(NotImplementedError, match="float64"):
        kernels.sample_recovered_tokens_kernel[(1,)](USE_FP64_GUMBEL=True)


@pytest.mark.vllm
def test_a_layer_keeps_its_weight_and_computes_with_a_new_one(kernels):
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm, dispatch_cpu_unquantized_gemm

    if packed_weights.is_present():
        packed_weights.mend()
    layer = torch.nn.Linear(32, 32, bias=False).requires_grad_(False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight.shape == (32, 32)
    layer.weight.copy_(2 * torch.eye(32))  # a weight update in place
    x = torch.ones(1, 32)
    assert torch.equal(cpu_unquantized_gemm(layer, x, layer.weight), 2 * x)


@pytest.mark.vllm
def test_apply_mends_once_and_then_finds_nothing(kernels):
    first = cpu_fixes.apply()
    assert set(first) <= {fix.name for fix in cpu_fixes.FIXES}
    assert not any(fix.is_present() for fix in cpu_fixes.FIXES)
    assert cpu_fixes.apply() == []


def _fix(present, mend=lambda: None):
    return Fix("fake", "a fake bug", present, mend)


def test_a_bug_that_is_not_there_is_not_mended():
    def never():
        raise AssertionError("mended a bug that is not there")

    assert _apply((_fix(lambda: False, never),)) == []


def test_a_bug_that_stays_stops_the_engine():
    with pytest.raises(FixFailedError, match="still there"):
        _apply((_fix(lambda: True),))


def test_a_probe_that_fails_stops_the_engine():
    def broken():
        raise AttributeError("no such kernel")

    with pytest.raises(FixFailedError, match="no such kernel"):
        _apply((_fix(broken),))


def test_seed_with_temperature_is_refused_and_nothing_else():
    with pytest.raises(ValueError, match="seed=7"):
        refuse_seed(7, 1.0)
    refuse_seed(None, 1.0)
    refuse_seed(7, 0.0)
