# SPDX-License-Identifier: Apache-2.0
"""verl's synchronous PPO/GRPO trainer with War-RL's rollout around it. The algorithm is verl's, untouched.

``trainer.rollout=war`` uses the WAR client, router and replicas; ``trainer.rollout=vllm`` verl's own. Both are
measured, polled and watched alike.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf, open_dict
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.rollout.llm_server import LLMServerClient

from war_rl import wandb_mode, wandb_run
from war_rl.alarms import Alarms, Situation
from war_rl.board import TOKEN_VARIABLE, Board
from war_rl.config import to_dict
from war_rl.progress import MARK, step_line
from war_rl.summary import RunSummary, versions
from war_rl.trace import TraceWriter
from war_rl.trainers.verl import checkpoints
from war_rl.trainers.verl.causes import NAMED, CheckpointFailed, WeightsNotFinite, describe, innermost
from war_rl.trainers.verl.client import MeasuredClient, WarClient
from war_rl.trainers.verl.health import UpdateWatch, while_alive
from war_rl.trainers.verl.monitoring import add_router
from war_rl.trainers.verl.observer import RolloutObserver
from war_rl.trainers.verl.settings import drafting_line, is_war, prepare
from war_rl.trainers.verl.version import check_batch

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 120.0


@register_trainer("war_sync")
class WarTrainerSync(PPOTrainerSync):
    """verl's ``sync`` trainer; see the module's docstring."""

    def __init__(self, config: DictConfig) -> None:
        self._war = prepare(config)
        self._is_war = is_war(config)
        with open_dict(config):
            # Anything but "sync" makes verl use its asynchronous replay buffer, dispatch and checkpointing.
            config.trainer.v1.trainer_mode = "sync"
        if "wandb" in config.trainer.logger:
            # `war-rl train` has decided by now; verl's own entry point has not.
            wandb_mode.from_process(config.trainer.default_local_dir)
        super().__init__(config)
        self._observer: RolloutObserver | None = None
        self._rollout_metrics: dict[str, float] = {}
        self._validation_metrics: dict[str, float] = {}
        self._sync_metrics: dict[str, float] = {}
        self._slowest: list[list[str | float | None]] = []
        self._wandb_defined = False
        self._weight_sums: dict[str, float] = {}
        self._late_turns = 0
        plain = OmegaConf.to_container(config, resolve=True)
        assert isinstance(plain, dict)
        # Where and for whom the run's processes were started is no part of what is computed.
        plain.pop("ray_kwargs", None)
        self._run = RunSummary(
            config.trainer.default_local_dir,
            rollout=config.trainer.rollout,
            config={str(key): value for key, value in plain.items()},
            clock=time.monotonic,
            versions=versions(),
            extra={"war": to_dict(self._war)},
            resume=config.trainer.resume_mode != "disable",
        )

    # ------------------------------------------------------------------ construction

    def _build_replay_buffer(self) -> ReplayBuffer:
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = self._war.poll_interval_s
        # The one place that verl passes through while it waits for trajectories.
        buffer._wait_for_next_poll = functools.partial(self._watch, buffer._wait_for_next_poll)
        buffer.sample = functools.partial(self._sample, buffer.sample)
        return buffer

    def _setup(self) -> None:
        super()._setup()
        manager = self.llm_server_manager
        servers = dict(zip(manager.server_addresses, manager.server_handles, strict=True))
        if self._is_war:
            infos = ray.get([server.war_info.remote() for server in servers.values()], timeout=_CALL_TIMEOUT_S)
            war = to_dict(self._war)
            seed = int(self.config.actor_rollout_ref.rollout.seed)
            router = manager.global_load_balancer
            ray.get(router.configure.remote(war, dict(zip(servers, infos, strict=True)), seed), timeout=_CALL_TIMEOUT_S)
            logger.info("WAR worker group: %s", infos)
            metrics = add_router(self.config.actor_rollout_ref.rollout, list(servers), router)
            if metrics:
                print(f"War-RL router: metrics for Prometheus at http://{metrics}/metrics", flush=True)
            # Said on the console, whatever the log level: it is the price of drafting.
            print(f"War-RL {drafting_line(self._war, infos)}", flush=True)
        self._servers = servers
        drafting = self._is_war and self._war.spec.policy != "off"
        self._alarms = Alarms(Situation(drafting, len(servers)))
        trace = TraceWriter(self.config.trainer.default_local_dir, self._war.trace, self._war.trace_mb << 20)
        if self.config.trainer.resume_mode == "disable":
            trace.clear()
        board = self._board()
        self._observer = RolloutObserver(self._war, servers, manager.global_load_balancer, self._is_war, trace, board)
        # A training worker waits without end for an engine that dies or hangs while it takes in weights.
        self.checkpoint_manager.update_weights = functools.partial(
            self._update_weights, self.checkpoint_manager.update_weights
        )

    def _board(self) -> Board | None:
        """Where the command's display looks for progress, if it has one."""
        board = Board.watched(self.config.trainer.default_local_dir)
        if board is None and TOKEN_VARIABLE in os.environ and self._war.progress != "off":
            text = "the command's machine does not share the run folder with this one: progress in plain lines"
            print(f"{MARK} {text}", flush=True)
        return board

    def init(self) -> None:
        try:
            super().init()
        except Exception as error:
            self._end_badly(error)
            raise

    def _load_checkpoint(self) -> None:
        trainer = self.config.trainer
        if trainer.resume_mode == "auto":
            done = checkpoints.repair(Path(trainer.default_local_dir), one_node=trainer.nnodes == 1)
            if done:
                print(f"{MARK} {done}", flush=True)
        super()._load_checkpoint()
        self._run.resumed_from(self.global_steps)

    def _save_checkpoint(self) -> None:
        folder = Path(self.config.trainer.default_local_dir)
        try:
            super()._save_checkpoint()
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            one_node = self.config.trainer.nnodes == 1
            text = checkpoints.failure(folder, self.global_steps, innermost(error), one_node)
            raise CheckpointFailed(text) from error

    def get_llm_client(self) -> LLMServerClient:
        return self.llm_server_manager.get_client(client_cls=WarClient if self._is_war else MeasuredClient)

    # ------------------------------------------------------------------ the run

    def fit(self, agent_loop_manager: Any) -> None:
        self._observe.attach(agent_loop_manager)
        try:
            super().fit(agent_loop_manager)
        except KeyboardInterrupt as stop:
            self._run.finish("interrupted", error=str(stop))
            self._observe.abandon()
            raise
        except Exception as error:
            # What fails between two rollouts (a weight update, say) may be the echo of something that died.
            dead = None if isinstance(error, NAMED) else self._observe.what_died()
            self._end_badly(dead or error)
            self._observe.abandon()
            if dead is not None:
                raise dead from error
            raise
        self._run.finish()

    def _end_badly(self, error: Exception) -> None:
        """Say why the run ends: in its summary, on the console, and as a metric."""
        text, faults = describe(error)
        self._run.finish("failed", error=text, faults=faults)
        print(f"{MARK} the run ends: {text}", flush=True)
        tracking = getattr(self, "logger", None)
        if faults and tracking is not None:
            # Whatever a logger has against it, it must not hide the cause.
            with contextlib.suppress(Exception):
                tracking.log(data=faults, step=self.global_steps)

    def prepare_step(self) -> dict[str, Any]:
        self._define_wandb_metrics()
        total = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
        self._observe.begin(f"step {self.global_steps}", total, validate=False, step=self.global_steps)
        return dict(super().prepare_step())

    def on_sample_end(self) -> None:
        # A dead replica's trajectories are missing from the batch: never train on the rest in silence.
        self._observe.check_health()
        self._rollout_metrics = self._observe.end()
        every = self._war.wandb.slowest_every
        due = every and self.global_steps % every == 0 and wandb_run.active_run() is not None
        self._slowest = self._observe.slowest(self._war.wandb.slowest_rows) if due else []
        super().on_sample_end()

    def on_validate_begin(self) -> None:
        self._define_wandb_metrics()
        super().on_validate_begin()
        total = len(self.val_dataset) * self.config.actor_rollout_ref.rollout.val_kwargs.n
        self._observe.begin("validation", total, validate=True, step=self.global_steps)

    def on_validate_end(self) -> None:
        self._observe.check_health()
        self._validation_metrics = self._observe.end()
        self._run.add_validation(self.global_steps, self._validation_metrics)
        super().on_validate_end()
        if self.reward_loop_manager.reward_loop_worker_handles is None:
            # A reward model on the same devices: verl put the replicas to sleep for it and loaded the weights again.
            self._announce_weights(self.global_steps)

    def _validate(self) -> dict[str, float]:
        try:
            return dict(super()._validate())
        except (RuntimeError, ValueError) as error:
            # verl says only that nothing came in when every trajectory failed.
            cause = self._observe.explain(error)
            if cause is error:
                raise
            raise cause from error

    def on_init_end(self) -> None:
        super().on_init_end()
        self._weights_updated(self.global_steps)
        self._run.started(self.global_steps, self._sync_metrics)

    def on_step_end(self) -> None:
        super().on_step_end()
        self._weights_updated(self.global_steps)

    def _update_weights(self, update: Any, *args: Any, **kwargs: Any) -> Any:
        fault = self._war.fault
        watch = UpdateWatch(self._servers, self.global_steps, fault.update_timeout_s, time.monotonic)

        def check() -> None:
            self._observe.check_dead()
            watch()

        return while_alive(functools.partial(update, *args, **kwargs), check, fault.health_interval_s)

    def _weights_updated(self, step: int) -> None:
        if self._is_war:
            self._check_weights(step, self._announce_weights(step))

    def _announce_weights(self, step: int) -> list[dict[str, Any]]:
        """Tell router and replicas that all KV is void. Returns what each replica says of itself."""
        if not self._is_war:
            return []
        refs = [self.llm_server_manager.global_load_balancer.weights_updated.remote(step)]
        refs += [server.war_begin_step.remote(step) for server in self._servers.values()]
        _, *states = ray.get(refs, timeout=_CALL_TIMEOUT_S)
        return states

    def _check_weights(self, step: int, states: list[dict[str, Any]]) -> None:
        """All replicas must hold the weights of ``step`` after an update, the same ones everywhere.

        Args:
            step: the training step that made them.
            states: what ``WarHttpServer.war_begin_step`` returned, in the servers' order.

        Raises:
            RuntimeError: a replica has older weights, or others than the rest: samples would mix two policies.
            WeightsNotFinite: a weight is NaN or infinite.
        """
        for server_id, state in zip(self._servers, states, strict=True):
            if state["version"] != step:
                raise RuntimeError(
                    f"after the weight update of step {step} replica {server_id} says that its weights are of version "
                    f"{state['version']}: its samples would come from another policy"
                )
        late = sum(int(state["late_turns"]) for state in states)
        sums = ray.get([server.war_weights.remote() for server in self._servers.values()], timeout=_CALL_TIMEOUT_S)
        lost = sorted({name for mine in sums for name, value in mine.items() if not math.isfinite(value)})
        if lost:
            raise WeightsNotFinite(
                f"after the weight update of step {self.global_steps} the engines hold weights that are not finite, "
                f"first in {lost[0]}: training has diverged; resume from a checkpoint before it, with a lower rate"
            )
        for server_id, mine in zip(self._servers, sums, strict=True):
            if mine != sums[0]:
                wrong = [name for name in mine if mine[name] != sums[0].get(name)]
                raise RuntimeError(
                    f"after the weight update replica {server_id} holds other weights than "
                    f"{next(iter(self._servers))}, first in {wrong[0]}: its samples would come from another policy"
                )
        changed = sum(1 for name, value in sums[0].items() if self._weight_sums.get(name) != value)
        self._sync_metrics = {
            "war/sync/replicas": float(len(sums)),
            "war/sync/weights_changed": changed / max(1, len(sums[0])),
            "war/sync/weight_sum": sum(sums[0].values()),
            "war/sync/late_turns": float(late - self._late_turns),
        }
        self._weight_sums, self._late_turns = sums[0], late

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, *args, **kwargs)
        metrics.update(self._rollout_metrics)
        metrics.update(self._validation_metrics)
        metrics.update(self._sync_metrics)
        self._validation_metrics = {}
        if unwritten := self._run.take_unwritten():
            metrics["war/fault/unwritten_summaries"] = float(unwritten)
        self._tell(metrics)
        reward = metrics.get("critic/rewards/mean")
        if self._war.progress != "off":
            print(step_line(self.global_steps, metrics, reward), flush=True)
        self._run.add_step(self.global_steps, metrics)

    def _tell(self, metrics: dict[str, Any]) -> None:
        """Raise alarms and complete what W&B shows; the values themselves go through verl's Tracking."""
        run = wandb_run.active_run()
        alarms = self._alarms.check(metrics)
        metrics["war/alarm/fired"] = float(len(alarms))
        for alarm in alarms:
            # An alarm is worth a line in every log, whatever war.progress says.
            print(f"{MARK} ALARM step {self.global_steps}, {alarm.cause}: {alarm.text}", flush=True)
            if self._war.wandb.alerts:
                wandb_run.send_alert(run, alarm, self.global_steps)
        wandb_run.log_slowest(run, self._slowest, self.global_steps)

    def _define_wandb_metrics(self) -> None:
        # verl opens the W&B run only when it starts to fit.
        if not self._wandb_defined and wandb_run.active_run() is not None:
            self._wandb_defined = True
            wandb_run.define_metrics(wandb_run.active_run())

    # ------------------------------------------------------------------ waiting for trajectories

    def _watch(self, wait: Any, partition_id: str, last_debug_time: float) -> float:
        self._observe.poll()
        return float(wait(partition_id, last_debug_time))

    def _sample(self, sample: Any, global_steps: int, partition_id: str, batch_size: int) -> Any:
        try:
            batch, metrics = sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        except RuntimeError as error:
            cause = self._observe.explain(error)
            if cause is error:
                raise
            raise cause from error
        # What verl reads from disk instead of generating it (skip.rollout_tq) belongs to no step of this run.
        if not OmegaConf.select(self.config, "skip.rollout_tq.enable"):
            check_batch(batch.keys, batch.tags, global_steps, validate=partition_id == "val")
        return batch, metrics

    @property
    def _observe(self) -> RolloutObserver:
        assert self._observer is not None, "the observer exists once the servers are up"
        return self._observer
