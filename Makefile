# `make help` lists the targets. Every target that runs Python first makes .venv when it is missing or outdated.
.DEFAULT_GOAL := help
.PHONY: help demo chat all local status cancel logs clean-scratch test test-all lint format clean venv
SHELL := /bin/bash
MAKEFLAGS += --no-print-directory

export PYTHON ?= python3
export TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
CONFIG ?= configs/qwen3_8b.yaml
# For targets that look at every run unless one is named.
ONE_RUN := $(if $(filter default undefined file,$(origin CONFIG)),,--config $(CONFIG))

# The stamp's name is a checksum of all that decides what .venv holds; it is written last.
VENV_INPUTS := $(sort $(wildcard requirements*.txt)) scripts/make_venv.sh
VENV_KEY := $(shell { cat $(VENV_INPUTS); $(PYTHON) --version; scripts/venv_kind.sh; } 2>/dev/null | cksum | cut -d' ' -f1)
STAMP := .venv/.ready-$(VENV_KEY)

BIN := .venv/bin
# One thread a worker: two workers with two threads each would fight for two cores. A file stays with one worker, since
# its tests share what is slow to start (an engine, a cluster); in order, so that the longest file is not the last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP)  ## decode a real small model on this machine, with and without speculation: table and gates
	@scripts/run_pipeline.sh --local --config configs/demo.yaml

chat: $(STAMP)  ## talk to the demo's model on this machine; accepted draft tokens are green
	@scripts/chat.sh

all: $(STAMP)  ## submit what is left of CONFIG (configs/qwen3_8b.yaml) to Slurm, as a chain of jobs
	@slurm/submit.sh --config $(CONFIG)

local: $(STAMP)  ## run every stage of CONFIG on this machine, one after the other
	@scripts/run_pipeline.sh --config $(CONFIG)

status: $(STAMP)  ## jobs of every run (CONFIG=FILE: of one): state, why one failed, how to go on
	@slurm/jobs.sh status $(ONE_RUN) || [ $$? -eq 1 ]

logs: $(STAMP)  ## the end of a stage's log: make logs STAGE=03 [CONFIG=FILE]
	@slurm/jobs.sh log $(STAGE) $(ONE_RUN)

cancel: $(STAMP)  ## cancel the jobs of CONFIG; what is finished stays
	@slurm/jobs.sh cancel --config $(CONFIG)

clean-scratch: $(STAMP)  ## list old runs on this node; DELETE=1 removes those that are archived
	@slurm/jobs.sh scratch $(if $(DELETE),--delete)

test: $(STAMP)  ## the tests that are fast (under 10 minutes on 2 cores)
	@$(PYTEST) -m "not slow and not gpu"

test-all: test  ## those, then the slow ones (under an hour)
	@$(PYTEST) -m "slow and not gpu" --durations=20

lint: $(STAMP)  ## ruff, mypy, shellcheck
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@if command -v shellcheck >/dev/null; then shellcheck -x scripts/*.sh slurm/*.sh .ci/run env.sh.example; \
	else echo "shellcheck is not installed: shell scripts not checked"; fi

format: $(STAMP)  ## rewrite the Python files as ruff formats them
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

venv: $(STAMP)  ## make .venv only

clean:  ## remove .venv and caches (never data)
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './.git/*' -type d -prune -exec rm -rf {} +

$(STAMP):
	@scripts/make_venv.sh $@
