# Everything runs in .venv, which `make setup` builds from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEEDS ?= 0:100000

.PHONY: setup run dev test lint simulate mutate microscope soak audit clean java

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

test: setup java lint audit
	@$(BIN)/python -m pytest

lint: setup
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy

simulate: setup
	@$(BIN)/python -m kcl_pipeline.testing.simulate --seeds $(SEEDS)

mutate: setup
	@$(BIN)/python tests/mutations.py --baseline

# A day's worth of batches by either way: is what the driver, the JVM and the Python workers hold flat?
soak: setup java
	@$(BIN)/python -m benchmarks.soak

microscope: setup
	@$(BIN)/python -m kcl_pipeline.testing.microscope_scenarios --deeper 1
	@$(BIN)/python -m kcl_pipeline.testing.model

# What is installed fits together and is what constraints.txt says; known advisories where pip-audit is installed and its service can be reached.
audit: setup
	@$(BIN)/python -m pip check --disable-pip-version-check
	@$(BIN)/python -c "import importlib.metadata as m, sys; pins = dict(l.strip().lower().replace('_', '-').split('==') for l in open('constraints.txt') if '==' in l and l[0] != '#'); \
	have = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}; \
	off = [f'{n} is {have[n]}, not {v}' for n, v in pins.items() if have.get(n, v) != v]; sys.exit('; '.join(off) or 0)"
	@if test -x $(BIN)/pip-audit; then $(BIN)/pip-audit -r constraints.txt --no-deps; else echo "pip-audit is not installed: advisories were not looked up"; fi

clean:
	rm -rf $(VENV) .run .mypy_cache .ruff_cache
