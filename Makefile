# Everything runs in .venv, which `make setup` builds from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FUZZ_SECONDS ?= 60
# Without compiled files each process that a test starts compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup install-spark install-others run screenshots dev test lint form simulate simulate-coverage simulation-packages mutate test-long microscope soak failover fuzz audit clean java docs coverage package test-spark test-postgres test-s3 test-interop hooks

setup: $(STAMP)

# constraints.txt names all packages, so nothing is left to resolve. The pip that comes with Python may be
# old, and needs three times as long to choose the files. PySpark has no wheel: pip builds one of 500 MB,
# which it would compress for 14 s of processor time and unpack again. Meanwhile the others are installed.
# pip would compile with one process; what no process needs as a whole is compiled when it is imported. A
# file that cannot be compiled is a template in some package.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps
NOT_COMPILED := /tests/|/(moto|mypy|mypyc|pip|pkg_resources|polars|prompt_toolkit|pygments|selenium|setuptools|snowballstemmer|sphinx|trio|wcwidth)/|/pyspark/(examples|ml|mllib|pandas)/

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed ($(PYTHON) is older): install the package python3.11 and run 'make PYTHON=python3.11 $(MAKECMDGOALS)'"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) $$(grep '^pip==' constraints.txt)
	@$(MAKE) --no-print-directory -j 2 install-spark install-others
	@$(PIP) --no-build-isolation -e .
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib || true
	@touch $@

install-spark:
	@$(PIP) --config-settings=--build-option=--compression=stored $$(grep '^pyspark==' constraints.txt)

install-others:
	@grep -v '^pyspark==' constraints.txt > $(VENV)/others.txt
	@$(PIP) -r $(VENV)/others.txt

java: setup
	@$(BIN)/python -m kcl_pipeline.spark.java

run: setup java
	@$(BIN)/kcl-pipeline run

dev: setup java
	@$(BIN)/kcl-pipeline dev

# Everything that must pass before a merge. Three processes on two cores, because many tests wait. With
# four, both cores are busy as well, and the run takes as long.
# Types are checked beside the tests, because they take a minute of one core the first time.
test: setup java form audit
	@$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest --numprocesses 3 --no-loadscope-reorder $(if $(DURATIONS),--write-durations); tests=$$?; \
	wait $$types || { echo "mypy failed: its errors are above, among the lines of the tests"; exit 1; }; \
	exit $$tests

# What takes minutes and has a shorter form in `make test`, the 2,000 fixed seeds, and the property
# tests with three times as many examples. A run that was stopped continues with what has not passed
# yet; the end lists all that has run.
test-long: setup java
	@HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -vv -m long --resume .run/test-long.json

lint: form
	@echo "types (a minute the first time)"
	@$(BIN)/mypy

form: setup
	@echo "format, lint, import rules and names"
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/lint-imports --no-cache && $(BIN)/python -m tools.names

# The 2,000 fixed seeds. SEEDS=a:b runs a range, COUNT=n so many from a random one. Needs no network
# once the packages are there.
simulate: simulation-packages
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m verification.simulate $(if $(SEEDS),--seeds $(SEEDS)) $(if $(COUNT),--count $(COUNT))

simulation-packages:
	@$(BIN)/python -c 'import cbor2, greenlet, msgspec, numpy, pyarrow, pydantic' 2>/dev/null || $(MAKE) setup

# Lines and branches of the product that no seed reaches; each needs a reason in
# verification/unreached.toml. Exit code 1 when one has none.
simulate-coverage: setup
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m verification.simulate_coverage $(if $(SEEDS),--seeds $(SEEDS))

mutate: setup
	@$(BIN)/python -m verification.mutations --baseline

# The pictures of the Dagster UI in docs/figures/ui, in light and dark (eight minutes; needs Chromium).
screenshots: setup java
	@$(BIN)/python -m tools.screenshots

# Memory, threads and files of a worker over a day's worth of batches, on the Arrow and the Spark path.
soak: setup java
	@$(BIN)/python -m benchmarks.soak

# Every kind of crash, stop and join, 20 times each, by real processes with default settings (hours).
failover: setup
	@$(BIN)/python -m benchmarks.failover --json

# The larger bounds of the interleavings and of the models. The largest model has 3.6 million states
# (four minutes and 2 GB).
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

# Lines and branches of the product that the tests of one process reach. The report is a folder of
# pages; the table is the packages.
coverage: setup java
	@$(BIN)/python -m pytest --cov=kcl_pipeline --cov-branch --cov-report=html:.run/coverage $(if $(TESTS),$(TESTS)) --cov-report=json:.run/coverage.json
	@$(BIN)/python -m tools.coverage_table .run/coverage.json

# The wheel and the source archive, checked. Needs no network.
package: setup
	@rm -rf .run/dist
	@$(BIN)/python -m build --no-isolation --outdir .run/dist . >/dev/null
	@$(BIN)/python -m twine check --strict .run/dist/*

# The Spark tests with another PySpark, in an environment of its own: SPARK=4.0, 4.1 or 4.2. Needs
# the network once.
SPARK ?= 4.0
SPARK_VENV := $(VENV)-spark-$(SPARK)
test-spark: $(SPARK_VENV)/.installed java
	@PYTHONPATH=$(CURDIR) $(SPARK_VENV)/bin/python -m pytest tests/spark

$(SPARK_VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(SPARK_VENV)
	@grep -v -i '^pyspark==' constraints.txt > $(SPARK_VENV)/constraints.txt
	@$(SPARK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(SPARK_VENV)/constraints.txt -e '.[dev]' 'pyspark==$(SPARK).*'
	@touch $@

# The recipe of docs/functions.md on a real PostgreSQL, whose programs must be installed. Needs the
# network once, for psycopg.
POSTGRES := $(CURDIR)/.run/psycopg
test-postgres: setup $(POSTGRES)/.installed
	@PYTHONPATH=$(POSTGRES) $(BIN)/python -m pytest -m postgres tests/guides/test_recipe.py

$(POSTGRES)/.installed:
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(POSTGRES) 'psycopg[binary]==3.3.*'
	@touch $@

# Many writers of a table in another S3 server, Versity's gateway, with faults by a proxy. Needs Go, and
# the network once.
S3_SERVER := $(CURDIR)/.run/s3-server
test-s3: setup $(S3_SERVER)/versitygw
	@PATH="$(S3_SERVER):$$PATH" $(BIN)/python -m pytest -m s3_server tests/delta/test_object_store_faults.py

$(S3_SERVER)/versitygw:
	@GOBIN=$(S3_SERVER) go install github.com/versity/versitygw/cmd/versitygw@v1.8.0

# Workers of the real Java KCL and ours in one application, ten minutes; ALL=1: every case, an hour.
# Needs the network once, for Maven; KCL_PIPELINE_INTEROP_JARS names the folder of the jars.
test-interop: setup
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.interop $(if $(ALL),--all --page docs/interop.md)

# pre-commit is not in the extra dev, because the make targets do not need it.
hooks:
	@command -v pre-commit >/dev/null || { echo "pre-commit is not installed: pip install pre-commit"; exit 1; }
	@pre-commit install

# The documents as a site in .run/docs; a warning or a broken link fails. Needs no network.
docs: setup
	@$(BIN)/python -m tools.configuration_page
	@$(BIN)/python -m tools.metrics_page
	@$(BIN)/python -m sphinx -q -W -n --keep-going -c docs -d .run/doctrees . .run/docs
	@echo "the site is .run/docs/docs/index.html"

clean:
	rm -rf $(VENV) $(VENV)-spark-* .run .mypy_cache .ruff_cache
