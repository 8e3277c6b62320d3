# Everything runs in .venv, which `make setup` builds from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEEDS ?= 0:100000

.PHONY: setup run dev test lint simulate mutate clean java

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed ($(PYTHON) is older): install the package python3.11 and run 'make PYTHON=python3.11 $(MAKECMDGOALS)'"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

java: setup
	@$(BIN)/python -m kcl_pipeline.java

run: setup java
	@$(BIN)/kcl-pipeline run

dev: setup java
	@$(BIN)/kcl-pipeline dev

test: setup java lint
	@$(BIN)/python -m pytest

lint: setup
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy

simulate: setup
	@$(BIN)/python -m kcl_pipeline.testing.simulate --seeds $(SEEDS)

mutate: setup
	@$(BIN)/python tests/mutations.py

clean:
	rm -rf $(VENV) .run .mypy_cache .ruff_cache
