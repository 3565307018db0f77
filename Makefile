# Everything a fresh machine needs is Python 3.11+ and make. `make` prints the verbs.
PYTHON ?= python3
JOBS   ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := OMP_NUM_THREADS=1 $(BIN)/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types contracts matrix chaos bench idle exactcost validate docs clean

help:  ## print the verbs
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

setup: $(VENV)/.ready  ## make .venv with the tested builds

demo: setup  ## plan, train on 2 processes, resume on 1, generate text, exact mode on 3 layouts (about 3 minutes)
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/demo.sh

test: setup  ## run the tests on JOBS=2 cores (a sample of the big matrices)
	$(RUN) -m pytest -q -n $(JOBS) --dist loadfile -m "not matrix and not chaos and not gpu and not alone"
	$(RUN) -m pytest -q -m alone tests/cli tests/meta tests/plan

lint: setup  ## ruff: rules and format
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: setup  ## mypy, strict on the torch-free rooms
	$(BIN)/mypy

contracts: setup  ## import-linter: which room may import which
	$(BIN)/lint-imports

matrix: export MESHWRIGHT_MATRIX = docs/matrix.md
matrix: setup  ## the big matrices, whole, with more steps; writes docs/matrix.md
	$(RUN) -m pytest -q tests/train/test_matrix.py
	$(RUN) -m pytest -q -n $(JOBS) -m matrix --ignore tests/train/test_matrix.py

chaos: setup  ## kill and stop ranks at many moments
	$(RUN) -m pytest -q -m chaos

bench: setup  ## meshwright beside hand-written loops (DDP, FSDP2, DTensor's styles, torch's 1F1B), as ratios
	$(RUN) bench/compare.py
	$(RUN) bench/compare.py --layout tp2,pp2 --recipe bench/spread.toml

idle: setup  ## how long the ranks of a pipeline wait, schedule by schedule, beside the formula (about 3 minutes)
	$(RUN) bench/idle.py

exactcost: setup  ## exact mode beside fast mode on 8 layouts: CPU, bytes sent, memory
	$(RUN) bench/exact_cost.py

validate: setup  ## the memory model beside published measurements: errors by source, verdicts, goals
	$(RUN) bench/validate.py

docs: setup  ## write docs/recipe.md from the code
	$(RUN) -m meshwright.spec.document > docs/recipe.md

clean:  ## remove what was built
	rm -rf $(VENV) build dist runs src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
