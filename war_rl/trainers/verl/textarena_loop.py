# SPDX-License-Identifier: Apache-2.0
"""verl agent loop that plays single-player textarena games, token in, token out.

The tokens the engine produced are the tokens that are trained on: nothing is decoded and encoded again. A trajectory's
response is assistant turn, environment turn, assistant turn, ...; it always ends with an assistant turn, so that the
reward, which verl puts on the last response token, lies on a token the model wrote.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import SPEC_DECODE_EXTRA_KEYS
from verl.utils.profiler import simple_timer
from verl.utils.rollout_trace import rollout_trace_op
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder, QwenContinuousTokenBuilder

from war_rl.config import load_config
from war_rl.envs.bounded import run_bounded
from war_rl.envs.textarena_game import GameError, StepResult, TextArenaGame

T = TypeVar("T")


class EnvironmentTimeout(RuntimeError):
    """An environment call took longer than ``war.env.step_timeout_s``. Names game, seed, turn and seconds."""


@dataclass
class _Episode:
    """What a trajectory has gathered so far. ``mask`` and ``logprobs`` cover ``ids`` after the prompt."""

    messages: list[dict[str, Any]]
    ids: list[int]
    prompt_len: int
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    env_turns: int = 0
    reset_seconds: float = 0.0
    step_seconds: list[float] = field(default_factory=list)
    truncated: bool = False
    turn_limited: bool = False
    metrics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@register("textarena_agent")
class TextArenaAgentLoop(AgentLoopBase):
    """Plays the game instance named by ``extra_info.game`` and ``extra_info.seed`` of the data set's row.

    Turn length, number of turns and the environment's time limit come from ``war.env``; verl's own
    ``rollout.multi_turn.max_assistant_turns`` bounds the turns too where it is set. The episode ends when the game is
    over, at the turn bound, or when response or context length are used up. The reward is the game's own; for a game
    cut short it is what the game itself gives for the position reached, or 0.0 if it gives nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        war = self.config.get("war")
        plain: Any = OmegaConf.to_container(war, resolve=True) if war is not None else None
        env = load_config(plain).env
        self.step_timeout_s = env.step_timeout_s
        self.max_tokens_per_turn = env.max_tokens_per_turn
        limit = self.rollout_config.multi_turn.get("max_assistant_turns")
        self.max_turns = min(env.max_turns, int(limit)) if limit else env.max_turns
        self.response_length = int(self.rollout_config.response_length)
        total = int(self.rollout_config.prompt_length) + self.response_length
        self.context_length = min(total, int(self.rollout_config.get("max_model_len") or total))
        self._turn_closing = _turn_closing(self.continuous_token_builder, self.tokenizer)

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        """Play one trajectory.

        Args:
            sampling_params: the trainer's; only ``max_tokens`` is set here, per turn.
            priority: verl's, used for the request id under ``full_determinism`` as stock loops do.
            kwargs: the data-set row; ``raw_prompt`` (chat messages) and ``extra_info`` (``game``, ``seed``) are needed.

        Raises:
            EnvironmentTimeout: a call of the game took too long.
            GameError: no such game, the row does not fit the game, or the game broke.
        """
        # In a thread: the first game of a process imports textarena, which takes seconds.
        game = await asyncio.to_thread(_game_of, kwargs.get("extra_info"))
        full_determinism = getattr(self.rollout_config, "full_determinism", False)
        request_id = f"det-{int(priority)}" if full_determinism else uuid4().hex
        started = time.perf_counter()
        opening = await self._in_time(game, "reset", game.reset)
        messages = _with_opening(list(kwargs["raw_prompt"]), opening, game)
        ids = await self.ct_build_initial_tokens(messages)
        episode = _Episode(messages=messages, ids=ids, prompt_len=len(ids))
        episode.reset_seconds = time.perf_counter() - started
        await self._play(game, episode, request_id, sampling_params)
        return self._output(game, episode)

    async def _play(
        self, game: TextArenaGame, episode: _Episode, request_id: str, sampling_params: dict[str, Any]
    ) -> None:
        while True:
            room = self._room(episode)
            if room < 1:
                # Only a prompt that fills the context gets here; between turns _observe keeps room for one token.
                raise GameError(
                    f"game={game.game!r} seed={game.seed}: the prompt of {episode.prompt_len} tokens leaves no room in "
                    f"a context of {self.context_length}; raise rollout.max_model_len"
                )
            action = await self._generate(episode, request_id, sampling_params, min(self.max_tokens_per_turn, room))
            started = time.perf_counter()
            result: StepResult = await self._in_time(game, "step", functools.partial(game.step, action))
            episode.step_seconds.append(time.perf_counter() - started)
            if result.done:
                return
            if episode.turns >= self.max_turns:
                episode.turn_limited = True
                return
            if not await self._observe(episode, action, result.observation):
                episode.truncated = True
                return

    def _room(self, episode: _Episode) -> int:
        return min(self.response_length - len(episode.mask), self.context_length - len(episode.ids))

    async def _generate(
        self, episode: _Episode, request_id: str, sampling_params: dict[str, Any], max_tokens: int
    ) -> str:
        """One assistant turn: append its tokens and return its text."""
        with simple_timer("generate_sequences", episode.metrics):
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=list(episode.ids),
                sampling_params={**sampling_params, "max_tokens": max_tokens},
            )
        tokens = list(output.token_ids)[:max_tokens]
        if not tokens:
            raise RuntimeError(
                f"request {request_id}: the engine returned no token (stop reason {output.stop_reason!r})"
            )
        episode.turns += 1
        _merge_extra(episode, output)
        logprobs = list(output.log_probs)[:max_tokens] if output.log_probs else None
        merged, episode.mask, aligned = await self.ct_merge_assistant_token(
            episode.ids,
            tokens,
            episode.mask,
            episode.logprobs if logprobs is not None else None,
            assistant_logprobs=logprobs,
        )
        episode.ids = merged.token_ids
        episode.logprobs = aligned if aligned is not None else []
        tokenizer: Any = self.tokenizer
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    async def _observe(self, episode: _Episode, action: str, observation: str) -> bool:
        """Append the environment's turn; False, with nothing appended, if it leaves no room for an answer."""
        before = [*episode.messages, {"role": "assistant", "content": action}]
        after = [*before, {"role": "user", "content": observation}]
        has_logprobs = bool(episode.logprobs)
        closing = self._missing_closing(episode.ids)
        merged, mask, logprobs = await self.ct_merge_context_msg(
            before,
            after,
            episode.ids + closing,
            episode.mask + [0] * len(closing),
            episode.logprobs + [0.0] * len(closing) if has_logprobs else None,
        )
        if len(mask) >= self.response_length or len(merged.token_ids) >= self.context_length:
            return False
        episode.messages, episode.ids, episode.mask = after, merged.token_ids, mask
        episode.logprobs = logprobs if logprobs is not None else []
        episode.env_turns += 1
        return True

    def _missing_closing(self, ids: list[int]) -> list[int]:
        """Tokens that close the assistant's turn and that the model did not write itself (mask 0)."""
        closing = self._turn_closing
        return closing[1:] if closing and ids[-1] == closing[0] else closing

    def _output(self, game: TextArenaGame, episode: _Episode) -> AgentLoopOutput:
        reward = game.reward()
        counts = {
            "war_turns": episode.turns,
            "war_truncated": int(episode.truncated),
            "war_turn_limited": int(episode.turn_limited),
            "war_invalid_moves": game.invalid_moves,
            # One for each turn: what a recording keeps as the turn's tool time.
            "war_env_seconds": episode.step_seconds,
        }
        episode.extra.update(counts, turn_scores=[], tool_rewards=[])
        # verl averages these in validation; they must be numbers.
        episode.extra["reward_extra_info"] = {
            "turns": episode.turns,
            "truncated": int(episode.truncated),
            "invalid_moves": game.invalid_moves,
        }
        episode.metrics["tool_calls"] = episode.reset_seconds + sum(episode.step_seconds)
        return AgentLoopOutput(
            prompt_ids=episode.ids[: episode.prompt_len],
            response_ids=episode.ids[episode.prompt_len :],
            response_mask=episode.mask,
            response_logprobs=episode.logprobs or None,
            multi_modal_data={},
            reward_score=reward,
            num_turns=episode.turns + episode.env_turns + 1,
            metrics=AgentLoopMetrics(**episode.metrics),
            extra_fields=episode.extra,
        )

    async def _in_time(self, game: TextArenaGame, what: str, call: Callable[[], T]) -> T:
        try:
            return await run_bounded(call, self.step_timeout_s, f"war-env-{game.game}-{game.seed}")
        except asyncio.TimeoutError:
            raise EnvironmentTimeout(
                f"game={game.game!r} seed={game.seed} turn={game.turns}: {what}() did not return within "
                f"{self.step_timeout_s:g} s (war.env.step_timeout_s)"
            ) from None


def _game_of(extra_info: Any) -> TextArenaGame:
    info = dict(extra_info or {})
    missing = [key for key in ("game", "seed") if info.get(key) is None]
    if missing:
        raise GameError(
            f"the data set's extra_info lacks {' and '.join(missing)} (it has {sorted(info)}); "
            "agent textarena_agent needs rows made by `war-rl prepare`"
        )
    return TextArenaGame(str(info["game"]), int(info["seed"]))


def _with_opening(messages: list[dict[str, Any]], opening: str, game: TextArenaGame) -> list[dict[str, Any]]:
    """The prompt with the game's opening in it: added if the row brings no user message, checked if it does."""
    spoken = [str(message.get("content")) for message in messages if message.get("role") == "user"]
    if not spoken:
        return [*messages, {"role": "user", "content": opening}]
    if not any(opening in text for text in spoken):
        raise GameError(
            f"game={game.game!r} seed={game.seed}: the data set's prompt shows another opening than the game does, so "
            "it was made by another textarena version; run `war-rl prepare` again"
        )
    return messages


def _turn_closing(builder: Any, tokenizer: Any) -> list[int]:
    """Tokens the chat template writes after an assistant's words, from the end-of-turn token on; [] if unknown.

    verl's Qwen builder adds the newline that ChatML has after ``<|im_end|>``, but it is chosen by ``model_type``; a
    Llama model with a ChatML template, as SmolLM2, gets the default builder, which adds nothing. Neither closes a turn
    that was cut by its token limit. Builders of other families have rules of their own and are left alone.
    """
    if type(builder) not in (ContinuousTokenBuilder, QwenContinuousTokenBuilder) or tokenizer.eos_token_id is None:
        return []
    spoken = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    opened: list[int] = builder.build_initial_tokens(spoken)
    # The user turn's closing is the assistant's in the templates these two builders serve, and unlike an assistant turn
    # it is rendered the same by templates that put in or take out reasoning.
    try:
        closed = builder.render_delta_token_id(spoken, [], add_generation_prompt=True)
    except ValueError:
        return []
    body = opened[: len(opened) - len(closed)] if closed else opened
    if tokenizer.eos_token_id not in body:
        return []
    last = len(body) - 1 - body[::-1].index(tokenizer.eos_token_id)
    return body[last:]


def _merge_extra(episode: _Episode, output: Any) -> None:
    """Carry the engine's extra fields over the turns as verl's tool loop does."""
    preempted = output.num_preempted if output.num_preempted is not None else -1
    known = episode.metrics.get("num_preempted")
    episode.metrics["num_preempted"] = preempted if known is None else known + max(preempted, 0)
    if episode.turns == 1:
        episode.extra.update(output.extra_fields)
        return
    newest = output.extra_fields.get("max_global_steps")
    if newest is not None:
        episode.extra["max_global_steps"] = newest
    for key in SPEC_DECODE_EXTRA_KEYS:
        if key in output.extra_fields and key in episode.extra:
            episode.extra[key] = int(episode.extra[key]) + int(output.extra_fields[key])
