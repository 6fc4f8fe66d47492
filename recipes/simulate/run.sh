#!/usr/bin/env bash
# Runs the experiments of docs/scaling.md that results.json does not hold yet, and draws all pictures anew.
set -euo pipefail
cd "$(dirname "$0")"
exec "${WAR_RL:-war-rl}" simulate sweep --seeds "${SEEDS:-1}" --json results.json --plots ../../docs/scaling "$@"
