# Everything runs in .venv, which `make setup` builds from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FUZZ_SECONDS ?= 60

.PHONY: setup run dev test lint simulate simulate-coverage simulation-packages mutate microscope soak failover fuzz audit clean java

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed ($(PYTHON) is older): install the package python3.11 and run 'make PYTHON=python3.11 $(MAKECMDGOALS)'"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

java: setup
	@$(BIN)/python -m kcl_pipeline.spark.java

run: setup java
	@$(BIN)/kcl-pipeline run

dev: setup java
	@$(BIN)/kcl-pipeline dev

test: setup java lint audit
	@$(BIN)/python -m pytest

lint: setup
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy && $(BIN)/lint-imports --no-cache

# SEEDS=a:b replays a range; without it COUNT seeds (2,000) from a random one run. MENU=1 replays
# seeds of an older menu of incidents. Needs no network once the packages are there.
simulate: simulation-packages
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m verification.simulate $(if $(SEEDS),--seeds $(SEEDS)) $(if $(COUNT),--count $(COUNT)) $(if $(MENU),--menu $(MENU))

simulation-packages:
	@$(BIN)/python -c 'import cbor2, greenlet, msgspec, numpy, pyarrow, pydantic' 2>/dev/null || $(MAKE) setup

# Lines and branches of the product that no seed reaches; each needs a reason in
# verification/unreached.toml. Exit code 1 when one has none.
simulate-coverage: setup
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m verification.simulate_coverage $(if $(SEEDS),--seeds $(SEEDS))

mutate: setup
	@$(BIN)/python -m verification.mutations --baseline

# A day's worth of batches by either way: is what the driver, the JVM and the Python workers hold flat?
soak: setup java
	@$(BIN)/python -m benchmarks.soak

# Every kind of crash, stop and join, 20 times each, by real processes with default settings (hours).
failover: setup
	@$(BIN)/python -m benchmarks.failover --json

microscope: setup
	@$(BIN)/python -m verification.interleavings.scenarios --deeper 1
	@$(BIN)/python -m verification.model.search

# Every boundary of input for FUZZ_SECONDS, with a fresh seed; see tests/fuzz/__init__.py.
fuzz: setup
	@$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

# What is installed fits together and is exactly what constraints.txt says; known advisories where
# pip-audit is installed and its service can be reached.
audit: setup
	@$(BIN)/python -m pip check --disable-pip-version-check
	@$(BIN)/python tools/audit.py
	@if test -x $(BIN)/pip-audit; then $(BIN)/pip-audit -r constraints.txt --no-deps; else echo "pip-audit is not installed: advisories were not looked up"; fi

clean:
	rm -rf $(VENV) .run .mypy_cache .ruff_cache
