# Two commands matter: `make train` and `make test`. Both make .venv with the versions of constraints.txt, once.
#
#   make train ARGS="--seed 1"          further flags of jobs/train.py (TOKENS=10000000 for the preset's whole budget)
#   make test  ARGS="tests/test_muon.py"    further arguments of pytest
#   make bench ARGS="muon --quick"      cases and flags of jobs/bench.py
#   make PYTHON=/path/to/python3.12 …   another interpreter (3.11 or newer)

VENV := .venv
BIN := $(VENV)/bin
SHELL := /bin/bash
ARGS ?=
# a quarter of the preset's own budget: a first result in a minute or two
TOKENS ?= 2500000
# the first interpreter that runs and is new enough: a pyenv shim may exist and still refuse to run
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3 python; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$python; break; fi; done)
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -qq --progress-bar off --constraint constraints.txt
# ARGS may select tests of one kind only: pytest's code 5, no test, is then no failure
MAY_BE_NONE = $(if $(ARGS), || test $$? = 5)

.DELETE_ON_ERROR:
.PHONY: help train test lint format bench drill clean
help:
	@sed -n '1,7s/^# \{0,1\}//p' Makefile

train: $(VENV)/installed
	$(BIN)/python jobs/train.py tiny --method muloco --scaling.num-replicas 4 --budget-tokens $(TOKENS) $(ARGS)

# the cluster tests come last, one at a time: they want the machine for themselves, and what they print ends with pytest's closing line
test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not ray" --numprocesses 2 --dist worksteal $(ARGS)$(MAY_BE_NONE)
	$(BIN)/python -m pytest -m ray $(ARGS)$(MAY_BE_NONE)

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed
	$(BIN)/python jobs/bench.py $(ARGS)

# 60 faults over 600 rounds, after as many undisturbed ones: an hour or so, not part of the tests
drill: $(VENV)/installed
	$(BIN)/python jobs/drill.py tiny --scaling.num-replicas 4 --faults 60 $(ARGS)

clean:
	rm -rf $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "ray_muloco needs Python 3.11 or newer and found none: install it, or say make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@if ! $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then echo "$(PYTHON) cannot make virtual environments: on Debian or Ubuntu, apt install python3-venv (or python3.11-venv)" >&2; exit 1; fi
	@echo "set-up 1/3: $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "set-up 2/3: torch"
	@$(PIP_INSTALL) torch
	@echo "set-up 3/3: ray, mlflow and the rest"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "set-up for tests: pytest, ruff, pyright and friends"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
