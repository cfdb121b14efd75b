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
# All variants stay on the device side by side, so the stack is a few layers of the size of Llama-7B's.
GPU_BUDGET := --device cuda --dtype bfloat16 --layers 6 --hidden 4096 --intermediate 11008 --batch 1 --check 0
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
	PYTHONPATH=. $(PYTHON) -m benchmarks.budget $(GPU_BUDGET) --sequence 4096 --out benchmarks/results/gpu/budget_4k.json
	PYTHONPATH=. $(PYTHON) -m benchmarks.budget $(GPU_BUDGET) --sequence 8192 --out benchmarks/results/gpu/budget_8k.json

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
