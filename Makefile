# Everything that is made stays in this folder: .venv, caches, .tmp, runs/.  (pip keeps its own download cache.)
#   make install PYTHON=python3.12    another interpreter (3.10 to 3.13)
#   make install PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    smaller, where there is no GPU

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Temporary files of tests, torch, matplotlib and transformers, so that none is left in /tmp or the home folder.
TMP := $(CURDIR)/.tmp
ENV := TMPDIR=$(TMP) MPLCONFIGDIR=$(TMP)/matplotlib HF_HOME=$(TMP)/huggingface

.DEFAULT_GOAL := help
.PHONY: help install demo bench test lint format clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ :/' | awk -F' : ' '{printf "  make %-10s %s\n", $$1, $$2}'

install: $(STAMP)  ## create .venv with Plait and the tested versions of all it needs
	@echo "installed: $(BIN)/plait"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else \
	    f"plait needs Python 3.10 to 3.13, $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 install")'
	@echo "creating $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	    { echo "python cannot create virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }
	@echo "installing Plait and its dependencies (PyTorch is large: minutes on a slow line)"
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -e '.[test,dev]' -c constraints.txt $(PIP_ARGS)
	@$(BIN)/python -m compileall -q cli.py commands cost_models executor exports planner profiles recovery reports specs
	@touch $@

demo: $(STAMP)  ## profile, plan, train and compare on this machine (minutes)
	@mkdir -p $(TMP)
	@$(ENV) $(BIN)/python -u -m examples.demo

bench: $(STAMP)  ## plans against each other on two hosts with a slow link (Linux, root; an hour, resumable)
	@mkdir -p $(TMP)
	@$(ENV) $(BIN)/python -m benchmarks.testbed

test: $(STAMP)  ## run the whole test suite
	@mkdir -p $(TMP)
	@echo "running the test suite (pytest; the slow part starts several gloo processes)"
	@$(ENV) $(BIN)/python -m pytest -n 2 --dist loadgroup; status=$$?; rm -rf $(TMP); exit $$status

lint: $(STAMP)  ## check style, format and types
	@echo "ruff check";  $(BIN)/ruff check .
	@echo "ruff format"; $(BIN)/ruff format --check .
	@echo "mypy, strict on specs, cost_models and planner"; $(BIN)/mypy

format: $(STAMP)  ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv, caches and temporary files; runs/ stays
	@rm -rf $(VENV) $(TMP) build dist plait.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "clean; runs/ was left as it is"
