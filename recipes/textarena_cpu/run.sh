#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
WAR_RL=${WAR_RL:-.venv/bin/war-rl}
"$WAR_RL" prepare
exec "$WAR_RL" train --config-name war_demo "$@"
