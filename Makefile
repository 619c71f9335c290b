# Needs Python 3.10 to 3.13 and make, nothing else. Try `make run`, then `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# One thread: small CPU models do not gain from more, and several test processes share the machine. Bytecode is
# kept, whatever the environment says, or each of them would compile all tests and the library.
WORKERS ?= 2
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
METADATA := setup.py pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run install test test-fast test-all without-gpu on-older-cpu lint types format check bench docs

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

run: .venv/installed  ## install, train the T-Maze preset on the CPU, print what to try next
	$(BIN)/python examples/run.py --config tmaze

install: .venv/installed-dev  ## create .venv and install everything that work on the code needs

test: check  ## lint, type-check, run every test that needs no GPU

test-fast: .venv/installed-dev  ## the tests of a few seconds only
	$(PYTEST) -m "not slow and not learning and not gpu"

test-all: lint types  ## every test, those that need a GPU included
	$(PYTEST) -m ""

check: lint  ## what continuous integration runs
	@$(MAKE) --no-print-directory --jobs 2 types on-older-cpu
	@$(MAKE) --no-print-directory without-gpu

without-gpu: .venv/installed-dev
	$(PYTEST)

on-older-cpu: .venv/installed-dev  ## the tests that depend on kernels, with those of a CPU without AVX-512
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -n 0 -m "kernels and not gpu" tests/nets tests/agents

lint: .venv/installed-dev  ## ruff
	$(BIN)/ruff check .

types: .venv/installed-dev  ## mypy, strict
	$(BIN)/mypy

format: .venv/installed-dev  ## rewrite the code in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/installed-docs  ## build the site into build/site/, warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "open build/site/index.html, or: $(BIN)/python -m mkdocs serve"

bench: .venv/installed-dev  ## run the benchmarks; results go to benchmarks/results/
	$(BIN)/python benchmarks/import_time.py > benchmarks/results/import_time.json
	$(BIN)/python benchmarks/learning.py --threads 2 --again
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/rollout.py --all

# .venv/bin/pip is the last thing that venv makes, so an interrupted creation is repeated.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(0 if sys.version_info >= (3, 10) else \
	    "Found Python " + v + ", but Loxodon needs 3.10 or newer. Fix: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/installed: $(METADATA) | .venv/bin/pip
	@echo "installing into .venv (a few minutes the first time)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[plots,tensorboard]'
	@touch $@

.venv/installed-dev: $(METADATA) | .venv/bin/pip
	@echo "installing into .venv with the extras dev, atari, envs, minari, mujoco, plots, ray, slurm, sweep and video (a few minutes the first time)"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e '.[dev,atari,envs,minari,mujoco,plots,ray,slurm,sweep,video]'
	@touch $@ .venv/installed

# The site is built from text and pictures; the code itself is not installed for it.
.venv/installed-docs: $(METADATA) | .venv/bin/pip
	@$(PIP) mkdocs-material
	@touch $@
