# `make demo` and `make test` start from a bare checkout; both need only Python 3.11 or newer and, for speed, a C compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Not compiled while installing: most of it is never imported, and what is gets compiled then.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest
COMPARE_RECORD ?= benchmarks/results/cpu-compare.json

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo compare serve test test-slow clients fuzz load prefix lint format golden clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(VENV)/.setup-stamp ## make .venv with the outrider command and the embedded default
setup-dev: $(VENV)/.dev-stamp ## setup, and what tests and lint need

demo: setup ## the embedded default, plain and with its drafter, side by side
	$(BIN)/outrider demo

compare: setup-dev ## is the drafter faster on this machine? some minutes; a record in benchmarks/results
	$(BIN)/outrider bench compare --aa --rounds 4 --max-tokens 48 --record $(COMPARE_RECORD)

serve: setup-dev ## the embedded default behind an OpenAI-compatible server
	$(BIN)/outrider serve

# Two processes of one thread each: more threads would wait for each other. Hypothesis draws what it draws in CI.
test: setup-dev ## the default tests: CPU, no network, none that are slow
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --hypothesis-profile=ci

test-slow: setup-dev ## the slow tests
	$(PYTEST) -m "slow and not gpu"

clients: setup-dev ## the server as OpenAI's client and LiteLLM see it; installs LiteLLM first
	$(PIP) --editable ".[demo,server,train,dev,clients]"
	$(PYTEST) -m "slow or not slow" tests/server/test_app_on_engine.py tests/server/test_app_litellm.py

fuzz: setup-dev ## requests made from the server's own description: 2,000 by script, 200 on the engine
	$(PYTEST) -m slow tests/server/test_app_fuzz.py

load: setup-dev ## 500 requests over 16 streams on the embedded default: nothing lost, leaked or changed
	$(BIN)/python -m tools.load

prefix: setup-dev ## prompts whose beginning is in the caches, and the same ones cold: text, acceptance, seconds
	$(BIN)/python tools/prefix_reuse.py

lint: setup-dev ## ruff, mypy and the import contract
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

golden: setup-dev ## remake tests/golden; review its diff like code
	$(PIP) --editable ".[demo,train,dev,golden]"
	@for script in tools/golden_*.py; do \
		if [ -e "$$script" ]; then echo "$$script" && $(BIN)/python "$$script" || exit 1; fi; \
	done

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist

# Editable, so a change of source needs no new set-up; only a change of what is installed does.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Outrider needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + ". Name another one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.setup-stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[demo]"
	@touch $@

# What `setup` installs is part of it: one run of pip for both.
$(VENV)/.dev-stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable ".[demo,server,train,dev]"
	@touch $(VENV)/.setup-stamp $@
