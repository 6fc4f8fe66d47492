# SPDX-License-Identifier: Apache-2.0
"""vLLM's verifier, as the engine uses it, against exactly known distributions: drafts must not change what is sampled.

The target is a Markov chain over a few tokens. Requests with other settings and draft lengths share one batch; some
drafts are likely, some are not. Whatever is committed at a position must follow the chain from the token before it,
for draft positions (accepted or resampled) and for bonus tokens alike. Chi-square over all of them; a verifier with a
planted bias must fail the same test.

Error rate: a correct verifier fails with probability 10 x 1e-4 = 0.001 over all settings and roles. The seed is fixed,
so that was decided once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

VOCABULARY = 8
LOGITS = np.random.default_rng(5).normal(0.0, 1.5, (VOCABULARY, VOCABULARY))
"""Row: the token before."""
SETTINGS = ((1.0, 1.0, VOCABULARY), (0.7, 1.0, VOCABULARY), (1.0, 0.8, VOCABULARY), (0.7, 1.0, 3), (0.7, 0.9, 4))
"""Temperature, top-p, top-k."""
REQUESTS = 36_000
LEAST_P = 1e-4
ROLES = ("draft position", "bonus")


def target(setting: tuple[float, float, int]) -> np.ndarray:
    """Exact probabilities [before, token]: temperature, then the k likeliest, then the fewest that reach top-p."""
    temperature, top_p, top_k = setting
    rows = []
    for logits in LOGITS:
        p = np.exp(logits / temperature)
        order = np.argsort(-p)
        p[order[top_k:]] = 0.0
        p /= p.sum()
        reached = np.cumsum(p[order])
        p[order[int(np.searchsorted(reached, top_p - 1e-9)) + 1 :]] = 0.0
        rows.append(p / p.sum())
    return np.array(rows)


TARGETS = [target(setting) for setting in SETTINGS]


def drafts(rng: np.random.Generator) -> tuple[np.ndarray, list[list[int]]]:
    """The token before and the draft of each request: 0 to 3 tokens, the likeliest or any, half and half."""
    before = rng.integers(0, VOCABULARY, REQUESTS)
    made = []
    for i in range(REQUESTS):
        last, draft = int(before[i]), []
        for _ in range((i // len(SETTINGS)) % 4):
            likely = rng.random() < 0.5
            last = int(TARGETS[i % len(SETTINGS)][last].argmax() if likely else rng.integers(VOCABULARY))
            draft.append(last)
        made.append(draft)
    return before, made


def verify(before: np.ndarray, made: list[list[int]]) -> list[list[int]]:
    """What vLLM's rejection sampler commits for each request."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy(made, torch.device("cpu"))
    rows, target_rows, bonus_rows = [], [], []
    for first, draft in zip(before, made, strict=True):
        target_rows += range(len(rows), len(rows) + len(draft))
        rows += [int(first), *draft]
        bonus_rows.append(len(rows) - 1)
    metadata.target_logits_indices = torch.tensor(target_rows, dtype=torch.int32)
    metadata.bonus_logits_indices = torch.tensor(bonus_rows, dtype=torch.int32)
    each = [SETTINGS[i % len(SETTINGS)] for i in range(len(made))]
    zeros = torch.zeros(len(made))
    sampling = SamplingMetadata(
        temperature=torch.tensor([s[0] for s in each]),
        all_greedy=False,
        all_random=True,
        top_p=torch.tensor([s[1] for s in each]),
        top_k=torch.tensor([s[2] for s in each], dtype=torch.int32),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=zeros,
        presence_penalties=zeros,
        repetition_penalties=zeros,
        output_token_ids=[[] for _ in made],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        spec_token_ids=made,
    )
    logits = torch.tensor(LOGITS[rows], dtype=torch.float32)
    output = RejectionSampler(Sampler())(metadata, None, logits, sampling)
    return RejectionSampler.parse_output(output.sampled_token_ids, VOCABULARY)[0]


def counted(seed: int) -> tuple[np.ndarray, int, int]:
    """Counts [setting, role, condition, token] of one batch, and how many draft tokens were accepted and rejected.

    The condition is the token before and, at a draft position, the token that was drafted: neither may show.
    """
    torch.manual_seed(seed)
    before, made = drafts(np.random.default_rng(seed))
    counts = np.zeros((len(SETTINGS), len(ROLES), VOCABULARY**2, VOCABULARY), np.int64)
    accepted = rejected = 0
    for i, tokens in enumerate(verify(before, made)):
        last = int(before[i])
        for position, token in enumerate(tokens):
            bonus = position == len(made[i])
            condition = last * VOCABULARY + (0 if bonus else made[i][position])
            counts[i % len(SETTINGS), int(bonus), condition, token] += 1
            last = token
        accepted += len(tokens) - 1
        rejected += len(tokens) <= len(made[i])
    return counts, accepted, rejected


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of counts [C, token] if row c were drawn from probabilities[c]; expected counts below 5 are pooled."""
    from scipy.stats import chi2

    statistic, freedom = 0.0, 0
    for seen, p in zip(counts, probabilities, strict=True):
        expected = p * seen.sum()
        if seen[p == 0.0].sum():
            return 0.0  # a token that has no probability
        big = expected >= 5.0
        bins = [*zip(seen[big], expected[big], strict=True)]
        if expected[~big].sum() > 0.0:
            bins.append((seen[~big].sum(), expected[~big].sum()))
        statistic += sum((o - e) ** 2 / e for o, e in bins if e > 0.0)
        freedom += max(len(bins) - 1, 0)
    return float(chi2.sf(statistic, freedom))


def p_values(counts: np.ndarray) -> dict[str, float]:
    return {
        f"{SETTINGS[s]} {ROLES[role]}": p_value(counts[s, role], np.repeat(TARGETS[s], VOCABULARY, axis=0))
        for s in range(len(SETTINGS))
        for role in range(len(ROLES))
    }


def test_drafts_do_not_change_what_is_sampled(kernels: Any) -> None:
    from war_rl.engines.vllm import cpu_fixes

    cpu_fixes.apply()
    counts, accepted, rejected = counted(seed=1)
    assert counts.sum() > 40_000 and accepted > 10_000 and rejected > 5_000
    values = p_values(counts)
    assert min(values.values()) > LEAST_P, values


def resample_the_full_target(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection, draw from the target with the rejected token still in it."""

    def sample(*args: Any, **kwargs: Any) -> Any:
        target_probs = args[5]
        return torch.multinomial(target_probs, 1)[:, 0].to(torch.int32)

    monkeypatch.setattr(kernels, "sample_recovered_tokens", sample)


def accept_a_little_too_easily(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept with 1.25 times the target's probability."""
    stock = kernels.generate_uniform_probs
    monkeypatch.setattr(kernels, "generate_uniform_probs", lambda *args: stock(*args) / 1.25)


def forget_the_settings(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft positions see the raw target: no temperature, top-k, top-p."""
    monkeypatch.setattr(kernels, "apply_sampling_constraints", lambda logits, *args: logits)


@pytest.mark.parametrize("plant", [resample_the_full_target, accept_a_little_too_easily, forget_the_settings])
def test_a_planted_bias_is_caught(kernels: Any, monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    from war_rl.engines.vllm import cpu_fixes

    cpu_fixes.apply()
    plant(kernels, monkeypatch)
    values = p_values(counted(seed=1)[0])
    assert min(values.values()) < 1e-6, values
    # The bonus token comes from the ordinary sampler, which is not biased here.
    assert min(p for name, p in values.items() if "bonus" in name) > LEAST_P
