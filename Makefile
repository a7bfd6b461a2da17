# `make` alone lists what can be asked.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
# Three for two cores: tests also wait, for processes and files.
JOBS ?= 3
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet -c constraints.txt
# One thread an op, so that parallel tests do not fight for cores; kernels compiled in process, and
# kept from one run to the next. So are compiled modules, also where the environment forbids it:
# without them each worker compiles 80,000 lines of tests, and each new process those of paritas.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= TORCHINDUCTOR_COMPILE_THREADS=1 \
	TORCHINDUCTOR_CACHE_DIR="$(CURDIR)/.cache/inductor"

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' \
		$(firstword $(MAKEFILE_LIST))

# --- environment: the stamps make a second run free -----------------------------------------------

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
		sys.exit("paritas needs Python 3.11 or newer, this is " + sys.version.split()[0] + \
		": say make PYTHON=python3.11")'
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing paritas into $(VENV)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing paritas and its test tools into $(VENV)"
	@$(PIP) -e '.[test]'
	@touch $(VENV)/.installed $@

# --- use ------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.installed ## Install paritas and show what it does
	@$(BIN)/paritas demo

# --- checks ---------------------------------------------------------------------------------------

# Types are checked beside the tests: that takes most of a minute of one core.
.PHONY: test
test: lint layers ## Run every check, and the tests
	@$(MAKE) --no-print-directory --jobs=2 types run-tests

# The last line is the time of all processors, user and system: that of the tests and all they start.
.PHONY: run-tests
run-tests: $(VENV)/.installed-test
	@status=0; $(TEST_ENV) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS) || \
		status=$$?; times; exit $$status

# What may fail without harm: the tests that need a browser then skip, and say so.
.PHONY: browser
browser: ## Install Chromium where it is missing (Debian, as root), for the tests of the report
	@command -v chromium >/dev/null || { \
		timeout 60 apt-get -qq update && \
		timeout 180 apt-get -qqy install --no-install-recommends chromium >/dev/null; \
	} || echo "no Chromium here, and it cannot be installed: tests of the report will skip"

.PHONY: test-oracle
test-oracle: $(VENV)/.installed-test ## Install mindstudio-probe and compare its figures with ours
	@$(PIP) -e '.[oracle]'
	$(TEST_ENV) $(BIN)/python -m pytest tests/integration/test_msprobe_real.py \
		tests/integration/test_compare_msprobe.py $(PYTEST_ARGS)

# The oldest versions of what paritas needs, in an environment of their own. Torch is the one of
# constraints.txt. Tests of what those versions do for us: files, tables, pages and commands.
OLDEST := .venv-oldest
OLDEST_TESTS ?= tests/unit/core/numerics tests/unit/formats tests/unit/core/results tests/unit/core/reporting \
	tests/unit/app/cli tests/unit/core/settings tests/integration/test_cli_compare.py \
	tests/integration/test_cli_convert.py

# Of the extra "test" what these tests import: import-linter, for one, asks for a newer rich.
OLDEST_TOOLS := distributed duckdb hypothesis pytest pytest-xdist syrupy

$(OLDEST)/.installed: pyproject.toml constraints.txt constraints-oldest.txt
	@echo "installing paritas with the oldest versions it allows into $(OLDEST)"
	@$(PYTHON) -m venv $(OLDEST)
	@awk -F== 'NR == FNR { old[$$1]; next } !($$1 in old)' constraints-oldest.txt constraints.txt \
		>$(OLDEST)/others.txt
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(OLDEST)/bin/python -m pip install --quiet \
		-c constraints-oldest.txt -c $(OLDEST)/others.txt -e . $(OLDEST_TOOLS)
	@touch $@

.PHONY: test-oldest
test-oldest: $(OLDEST)/.installed ## Run a share of the tests with the oldest versions allowed
	$(TEST_ENV) $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(OLDEST_TESTS) $(PYTEST_ARGS)

# vLLM wants other versions than paritas is tested with, so it has an environment of its own.
ENGINES := .venv-engines

$(ENGINES)/.installed: pyproject.toml constraints.txt requirements-engines.txt
	@echo "installing paritas beside vLLM into $(ENGINES)"
	@$(PYTHON) -m venv $(ENGINES)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(ENGINES)/bin/python -m pip install --quiet \
		-c requirements-engines.txt "$$(grep '^torch==' constraints.txt)"
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(ENGINES)/bin/python -m pip install --quiet --no-deps \
		-r requirements-engines.txt -e .
	@touch $@

.PHONY: test-engines
test-engines: $(ENGINES)/.installed ## Install vLLM for CPUs, serve small models, and check what it returns
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest tests/quality/test_vllm.py $(PYTEST_ARGS)

.PHONY: lint
lint: $(VENV)/.installed-test ## Check style and formatting
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet

.PHONY: types
types: $(VENV)/.installed-test ## Check types
	$(BIN)/mypy

.PHONY: layers
layers: $(VENV)/.installed-test ## Check that imports run downwards only
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(VENV)/.installed-test ## Put the code into shape
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format --quiet

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing what builds the documentation into $(VENV)"
	@$(PIP) -e '.[docs]'
	@touch $(VENV)/.installed $@

# Nothing is fetched while it is built. It is built from a copy, because zensical takes the folder
# .cache beside its settings for its own, and ours holds the compiled kernels of the tests.
.PHONY: docs
docs: $(VENV)/.installed-docs $(VENV)/.installed-test ## Build the documentation into build/site
	@rm -rf build/staged build/site && mkdir -p build/staged
	@cp -R docs src zensical.toml build/staged/
	cd build/staged && "$(abspath $(BIN))/zensical" build --strict
	@mv build/staged/build/site build/site && rm -rf build/staged
	$(BIN)/python -m pytest -q tests/docs/test_links.py tests/docs/test_site.py

# About 20 minutes; BENCH_WHOLE=1 measures whole corpora instead of a share of them, which takes hours.
.PHONY: bench
bench: $(VENV)/.installed-test ## Measure power and speed, or ONLY=verify; then make the page
	$(BIN)/python -m benchmarks.lab.running $(ONLY)

.PHONY: bench-page
bench-page: $(VENV)/.installed ## Make docs/benchmarks.md from benchmarks/results
	$(BIN)/python -m benchmarks.lab.page

# --- release: docs/releasing.md -------------------------------------------------------------------

.PHONY: dist
dist: $(VENV)/.installed-test test-oldest ## Build the wheel and the sdist into dist/, and check them
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist -t sdist -t wheel
	DIST_FOLDER=dist $(TEST_ENV) $(BIN)/python -m pytest tests/integration/test_release.py $(PYTEST_ARGS)

.PHONY: dist-demo
dist-demo: ## Install each archive of dist/ into a fresh environment, and show the demo
	@test -d dist || { echo "there is no dist/: say make dist first"; exit 2; }
	@for archive in dist/*.whl dist/*.tar.gz; do \
		echo "installing $$archive into build/fresh" && rm -rf build/fresh && \
		$(PYTHON) -m venv build/fresh && \
		build/fresh/bin/python -m pip install --quiet -c constraints.txt "$$archive" && \
		build/fresh/bin/paritas --version && build/fresh/bin/paritas demo || exit 1; \
	done
	@rm -rf build/fresh

.PHONY: clean
clean: ## Remove caches and builds (the environment stays)
	rm -rf build dist .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests $(wildcard benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +
