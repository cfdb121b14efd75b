# One word for each thing a contributor does. A machine needs only Python >= 3.11 with pip and venv.
#
#   make test     the whole suite; `make test-extended` has more cases of what it proves with fewer
#   make check    what to run before a commit: format, lint, types, quick tests
#   make demo     train a small model with and without a plan, and compare
#   make bench    every benchmark that runs on a CPU, then the report; `make bench-QUESTION` runs one
#   make attack   thousands of models and training habits drawn at random, and all of torch's operators, against plain;
#                 `make attack DRAWS=500 START=2000` for other ones
#   make mutants  small wrong changes of lowtide, one at a time, and whether the tests notice; a run that was stopped goes on
#   make gpu      the GPU tests and benchmarks, with the Python that is there; installs nothing. It says first what it will
#                 do and how long; `make gpu-tests` and `make gpu-QUESTION` run one piece, and go on where it was cut short

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TRAIN_STAMP := $(VENV)/.installed-train
BENCH_STAMP := $(VENV)/.installed-bench
QUESTIONS := time_against_memory largest idle predicted emulated planning_time published_setting published_runs scaling optimizer overlap overlap_pipeline pipelines details
DEVICE ?=
DRAWS ?= 2000
START ?= 0
SOURCES := lowtide tests examples benchmarks docs

.PHONY: test test-extended check demo bench report attack mutants gpu format clean

# Else the workers, and each program that a test starts, compile lowtide and its tests anew.
test test-extended check: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP)
	$(PY) -m pytest -n 2 --timeout=300 -m "not extended"

# What `make test` leaves out: more cases of what it proves with fewer.
test-extended: $(STAMP)
	$(PY) -m pytest -n 2 --timeout=600 -m extended

check: $(STAMP)
	$(PY) -m ruff format --check $(wildcard $(SOURCES))
	$(PY) -m ruff check $(wildcard $(SOURCES))
	$(PY) -m mypy
	$(PY) -m pytest -n 2 --timeout=300 -m "not slow and not extended"

demo: $(TRAIN_STAMP)
	$(PY) examples/demo.py

# One question that fails does not stop the others; an interruption does.
bench: $(BENCH_STAMP)
	@failed=; for question in $(QUESTIONS); do \
	  echo "== $$question"; $(PY) -m benchmarks.$$question || \
	  { status=$$?; test $$status -ne 130 || exit 130; failed="$$failed $$question"; }; \
	done; \
	$(PY) -m benchmarks.report || failed="$$failed report"; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

bench-%: $(BENCH_STAMP)
	$(PY) -m benchmarks.$* --resume

# What one part finds does not stop the others; an interruption does.
attack: $(STAMP)
	@failed=; for part in "--draws $(DRAWS) --start $(START) --jobs 2" "--broken all" "--operators"; do \
	  $(PY) -m tests.attack $$part || { status=$$?; test $$status -ne 130 || exit 130; failed="$$failed $$part"; }; \
	done; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

mutants: $(STAMP)
	$(PY) -m tests.mutants

report: $(BENCH_STAMP)
	$(PY) -m benchmarks.report

gpu:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu_run $(if $(DEVICE),--device $(DEVICE))

gpu-%:
	PYTHONPATH=. $(PYTHON) -m benchmarks.gpu_run $(if $(DEVICE),--device $(DEVICE)) --only $*

format: $(STAMP)
	$(PY) -m ruff format $(wildcard $(SOURCES))
	$(PY) -m ruff check --fix $(wildcard $(SOURCES))

clean:
	rm -rf $(VENV) build lowtide.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

# The stamp is younger than what it was made from, so an unchanged checkout installs nothing.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	touch $(TRAIN_STAMP) $(STAMP)

# What the demo needs is half of it.
$(TRAIN_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $(TRAIN_STAMP)

$(BENCH_STAMP): $(STAMP)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[train,dev,bench]'
	touch $(BENCH_STAMP)
