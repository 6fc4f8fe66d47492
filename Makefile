# SPDX-License-Identifier: Apache-2.0
# `make help` lists what there is. PYTHON=/path/to/python chooses the interpreter (3.10 to 3.12), VENV the environment.
VENV ?= .venv
EXTRAS ?= cpu,test,dev
PYTHON ?=
ROLLOUT ?= war
ARGS ?=
BIN := $(VENV)/bin

# Modules without I/O, clocks and frameworks: checked strictly.
PURE := $(wildcard war_rl/types.py war_rl/config.py war_rl/steptime.py war_rl/metrics.py war_rl/metrics_registry.py \
	war_rl/analysis.py war_rl/trace.py war_rl/alarms.py war_rl/wandb_run.py war_rl/wandb_layout.py war_rl/progress.py war_rl/board.py war_rl/display.py war_rl/display_view.py war_rl/screen.py \
	war_rl/engine_page.py war_rl/trainers/prometheus.py war_rl/summary.py war_rl/wandb_mode.py war_rl/supervise.py war_rl/leftovers.py war_rl/processes.py war_rl/orphans.py war_rl/files.py) \
	$(wildcard war_rl/spec war_rl/rollout war_rl/traces war_rl/sim war_rl/report)
QUICK := not (vllm or slow or e2e or faults or extended)

.DEFAULT_GOAL := help
.PHONY: help env demo test quick e2e extended lint docs clean

help: ## list the commands
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-14s%s\n", $$1, $$2}'
	@echo "variables: PYTHON=python3.11  VENV=.venv  EXTRAS=cpu,test,dev  ROLLOUT=war|vllm  ARGS='hydra or pytest arguments'"

env: ## make or complete the environment in .venv (needs no root)
	@VENV='$(VENV)' EXTRAS='$(EXTRAS)' PYTHON='$(PYTHON)' scripts/bootstrap.sh

demo: env ## train SmolLM2-135M on a text game, 3 steps, on two CPU cores (ROLLOUT=vllm: with the stock rollout)
	$(BIN)/war-rl prepare
	$(BIN)/war-rl train --config-name war_demo trainer.rollout=$(ROLLOUT) $(ARGS)
	@echo "environment: $(VENV)   data: data/   run: runs/demo-$(ROLLOUT)/ (summary.json, W&B files)"
	@echo "model: $$($(BIN)/python -c 'from war_rl.prepare import default_model_dir as d; print(d())')"

test: quick e2e ## all tests: the quick ones first, then those that start engines and trainers

quick: lint ## lint, types and the tests that start nothing heavy
	$(BIN)/python -m pytest -q -m '$(QUICK)' $(ARGS)

e2e: env ## only the tests that import vLLM or start Ray, engines and trainers
	$(BIN)/python -m pytest -q --durations=12 -m 'not ($(QUICK)) and not extended' $(ARGS)

extended: env ## long tests that `make test` leaves out
	$(BIN)/python -m pytest -q --durations=12 -m extended $(ARGS)

lint: env ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PURE)

docs: env ## write the generated pages
	$(BIN)/python -c 'from war_rl.metrics_registry import markdown; open("docs/metrics.md", "w").write(markdown())'
	$(BIN)/python -c 'from war_rl.config_docs import markdown; open("docs/configuration.md", "w").write(markdown())'
	$(BIN)/python -c 'from war_rl.config_docs import default_yaml; open("configs/war/default.yaml", "w").write(default_yaml())'

clean: ## remove the environment, caches and runs (not the model in ~/.cache/war-rl)
	rm -rf '$(VENV)' runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find war_rl tests -name __pycache__ -type d -prune -exec rm -rf {} +
