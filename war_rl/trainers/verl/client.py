# SPDX-License-Identifier: Apache-2.0
"""LLM clients: verl's own with a record of every turn, and the WAR client on top of it.

``MeasuredClient`` changes nothing about routing; it serves ``trainer.rollout=vllm`` so that both rollouts are measured
by the same code. ``WarClient`` tells the router and the engine which trajectory a turn belongs to.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

import ray
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from war_rl.engines.vllm.fixes.seed import refuse_seed
from war_rl.engines.vllm.queue_watch import ENGINE_QUEUE_SECONDS
from war_rl.rollout.blocks import PromptHasher
from war_rl.trainers.shell import LeaseExpired
from war_rl.trainers.verl.context import CURRENT_EPISODE, Episode
from war_rl.trainers.verl.feed import FeedPublisher
from war_rl.trainers.verl.lease import Heartbeat, client_name
from war_rl.trainers.verl.link import RouterLink, answer
from war_rl.trainers.verl.settings import war_config
from war_rl.types import FeedItem, TrajectoryId, TurnRecord, TurnRequest, TurnResult, as_tokens, encode_request_id

logger = logging.getLogger(__name__)

_TURN: ContextVar[TurnRecord | None] = ContextVar("war_turn", default=None)
LEASE_TRIES = 3
"""How often a turn is asked for whose client the router has taken for dead although it lives."""

_KEY: ContextVar[str] = ContextVar("war_turn_key", default="")


class NonFiniteLogProbs(RuntimeError):
    """A replica answered with log-probs that are NaN or infinite: its logits are, and its tokens are noise."""


def check_log_probs(output: TokenOutput, turn: TurnRecord, episode: Episode | None) -> TokenOutput:
    """The answer, if its log-probs are numbers. Without log-probs (``calculate_log_probs=False``) nothing is known.

    Raises:
        NonFiniteLogProbs: names the replica, the turn and its trajectory. Such a trajectory must not be trained on.
    """
    values = output.log_probs
    # One pass in C over what is nearly always fine: a sum is finite only if every term is.
    if not values or math.isfinite(sum(values)):
        return output
    bad = [i for i, value in enumerate(values) if not math.isfinite(value)]
    if not bad:
        return output
    whose = f"trajectory {episode.trajectory.uid}/{episode.trajectory.session}" if episode else "no trajectory"
    raise NonFiniteLogProbs(
        f"replica {turn.replica or '(unknown)'} returned {len(bad)} of {len(values)} log-probs that are not finite "
        f"(the first is {values[bad[0]]}, of token {bad[0]}) in turn {turn.turn} of {whose}: its logits are NaN or "
        "infinite"
    )


class MeasuredClient(LLMServerClient):
    """verl's client; each turn of a known trajectory leaves a :class:`TurnRecord` in its episode."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        if self.config.trainer.device == "cpu":
            params = kwargs.get("sampling_params") or {}
            refuse_seed(params.get("seed"), params.get("temperature", 1.0))
        episode = CURRENT_EPISODE.get()
        turn = TurnRecord(
            turn=episode.next_turn() if episode else 0,
            replica="",
            prompt_tokens=len(prompt_ids),
            cached_tokens=None,
            generated_tokens=0,
            started=time.monotonic(),
            queue_seconds=0.0,
            seconds=0.0,
        )
        token = _TURN.set(turn)
        try:
            output = await self._generate(episode, turn, request_id, prompt_ids, kwargs)
            turn.generated_tokens = len(output.token_ids)
            turn.cached_tokens = output.extra_fields.get("num_cached_tokens")
            turn.preemptions = max(0, output.num_preempted or 0)
            return output
        except BaseException as error:
            turn.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            turn.seconds = time.monotonic() - turn.started - turn.queue_seconds
            _TURN.reset(token)
            if episode is not None:
                episode.record.turns.append(turn)

    async def _generate(
        self, episode: Episode | None, turn: TurnRecord, request_id: str, prompt_ids: list[int], kwargs: dict[str, Any]
    ) -> TokenOutput:
        output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
        return check_log_probs(output, turn, episode)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        turn = _TURN.get()
        asked = time.monotonic()
        server_id, server = await super()._acquire_server(request_id, **extra)
        if turn is not None:
            turn.queue_seconds += time.monotonic() - asked
            turn.replica = server_id
        return server_id, server


class WarClient(MeasuredClient):
    """Announces each turn's trajectory to the router and in the engine's request id, and feeds finished text."""

    def __init__(self, config: Any, load_balancer_handle: Any = None, **kwargs: Any) -> None:
        # verl passes a request's priority on only to a rollout of this name, which the replicas are underneath.
        config = copy.deepcopy(config)
        config.actor_rollout_ref.rollout.name = "vllm"
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self._publisher: FeedPublisher | None = None
        self._link: RouterLink | None = None
        self._block_size: int | None = None
        self._heartbeat: Heartbeat | None = None

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to a process stays there: each has its own line to the router, feed and lease.
        return {**self.__dict__, "_publisher": None, "_link": None, "_heartbeat": None}

    @property
    def link(self) -> RouterLink:
        """This process's line to the router; made at first use because the client travels to the workers by pickle."""
        if self._link is None:
            self._link = RouterLink(self._load_balancer, client_name())
        return self._link

    @property
    def publisher(self) -> FeedPublisher:
        """This process's feed; made at first use, as the link is."""
        if self._publisher is None:
            self._publisher = FeedPublisher(self.link.drafting_servers, war_config(self.config).spec)
        return self._publisher

    def finish_trajectory(self, trajectory: TrajectoryId) -> None:
        """No further turn of this trajectory will come. Returns at once."""
        self.link.finish(trajectory)

    async def settle(self) -> None:
        """Wait until the router knows what has happened here, and the drafters have taken in what was published."""
        await self.link.flush()
        await self.publisher.flush()

    async def _generate(
        self, episode: Episode | None, turn: TurnRecord, request_id: str, prompt_ids: list[int], kwargs: dict[str, Any]
    ) -> TokenOutput:
        # A caller outside of any episode may use one request_id for many requests at once: the key must not repeat.
        key = f"anonymous-{uuid4().hex}" if episode is None else encode_request_id(episode.trajectory, turn.turn)
        result: TurnResult | None = None
        token = _KEY.set(key)
        try:
            output = await LLMServerClient.generate(self, request_id, prompt_ids=prompt_ids, **kwargs)
            check_log_probs(output, turn, episode)
            result = TurnResult(
                generated_tokens=len(output.token_ids),
                cached_tokens=output.extra_fields.get("num_cached_tokens"),
                preemptions=max(0, output.num_preempted or 0),
                seconds=time.monotonic() - turn.started - turn.queue_seconds,
                engine_queue_seconds=output.extra_fields.pop(ENGINE_QUEUE_SECONDS, 0.0),
            )
        except Exception as error:
            result = TurnResult(error=f"{type(error).__name__}: {error}")
            raise
        finally:
            _KEY.reset(token)
            # result is None when the task was cancelled. Not awaited: a release must never hold a trajectory up.
            self.link.release(key, result)
        if episode is not None:
            self._feed(episode, prompt_ids, output.token_ids)
        return output

    def _feed(self, episode: Episode, prompt_ids: list[int], generated: list[int]) -> None:
        """Send what this turn added: the environment's text since the last turn, and the model's."""
        tokens = [*prompt_ids, *generated]
        start, tail = episode.fed_tokens, episode.fed_tail
        if start > len(tokens) or tokens[start - len(tail) : start] != tail:
            # The agent loop rewrote its history (a summary, a truncation): what was fed stays valid text of its own.
            self.publisher.count_rewritten()
            start = len(prompt_ids)
        if start < len(tokens):
            self.publisher.publish(FeedItem(episode.trajectory, start, as_tokens(tokens[start:]), sent=time.time()))
        episode.fed_tokens, episode.fed_tail = len(tokens), tokens[-16:]

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, ray.actor.ActorHandle]:
        turn, episode, key = _TURN.get(), CURRENT_EPISODE.get(), _KEY.get()
        params = extra.get("sampling_params") or {}
        prompt_ids = extra.get("prompt_ids") or []
        has_media = any(extra.get(kind) for kind in ("image_data", "video_data", "audio_data"))
        request = TurnRequest(
            key=key,
            trajectory=episode.trajectory if episode is not None else _anonymous(request_id),
            turn=turn.turn if turn is not None else 0,
            prompt_tokens=len(prompt_ids),
            max_tokens=int(params.get("max_tokens") or params.get("max_new_tokens") or 0),
            # Placeholders do not say what they stand for: a prompt with media has no hashes rather than wrong ones.
            block_hashes=() if has_media else await self._block_hashes(episode, prompt_ids),
        )
        asked = time.monotonic()
        server_id, server, reason = await self._place(request)
        if turn is not None:
            turn.queue_seconds += time.monotonic() - asked
            turn.replica, turn.reason = server_id, reason
        return server_id, server

    async def _place(self, request: TurnRequest) -> tuple[str, ray.actor.ActorHandle, str]:
        """Ask the router, and hold a lease with it from the first time on.

        Raises:
            RouterLost: it does not live, or does not remember.
        """
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(self._renew, war_config(self.config).scheduler.lease_s)
        for attempt in range(LEASE_TRIES):
            try:
                return await self.link.acquire(request)
            except LeaseExpired:
                # This process was stopped or cut off for longer than the lease.
                logger.warning("the router had given up on %s; asking again", self.link.client)
                if attempt + 1 == LEASE_TRIES:
                    raise
        raise AssertionError("unreachable")

    def _renew(self) -> bool:
        if not ray.is_initialized():
            return False
        self._load_balancer.renew.remote(self.link.client)
        return True

    async def _block_hashes(self, episode: Episode | None, prompt_ids: list[int]) -> tuple[int, ...]:
        """Hashes of the prompt's full KV blocks, made here so that tokens need not travel to the router."""
        if self._block_size is None:
            self._block_size = int(await answer(self._load_balancer.get_block_size.remote()))
        if episode is None or not self._block_size:
            return ()
        if episode.hasher is None:
            episode.hasher = PromptHasher(self._block_size)
        return episode.hasher.update(prompt_ids)

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        """Done by ``_generate``, which knows the outcome."""

    def _vllm_request_id(self, request_id: str) -> str:
        # An anonymous request keeps verl's fresh id for each turn: the caller's may repeat.
        return _KEY.get() if CURRENT_EPISODE.get() is not None else super()._vllm_request_id(request_id)


def _anonymous(request_id: str) -> TrajectoryId:
    return TrajectoryId(uid=f"anonymous-{request_id}", session=0, step=-1)
