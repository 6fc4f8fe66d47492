# SPDX-License-Identifier: Apache-2.0
"""The textarena agent loop against a scripted engine: tokens, masks, log-probabilities, budgets, time limits."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("textarena")

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset

from tests.support.tiny_model import build_tokenizer
from war_rl.envs.textarena_game import GameError, StepResult, TextArenaGame
from war_rl.trainers.verl import textarena_loop
from war_rl.trainers.verl.textarena_loop import EnvironmentTimeout, TextArenaAgentLoop

GUESS = "GuessTheNumber-v0"
SYSTEM = {"role": "system", "content": "Play."}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


class ScriptedEngine:
    """Answers each request with the next scripted text; log-probabilities are -1, -2, ... over the trajectory."""

    def __init__(self, tokenizer, texts, logprobs=True, end=True):
        self.tokenizer, self.texts, self.logprobs, self.end = tokenizer, list(texts), logprobs, end
        self.requests, self.answers, self.count = [], [], 0

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        text = self.texts[min(len(self.requests), len(self.texts) - 1)]
        ids = self.tokenizer.encode(text) + ([self.tokenizer.eos_token_id] if self.end else [])
        ids = ids[: sampling_params["max_tokens"]]
        logprobs = [-float(self.count + i + 1) for i in range(len(ids))]
        self.count += len(ids)
        step = len(self.requests)
        self.requests.append((request_id, list(prompt_ids), dict(sampling_params)))
        self.answers.append(ids)
        return SimpleNamespace(
            token_ids=ids,
            log_probs=logprobs if self.logprobs else None,
            num_preempted=0,
            stop_reason="completed",
            extra_fields={
                "global_steps": 7 + step,
                "min_global_steps": 7 + step,
                "max_global_steps": 7 + step,
                "spec_num_draft_tokens": 2,
                "num_cached_tokens": step,
            },
        )


def make_loop(tokenizer, engine, model_type="qwen2", prompt=512, response=512, max_model_len=None, **env):
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "rollout": {
                    "prompt_length": prompt,
                    "response_length": response,
                    "max_model_len": max_model_len,
                    "multi_turn": {"max_assistant_turns": None},
                }
            },
            "data": {},
            "war": {"env": env},
        }
    )
    return TextArenaAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=engine,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type=model_type,
    )


def play(tokenizer, texts, seed=0, game=GUESS, prompt_messages=(SYSTEM,), engine_options=None, **options):
    engine = ScriptedEngine(tokenizer, texts, **(engine_options or {}))

    async def main():
        loop = make_loop(tokenizer, engine, **options)
        return await loop.run(
            {"temperature": 1.0, "logprobs": True},
            raw_prompt=list(prompt_messages),
            extra_info={"game": game, "seed": seed, "index": 0},
        )

    return asyncio.run(main()), engine


def wrong_guesses(seed=0, count=3):
    game = TextArenaGame(GUESS, seed)
    game.reset()
    number = game._state.game_state["game_number"]
    return [f"[{n}]" for n in range(1, 21) if n != number][:count], f"[{number}]"


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
def test_tokens_mask_and_logprobs_line_up(tokenizer, model_type):
    wrong, right = wrong_guesses()
    output, engine = play(tokenizer, [*wrong[:2], right], model_type=model_type)
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    model_tokens = [t for t, m in zip(output.response_ids, output.response_mask, strict=True) if m]
    assert model_tokens == [t for answer in engine.answers for t in answer]
    model_logprobs = [p for p, m in zip(output.response_logprobs, output.response_mask, strict=True) if m]
    assert model_logprobs == [-float(i + 1) for i in range(len(model_tokens))]
    assert all(p == 0.0 for p, m in zip(output.response_logprobs, output.response_mask, strict=True) if not m)
    assert output.response_mask[0] == output.response_mask[-1] == 1
    assert output.reward_score == 1.0 and output.num_turns == 6 and output.extra_fields["war_turns"] == 3
    # Each request's prompt is a prefix of the trajectory: token in, token out, nothing re-encoded.
    whole = output.prompt_ids + output.response_ids
    assert all(prompt == whole[: len(prompt)] for _, prompt, _ in engine.requests)
    assert len({request_id for request_id, _, _ in engine.requests}) == 1


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
@pytest.mark.parametrize("end", [True, False])
def test_trajectory_is_what_the_chat_template_renders(tokenizer, model_type, end):
    wrong, right = wrong_guesses()
    output, _ = play(tokenizer, [wrong[0], right], model_type=model_type, engine_options={"end": end})
    game = TextArenaGame(GUESS, 0)
    opening, hint = game.reset(), game.step(wrong[0]).observation
    chat = [SYSTEM, {"role": "user", "content": opening}, {"role": "assistant", "content": wrong[0]}]
    chat += [{"role": "user", "content": hint}, {"role": "assistant", "content": right}]
    expected = tokenizer.apply_chat_template(chat, tokenize=False)
    got = tokenizer.decode(output.prompt_ids + output.response_ids)
    assert expected.removesuffix("<|im_end|>\n") == got.removesuffix("<|im_end|>")


def test_members_of_a_group_see_the_identical_game_and_seeds_differ(tokenizer):
    texts = [f"[{n}]" for n in (3, 17, 9, 12, 6, 1, 20)]

    async def group(seed, members):
        engines = [ScriptedEngine(tokenizer, texts) for _ in range(members)]
        runs = [
            make_loop(tokenizer, engine).run({}, raw_prompt=[SYSTEM], extra_info={"game": GUESS, "seed": seed})
            for engine in engines
        ]
        return await asyncio.gather(*runs), engines

    outputs, engines = asyncio.run(group(11, 6))
    assert all(o.prompt_ids == outputs[0].prompt_ids and o.response_ids == outputs[0].response_ids for o in outputs)
    assert all(o.reward_score == outputs[0].reward_score for o in outputs)
    assert len({engine.requests[0][0] for engine in engines}) == 6
    others = {tuple(asyncio.run(group(seed, 1))[0][0].response_ids) for seed in range(6)}
    assert len(others) > 2


def test_engine_fields_are_carried_over_turns(tokenizer):
    wrong, right = wrong_guesses()
    output, _ = play(tokenizer, [*wrong[:2], right])
    assert output.extra_fields["min_global_steps"] == 7 and output.extra_fields["max_global_steps"] == 9
    assert output.extra_fields["spec_num_draft_tokens"] == 6
    assert output.extra_fields["turn_scores"] == [] and output.extra_fields["tool_rewards"] == []
    assert output.metrics.num_preempted == 0 and output.metrics.tool_calls > 0
    assert all(isinstance(v, int | float) for v in output.extra_fields["reward_extra_info"].values())


def test_no_logprobs_requested_gives_none(tokenizer):
    wrong, right = wrong_guesses()
    output, _ = play(tokenizer, [wrong[0], right], engine_options={"logprobs": False})
    assert output.response_logprobs is None and len(output.response_mask) == len(output.response_ids)


def test_response_budget_truncates_and_ends_on_a_model_token(tokenizer):
    wrong, _ = wrong_guesses(count=10)
    output, engine = play(tokenizer, wrong, response=60)
    assert output.extra_fields["war_truncated"] == 1 and output.extra_fields["war_turn_limited"] == 0
    assert len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs) <= 60
    assert output.response_mask[-1] == 1 and 1 <= len(engine.requests) < 10
    assert 0.0 < output.reward_score < 1.0  # the game's own grade of the position reached


def test_turn_never_asks_for_more_than_the_room_left(tokenizer):
    wrong, _ = wrong_guesses(count=10)
    output, engine = play(tokenizer, ["so " * 40 + w for w in wrong], response=130, max_tokens_per_turn=50)
    asked = [params["max_tokens"] for _, _, params in engine.requests]
    assert asked[0] == 50 and len(output.response_ids) <= 130
    for _, prompt, params in engine.requests:
        assert len(prompt) - len(output.prompt_ids) + params["max_tokens"] <= 130


def test_context_length_truncates_too(tokenizer):
    wrong, _ = wrong_guesses(count=10)
    free, _ = play(tokenizer, wrong)
    limit = len(free.prompt_ids) + 50
    output, engine = play(tokenizer, wrong, max_model_len=limit)
    assert output.extra_fields["war_truncated"] == 1
    assert all(len(prompt) + params["max_tokens"] <= limit for _, prompt, params in engine.requests)


def test_prompt_that_fills_the_context_is_named(tokenizer):
    with pytest.raises(GameError, match=r"no room.*max_model_len"):
        play(tokenizer, ["[1]"], max_model_len=20)


def test_turn_bound_is_counted_apart_from_truncation(tokenizer):
    wrong, _ = wrong_guesses(count=5)
    output, engine = play(tokenizer, wrong, max_turns=2)
    assert len(engine.requests) == 2 and output.response_mask[-1] == 1
    assert output.extra_fields["war_turn_limited"] == 1 and output.extra_fields["war_truncated"] == 0


def test_two_invalid_moves_end_the_trajectory(tokenizer):
    output, engine = play(tokenizer, ["I [do] not know"])
    assert len(engine.requests) == 2 and output.reward_score == 0.0
    assert output.extra_fields["war_invalid_moves"] == 2 and output.extra_fields["war_truncated"] == 0


def test_hung_environment_raises_a_named_error_and_its_thread_is_stopped(tokenizer, monkeypatch):
    stopped = threading.Event()

    def hang(self, action):
        try:
            while True:
                pass
        finally:
            stopped.set()

    TextArenaGame(GUESS, 0).reset()
    monkeypatch.setattr(TextArenaGame, "step", hang)
    with pytest.raises(EnvironmentTimeout, match=r"GuessTheNumber-v0.*seed=5 turn=0.*0\.3 s"):
        play(tokenizer, ["[1]"], seed=5, step_timeout_s=0.3)
    assert stopped.wait(timeout=60)


def test_one_hung_game_does_not_hold_up_another(tokenizer, monkeypatch):
    release = threading.Event()
    step = TextArenaGame.step
    monkeypatch.setattr(TextArenaGame, "step", lambda self, a: release.wait(60) if self.seed == 1 else step(self, a))

    async def main():
        def run(seed):
            _, right = wrong_guesses(seed)
            loop = make_loop(tokenizer, ScriptedEngine(tokenizer, [right]))
            return loop.run({}, raw_prompt=[SYSTEM], extra_info={"game": GUESS, "seed": seed})

        hung = asyncio.create_task(run(1))
        done = await run(2)
        pending = not hung.done()
        hung.cancel()
        return done, pending

    done, pending = asyncio.run(main())
    release.set()
    assert done.reward_score == 1.0 and pending


def test_error_of_the_game_reaches_the_caller(tokenizer, monkeypatch):
    def broken(self, action):
        raise GameError("broke on purpose")

    monkeypatch.setattr(TextArenaGame, "step", broken)
    with pytest.raises(GameError, match="broke on purpose"):
        play(tokenizer, ["[1]"])


def test_unknown_game_and_missing_keys_are_refused(tokenizer):
    with pytest.raises(GameError, match=r"GuesTheNumber-v0.*GuessTheNumber-v0"):
        play(tokenizer, ["[1]"], game="GuesTheNumber-v0")
    with pytest.raises(GameError, match=r"lacks seed.*war-rl prepare"):
        textarena_loop._game_of({"game": GUESS})


def test_prompt_of_the_data_set_must_show_the_games_opening(tokenizer):
    _, right = wrong_guesses()
    opening = TextArenaGame(GUESS, 0).reset()
    with_it, _ = play(tokenizer, [right], prompt_messages=[SYSTEM, {"role": "user", "content": opening}])
    without, _ = play(tokenizer, [right], prompt_messages=[SYSTEM])
    assert with_it.prompt_ids == without.prompt_ids
    with pytest.raises(GameError, match="another textarena version"):
        play(tokenizer, [right], prompt_messages=[SYSTEM, {"role": "user", "content": "other rules"}])


def test_final_observation_is_not_appended(tokenizer, monkeypatch):
    monkeypatch.setattr(TextArenaGame, "step", lambda self, a: StepResult("game over text", True, 1.0))
    monkeypatch.setattr(TextArenaGame, "reward", lambda self: 1.0)
    output, engine = play(tokenizer, ["[1]"])
    assert output.response_ids == engine.answers[0]


def test_registry_file_names_the_class():
    import hydra.utils

    path = textarena_loop.__file__.replace("textarena_loop.py", "agent_loops.yaml")
    (entry,) = OmegaConf.load(path)
    assert entry.name == "textarena_agent" and hydra.utils.get_class(entry._target_) is TextArenaAgentLoop
