# Habits of the project, one word each. CI and the pre-commit hooks run the same targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
ARGS   ?=

SECONDS ?= 60
SEED   ?= 0

# Two files of tests at a time, in their order: most of them wait for servers.
BESIDE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: install serve check test test-full soak fix bench browser docs clean

# A stamp newer than what it was made from means that nothing has to be installed.
RUNTIME := $(VENV)/.stamp-runtime
DEV     := $(VENV)/.stamp-dev

$(RUNTIME): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "Could not create $(VENV). Python 3.11 or newer with its venv module is needed (Debian: apt-get install python3-venv)."; exit 1; }
	@echo "Installing mstar and what it needs into $(VENV) (a few minutes the first time) ..."
	@$(PIP) install --quiet -c constraints.txt -e .
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Installing the test and documentation tools ..."
	@$(PIP) install --quiet -c constraints.txt -e '.[test,docs]'
	@touch $@

install: $(DEV)              ## everything a developer needs, into .venv

serve: $(RUNTIME)            ## serve the embedded default model; ARGS="--set server.port=9000" changes a value
	$(BIN)/mstar serve $(ARGS)

# check installs nothing: it has to work offline and in a second terminal.
check:                       ## format, lint, types, import contracts, document tables
	@test -x $(BIN)/ruff || { echo "The tools are not in $(VENV); run 'make install' first."; exit 1; }
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright
	$(BIN)/python -m pytest -q test/modular/repo --ignore=test/modular/repo/test_packaging.py --ignore=test/modular/repo/test_import_weight.py

fix:                         ## what a tool can repair by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: install                ## what CI runs
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -q @test/cpu-core.txt $(BESIDE)

test-full: install           ## everything that runs on a CPU, with many more random cases (MSTAR_TEST_FULL=1)
	$(MAKE) --no-print-directory check
	MSTAR_TEST_FULL=1 $(BIN)/python -m pytest -q -m "not gpu" test/modular $(BESIDE)

soak: install                ## real servers on tiny pools under random load, departures and faults; SECONDS=600 SEED=3
	PYTHONPATH=test $(BIN)/python -m soak --seconds $(SECONDS) --seed $(SEED) $(ARGS)

bench: install               ## host cost of a step, then the front process per streamed token
	$(BIN)/python -m benchmark.worker_phases --rows 64 --steps 300 --json
	$(BIN)/python -m benchmark.front_bench

browser: install             ## what the tests of the built-in page need beside Chromium
	$(PIP) install --quiet -c constraints.txt -e '.[browser]'

docs: install                ## HTML in docs/_build/html, warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis
