#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Composed and checked by tests/test_recipes.py; not run on GPUs by us.
set -eu
MODEL=${MODEL:-Qwen/Qwen3-8B}
TRAIN_FILES=${TRAIN_FILES:-data/train.parquet}
VAL_FILES=${VAL_FILES:-data/val.parquet}
AGENT_LOOPS=${AGENT_LOOPS:-null}
exec "${WAR_RL:-war-rl}" train \
  model_engine=megatron \
  trainer.rollout=war \
  algorithm.adv_estimator=grpo \
  data.train_files="$TRAIN_FILES" \
  data.val_files="$VAL_FILES" \
  data.train_batch_size=64 \
  data.max_prompt_length=4096 \
  data.max_response_length=16384 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1 \
  actor_rollout_ref.actor.megatron.param_offload=True \
  actor_rollout_ref.actor.megatron.optimizer_offload=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.max_model_len=20480 \
  actor_rollout_ref.rollout.agent.agent_loop_config_path="$AGENT_LOOPS" \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.experiment_name=qwen3-8b-megatron-war \
  trainer.total_epochs=1 \
  "$@"
