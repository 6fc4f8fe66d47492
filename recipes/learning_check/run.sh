#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" recipes/learning_check/learning_check.py "$@"
