#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# GRPO with slime on one node; War-RL schedules and feeds the drafters. Not run yet: it needs GPUs (README.md).
#   MODEL   Hugging Face folder of Qwen3-4B          SLIME     checkout of slime with its environment active
#   DATA    prompts as JSON lines (prompt, label)    ROLLOUT   war (default) or stock     DRAFT   1 (default) or 0
set -euo pipefail

: "${MODEL:?folder of the model}" "${DATA:?file of prompts}" "${SLIME:?checkout of slime}"
ROLLOUT=${ROLLOUT:-war}
DRAFT=${DRAFT:-1}
GPUS=${GPUS:-8}
ROUTER_IP=${ROUTER_IP:-127.0.0.1}
ROUTER_PORT=${ROUTER_PORT:-30000}
OUT=${OUT:-runs/slime-$ROLLOUT}
MEGATRON=${MEGATRON:-/root/Megatron-LM}
HERE=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd) # slime runs in its own folder

war=()
if [ "$ROLLOUT" = war ]; then
  python -m war_rl.trainers.slime.router --host "$ROUTER_IP" --port "$ROUTER_PORT" --policy "${POLICY:-cost}" \
    >"$OUT/router.log" 2>&1 &
  router=$!
  trap 'kill "$router" 2>/dev/null || true' EXIT
  up=
  for _ in $(seq 100); do
    python - "$ROUTER_IP" "$ROUTER_PORT" <<'PY' && up=1 && break
import sys, urllib.request
try:
    urllib.request.urlopen(f"http://{sys.argv[1]}:{sys.argv[2]}/health", timeout=1)
except OSError:
    sys.exit(1)
PY
    kill -0 "$router" || { cat "$OUT/router.log"; exit 1; }
    sleep 0.2
  done
  [ -n "$up" ] || { echo "no router at $ROUTER_IP:$ROUTER_PORT; see $OUT/router.log" >&2; exit 1; }
  war+=(--sglang-router-ip "$ROUTER_IP" --sglang-router-port "$ROUTER_PORT")
  war+=(--rollout-function-path war_rl.trainers.slime.rollout.generate_rollout)
  if [ "$DRAFT" = 1 ]; then
    war+=(--sglang-speculative-algorithm NGRAM --sglang-speculative-num-draft-tokens 12)
    war+=(--sglang-speculative-ngram-external-sam-budget 8)
    war+=(--sglang-speculative-ngram-external-corpus-max-tokens 8000000)
  fi
fi

cd "$SLIME"
# shellcheck disable=SC1091
source scripts/models/qwen3-4B.sh # defines MODEL_ARGS
export PYTHONPATH="$MEGATRON:$HERE${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 CUDA_DEVICE_MAX_CONNECTIONS=1

python train.py "${MODEL_ARGS[@]}" "${war[@]}" \
  --hf-checkpoint "$MODEL" --ref-load "${REF:-${MODEL}_torch_dist}" --save "$OUT/checkpoints" --save-interval 50 \
  --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS" --colocate --rollout-num-gpus-per-engine 2 \
  --prompt-data "$DATA" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
  --rm-type deepscaler --num-rollout "${STEPS:-20}" --rollout-batch-size 32 --n-samples-per-prompt 8 \
  --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size 256 --balance-data \
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 \
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 \
  --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash --sglang-mem-fraction-static 0.7 "$@"
