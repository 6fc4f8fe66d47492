#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the recording that ships with War-RL (war_rl/bench/data/war_demo.jsonl.gz): one step of the demonstration with longer
# games, 12 groups of 4 trajectories. About ten minutes on two CPU cores. Further arguments are Hydra overrides.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir -p war_rl/bench/data
war=${WAR_RL:-.venv/bin/war-rl}
"$war" prepare
"$war" train --config-name war_demo \
  "war.record_trajectories=$out/traces" "trainer.default_local_dir=$out/run" \
  trainer.total_training_steps=1 \
  data.train_batch_size=12 actor_rollout_ref.actor.ppo_mini_batch_size=12 \
  data.max_response_length=900 actor_rollout_ref.rollout.max_model_len=1280 \
  war.env.max_turns=10 war.env.max_tokens_per_turn=64 "$@"
cat "$out"/traces/*.jsonl | gzip -n9 > war_rl/bench/data/war_demo.jsonl.gz
ls -l war_rl/bench/data/war_demo.jsonl.gz
