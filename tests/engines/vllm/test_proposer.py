# SPDX-License-Identifier: Apache-2.0
"""The proposer on a hand-made model runner: what vLLM shows it from step to step, and what may never be drafted."""

from __future__ import annotations

import dataclasses
import logging
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams  # noqa: E402

from war_rl.config import WarConfig, to_dict  # noqa: E402
from war_rl.engines.vllm.proposer import WarProposer, verifier_honours  # noqa: E402
from war_rl.types import TrajectoryId, encode_request_id  # noqa: E402

STOP = 2
PHRASE = [11, 12, 13, 14, 15, 16, 17, 18]
REPEATING = [1, *PHRASE, 5, *PHRASE, 6, *PHRASE[:4]]


def proposer(max_model_len: int = 256, drafts: int = 8, **spec: Any) -> WarProposer:
    settings = {**to_dict(WarConfig())["spec"], "memory_mb": 8, "max_draft_tokens": drafts, **spec}
    return WarProposer(
        SimpleNamespace(
            additional_config={"war": {"spec": settings, "stop_token_ids": [STOP]}},
            model_config=SimpleNamespace(max_model_len=max_model_len),
            speculative_config=SimpleNamespace(num_speculative_tokens=drafts),
        )
    )


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **values})


@dataclasses.dataclass
class Request:
    key: str
    text: list[int]
    prompt: int
    params: SamplingParams


class Runner:
    """The part of vLLM's model runner that the proposer reads. Rows move about as requests come and go."""

    def __init__(self, made: WarProposer, max_model_len: int = 256) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch: Any = None
        self._width = max_model_len
        self.proposer = made
        made.bind(self)

    def execute_model(self, scheduled: Any) -> None:
        """What bind() times."""

    def step(self, batch: list[Request], sampled: list[int]) -> list[list[int]]:
        """One engine step that has committed the last ``sampled[i]`` tokens of each request."""
        self.execute_model(None)
        for request in batch:
            self.requests.setdefault(request.key, SimpleNamespace(sampling_params=request.params))
        tokens = np.zeros((len(batch) + 2, self._width), np.int32)
        for row, request in enumerate(batch):
            tokens[row, : len(request.text)] = request.text
        self.input_batch = SimpleNamespace(
            req_ids=[r.key for r in batch], num_prompt_tokens=np.array([r.prompt for r in batch], np.int32)
        )
        came = [r.text[len(r.text) - n :] for r, n in zip(batch, sampled, strict=True)]
        lengths = np.array([len(r.text) for r in batch], np.int32)
        drafts = self.proposer.propose(came, lengths, tokens, slot_mappings=None)
        assert len(drafts) == len(batch)
        return drafts


def key(session: int = 0, turn: int = 0) -> str:
    return encode_request_id(TrajectoryId("g", session, 1, "7"), turn) + "-1a2b3c4d"


def request(text: list[int] = REPEATING, session: int = 0, turn: int = 0, prompt: int = 1, **values: Any) -> Request:
    return Request(key(session, turn), list(text), prompt, params(**values))


def one(text: list[int] = REPEATING, sampled: int = 1, max_model_len: int = 256, **values: Any) -> list[int]:
    """The draft for a single request, by the rule that needs no measured steps."""
    runner = Runner(proposer(max_model_len, policy="war"), max_model_len)
    return runner.step([request(text, **values)], [sampled])[0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {"seed": 3, "logprobs": 1, "stop": ["x"], "stop_token_ids": [99], "ignore_eos": True, "n": 2},
        {"extra_args": {"mine": 1}, "bad_words": [], "logit_bias": {}},
    ],
)
def test_what_the_verifier_honours_is_drafted(values: dict[str, Any]) -> None:
    assert verifier_honours(params(**values)) == ""
    assert one(**values)[:2] == PHRASE[4:6]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"min_p": 0.1}, "min_p"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"structured_outputs": StructuredOutputsParams(regex="a+")}, "structured_outputs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"thinking_token_budget": 4}, "thinking_token_budget"),
        (
            {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=2)},
            "repetition_detection",
        ),
    ],
)
def test_any_other_parameter_switches_drafting_off_and_is_named_once(
    values: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner(proposer(policy="war"))
    with caplog.at_level(logging.WARNING):
        for session in range(3):
            bad, good = request(session=session, **values), request(session=10 + session)
            drafts = runner.step([bad, good], [1, 1])
            assert drafts[0] == [] and drafts[1][:2] == PHRASE[4:6]
    assert [record.getMessage().count(name) for record in caplog.records] == [1]
    counters = runner.proposer.counters()
    assert counters["requests_not_draftable"] == counters["unsupported_requests"] == 3


def test_parameters_of_a_newer_vllm_are_not_honoured_unseen() -> None:
    class Newer(SamplingParams, kw_only=True):  # type: ignore[call-arg]
        surprise: int = 0

    assert verifier_honours(Newer()) == ""
    assert verifier_honours(Newer(surprise=1)) == "surprise"
    assert verifier_honours(None) == "unknown sampling parameters"


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_drafts_are_clamped_at_context_and_max_tokens(left: int) -> None:
    # The step that verifies k drafts commits up to k + 1 tokens, which must all have room.
    expected = PHRASE[4 : 4 + max(0, left - 1)]
    assert one(max_model_len=len(REPEATING) + left) == expected
    assert one(max_tokens=len(REPEATING) - 1 + left) == expected


def test_nothing_is_drafted_past_an_end_of_turn_token() -> None:
    ended = [1, 11, 12, 13, 14, STOP, 4, 4, 11, 12, 13]
    assert one(ended) == [14, STOP]
    own = [99 if token == STOP else token for token in ended]
    assert one(own, stop_token_ids=[99]) == [14, 99]
    assert one(own)[:3] == [14, 99, 4]
    # The turn is over: the request will not be there in the next step.
    over = [1, STOP, 11, 12, 13, 5, STOP]
    assert one(over) == []
    assert one(over, ignore_eos=True) == [11]


def test_a_prefilling_request_is_not_drafted_for_but_its_text_is_known_to_others() -> None:
    runner = Runner(proposer(policy="war"))
    prefilling, decoding = request(session=1, prompt=len(REPEATING)), request([1, 90, 91, *PHRASE[:3]])
    drafts = runner.step([prefilling, decoding], [0, 1])
    assert drafts[0] == [] and drafts[1][:2] == PHRASE[3:5]


def test_preemption_and_resumption_keep_the_text() -> None:
    runner = Runner(proposer(policy="war"))
    first, second = request(), request([1, 2, 3], session=1)
    runner.step([first, second], [1, 1])
    runner.step([second], [1])  # preempted
    assert runner.proposer.counters()["running"] == 1
    assert runner.step([second, first], [1, 0])[1] == []  # resumed: its prompt and output are computed again
    first.text.append(PHRASE[4])
    assert runner.step([first, second], [1, 1])[0][:2] == PHRASE[5:7]
    assert runner.proposer.counters()["rebuilds"] == 0


def test_the_next_turn_of_a_trajectory_may_start_in_the_very_next_step() -> None:
    runner = Runner(proposer(policy="war"))
    runner.step([request(turn=0)], [1])
    again = request([*REPEATING, 7, *PHRASE[:3]], turn=1)
    assert runner.step([again], [1])[0][:2] == PHRASE[3:5]
    assert runner.proposer.counters()["live_trees"] == 1


def test_two_turns_of_one_trajectory_at_once_do_not_mix_their_text() -> None:
    runner = Runner(proposer(policy="war"))
    left, right = request(turn=0), request([1, 21, 22, 23, 24, 25, 6, 21, 22], turn=1)
    for token_left, token_right in ((15, 23), (16, 24)):
        left.text.append(token_left)
        right.text.append(token_right)
        drafts = runner.step([left, right], [1, 1])
    assert drafts[0][0] == 17 and drafts[1][0] == 25
    assert runner.proposer.counters()["rebuilds"] == 0
    runner.step([], [])
    assert runner.proposer.counters()["live_trees"] == 1


def test_several_samples_of_one_request_are_anonymous_requests() -> None:
    runner = Runner(proposer(policy="war"))
    batch = [dataclasses.replace(request(), key=f"{i}_{key()}") for i in range(3)]
    assert [draft[:2] for draft in runner.step(batch, [1, 1, 1])] == [PHRASE[4:6]] * 3
    runner.step([], [])
    runner.proposer._drafter.idle()
    assert runner.proposer.counters()["live_trees"] == 0


def test_turns_without_a_token_and_an_empty_batch() -> None:
    runner = Runner(proposer(policy="war"))
    assert runner.step([request([1])], [0]) == [[]]
    assert runner.step([], []) == []
    assert runner.step([request([1, STOP], turn=1)], [1]) == [[]]
    assert runner.step([request([], turn=2, prompt=0)], [0]) == [[]]


def test_before_it_is_bound_nothing_is_drafted() -> None:
    made = proposer()
    assert made.propose([[1], [2]], np.array([1, 1]), np.zeros((2, 8), np.int32)) == [[], []]


@pytest.mark.parametrize(("policy", "memory_mb"), [("budget", 8), ("war", 8), ("war", 1)])
def test_hundreds_of_short_requests_with_aborts_leave_nothing_behind(policy: str, memory_mb: int) -> None:
    rng = random.Random(7)
    made = proposer(max_model_len=96, policy=policy, memory_mb=memory_mb, max_running=1000)
    runner = Runner(made, 96)
    vocabulary = [STOP, 1, *range(3, 9)]
    running: list[Request] = []
    preempted: list[Request] = []
    drafts: dict[str, list[int]] = {}
    started = drafted = 0
    while started < 600 or running or preempted:
        # max_num_seqs changes, requests come, are aborted, preempted and resumed, and rows change places.
        for _ in range(rng.randrange(0, 40) if started < 600 else 0):
            name = key(started % 50, started) if started % 3 else f"chatcmpl-{started}"
            text = [rng.choice(vocabulary) for _ in range(rng.randrange(1, 40))]
            running.append(Request(name, text, len(text), params(max_tokens=rng.randrange(1, 40))))
            started += 1
        running = [r for r in running if rng.random() > 0.1]
        moved = [r for r in running if rng.random() < 0.1]
        running = [r for r in running if r not in moved] + [r for r in preempted if rng.random() < 0.7]
        preempted = [r for r in moved + preempted if r not in running and rng.random() > 0.1]
        rng.shuffle(running)
        sampled = []
        for r in running:
            wanted = drafts.get(r.key, [])
            count = rng.choice([0, 1, rng.randrange(1, len(wanted) + 2)]) if r.text else 0
            fresh = [*wanted[: max(0, count - 1)], rng.choice(vocabulary)] if count else []
            room = min(96 - len(r.text), (r.params.max_tokens or 0) - (len(r.text) - r.prompt))
            assert len(wanted) < max(1, room), "a draft would have been committed beyond the limits"
            r.text += fresh
            sampled.append(len(fresh))
        drafts = {r.key: d for r, d in zip(running, runner.step(running, sampled), strict=True)}
        drafted += sum(map(len, drafts.values()))
        assert all(STOP not in d[:-1] for d in drafts.values())
        # A finished request leaves.
        running = [
            r
            for r in running
            if r.text[-1] != STOP and len(r.text) < 96 and len(r.text) - r.prompt < (r.params.max_tokens or 0)
        ]
    assert started >= 600
    # Policy budget looks at the clock: on a machine that is slow enough it may find that looking does not pay here.
    assert drafted > 0 or policy == "budget"
    runner.step([], [])
    made.begin_step(1000)
    while made._drafter.idle():
        pass
    counters = made.counters()
    assert counters["running"] == counters["live_trees"] == 0
    index: Any = made._drafter._corpus.index
    assert index.free_tokens() == (index._pages - 1) * 256
    assert len(made._known) < 400
