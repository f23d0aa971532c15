# Every target prepares what it needs: on a fresh clone `make demo` and `make test` are the only commands to know.
PYTHON ?= python3
# Where torch's CPU build lies: a tenth of the default one, and all that tests and demo need. Where it cannot be reached
# the configured index serves alone.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
STAMP := $(VENV)/.ready

.PHONY: setup demo test lint readme clean
.NOTPARALLEL:

setup: $(STAMP)

# torch first: once it is there, nothing that follows asks an index for the default build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --retries 1 --extra-index-url $(TORCH_INDEX) torch || $(PIP) torch
	$(PIP) --editable ".[dev]"
	touch $@

# gloo ranks compute on one thread each, and so does everything that they are compared with.
demo: setup
	OMP_NUM_THREADS=1 $(BIN)/meshplan demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

# Writes the outputs that README.md quotes anew, from the commands above them.
readme: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.readme

clean:
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
