# `make demo` and `make test` work in a fresh clone: each builds .venv first, once.
#
# Variables:
#   PYTHON       interpreter that makes the virtual environment (3.10 or newer)
#   TORCH        requirement for torch, installed before everything else so that no
#                other package picks a build: `make demo TORCH=torch` takes the newest
#   DEMO_CONFIG  what `make demo` trains: on a GPU machine
#                `make demo DEMO_CONFIG=examples/mingpt/configs/osdp.yaml`
#   PYTEST_ARGS  passed on to pytest: `make unit PYTEST_ARGS="tests/core -x"`; by default two
#                processes share the tests, each on half of the cores;
#                with `--hypothesis-profile=random` property tests look for new examples
#   MINUTES      how long `make soak` trains

PYTHON ?= python3
TORCH ?= torch==2.13.0
DEMO_CONFIG ?= examples/mingpt/configs/osdp_cpu.yaml
PYTEST_ARGS ?= --numprocesses=2 --dist=worksteal
MINUTES ?= 60
QUICK_BENCHMARKS := cluster engines published
QUICK_CONTESTS := accumulation activations headline host lora nodes race splitting stationary
# What has torch, oneDNN and MKL compute as on a CPU without AVX-512.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
TORCH_WANTED := $(VENV)/.torch-requirement

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # tests and training time themselves: nothing may run beside them
.PHONY: help demo test test-all lint types docs unit faults soak gpu-check clean FORCE

help:
	@echo "make demo   train minGPT under an OSDP plan on two CPU ranks"
	@echo "make test   everything CI runs: lint, types, docs, unit"
	@echo "make test-all  the same with all tests, new examples for property tests, benchmarks in quick form,"
	@echo "               and the tests of make test as on a CPU without AVX-512"
	@echo "make lint | types | docs | unit   one part of it"
	@echo "make faults kill ranks 20 times, inside saving too, and resume; have them raise, stall and terminate"
	@echo "make soak   train on four ranks for an hour, and see that nothing grows"
	@echo "make gpu-check  everything that is assumed of CUDA, one line PASS or FAIL each: 4 minutes on one GPU"
	@echo "make clean  remove .venv, caches and built docs"

demo: $(INSTALLED)
	$(BIN)/python examples/mingpt/train.py fit --config $(DEMO_CONFIG)

test: lint types docs unit

test-all: lint types docs
	$(BIN)/python -m pytest $(PYTEST_ARGS) --hypothesis-profile=random
	$(AVX2) $(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)
	for program in $(QUICK_BENCHMARKS); do $(BIN)/python benchmarks/$$program.py --quick true || exit 1; done
	for contest in $(QUICK_CONTESTS); do $(BIN)/python benchmarks/contest.py $$contest --quick true || exit 1; done

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(INSTALLED_DEV)
	$(BIN)/mypy

docs: $(INSTALLED_DEV)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

unit: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -m 'not slow' $(PYTEST_ARGS)

faults: $(INSTALLED)
	$(BIN)/python -W ignore benchmarks/faults.py --count 20
	$(BIN)/python benchmarks/rank_faults.py

soak: $(INSTALLED)
	PYTHONWARNINGS=ignore $(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

gpu-check: $(INSTALLED)
	PYTHONWARNINGS=ignore $(BIN)/python benchmarks/gpu_check.py --output gpu_check.json

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Rewritten only when TORCH changes, so that another TORCH installs again.
$(TORCH_WANTED): FORCE
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' > $@

# pip before 25.1 cannot install dependency groups.
$(INSTALLED): pyproject.toml $(TORCH_WANTED)
	$(PIP) install --upgrade 'pip>=25.1'
	$(PIP) install '$(TORCH)'
	$(PIP) install --editable '.[plots]'
	touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP) install --group test --group lint --group docs --group models
	touch $@
