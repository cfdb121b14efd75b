# One word for each thing a contributor does. A machine needs only Python >= 3.11 with pip and venv.
#
#   make test     the whole suite
#   make check    what to run before a commit: format, lint, types, quick tests
#   make demo     train a small model with and without a plan, and compare
#   make gpu      the GPU tests and the GPU benchmark, with the Python that is there; installs nothing

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := lowtide tests examples benchmarks docs

.PHONY: test check demo gpu format clean

test: $(STAMP)
	$(PY) -m pytest -n 2 --timeout=300

check: $(STAMP)
	$(PY) -m ruff format --check $(wildcard $(SOURCES))
	$(PY) -m ruff check $(wildcard $(SOURCES))
	$(PY) -m mypy
	$(PY) -m pytest -n 2 --timeout=300 -m "not slow"

demo: $(STAMP)
	$(PY) examples/demo.py

gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu

format: $(STAMP)
	$(PY) -m ruff format $(wildcard $(SOURCES))
	$(PY) -m ruff check --fix $(wildcard $(SOURCES))

clean:
	rm -rf $(VENV) build lowtide.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

# The stamp is younger than what it was made from, so an unchanged checkout installs nothing.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $(STAMP)
