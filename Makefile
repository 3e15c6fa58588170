# `make` alone prints what there is to do. Everything below works on a bare machine that has
# bash, make and a Python >= 3.12: the virtual environment is made on first use.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv train test lint format bench clean

VENV := .venv
PY := $(VENV)/bin/python
# Newer than setup.py exactly when the environment holds what setup.py asks for.
STAMP := $(VENV)/.installed

# Yours to set on the command line: make train ARGS="--train-iters 50"
ARGS ?=
PYTHON ?=
NPROC ?= 4
CONFIG ?= configs/glm5_dsa_debug.yaml

help:
	@echo "megatron_mla"
	@echo
	@echo "  make train    train a small sparse-attention model on $(NPROC) ranks; extra flags in ARGS,"
	@echo "                e.g. make train ARGS=\"--train-iters 50 --no-rope-fusion\""
	@echo "                (CONFIG and NPROC choose another recipe and number of processes)"
	@echo "  make test     run all tests; e.g. make test ARGS=\"tests/unit -k layout\""
	@echo "  make lint     ruff and codespell; make format lets ruff rewrite what it can"
	@echo "  make bench    run the benchmarks of scripts/bench"
	@echo "  make venv     make $(VENV) and install the package in it, editable"
	@echo "  make clean    remove $(VENV)"
	@echo
	@echo "train, test, lint and bench make $(VENV) themselves when it is missing or older than"
	@echo "setup.py. They look for a Python >= 3.12; make clean venv PYTHON=/path/to/python names one."

# Megatron-Core has wheels for 3.12 and 3.13, later Pythons have to compile it: they come last.
# A candidate counts once it has *made* an environment, because a pyenv shim can be on the path
# and fail, and Debian's python3 comes without ensurepip.
define MAKE_VENV
if [ -z "$(PYTHON)" ] && $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' \
    2>/dev/null; then exit 0; fi; \
pyenv="$${PYENV_ROOT:-$${HOME:-}/.pyenv}"; \
candidates=(python3.12 python3.13 "$$pyenv"/versions/3.1[23].*/bin/python3); \
if command -v uv >/dev/null; then \
    candidates+=("$$(uv python find --no-project '>=3.12,<3.14' 2>/dev/null || true)"); fi; \
candidates+=(python3 python3.14 "$$pyenv"/versions/3.1[4-9].*/bin/python3); \
if [ -n "$(PYTHON)" ]; then candidates=("$(PYTHON)"); fi; \
tried=""; \
for candidate in "$${candidates[@]}"; do \
    command -v "$$candidate" >/dev/null || continue; \
    if ! version=$$("$$candidate" -c 'import platform; print(platform.python_version())' 2>&1); \
    then why="does not run: $${version%%$$'\n'*}"; \
    elif ! "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; \
    then why="is Python $$version, too old"; \
    elif ! log=$$("$$candidate" -m venv --clear $(VENV) 2>&1); \
    then why="is Python $$version, but cannot make a virtual environment: $${log%%$$'\n'*}"; \
    else echo "made $(VENV) with Python $$version ($$candidate)"; exit 0; fi; \
    tried+="  $$candidate $$why"$$'\n'; \
done; \
rm -rf $(VENV); \
{ echo "No usable Python >= 3.12 was found. Tried:"; \
  if [ -n "$$tried" ]; then printf '%s' "$$tried"; \
  else echo "  $${candidates[*]}: none is there"; fi; \
  echo "On Debian 13 or Ubuntu 24.04:  apt-get install python3 python3-venv"; \
  echo "On an older one, which has no such Python, either of"; \
  echo "  uv:     uv python install 3.12    (https://docs.astral.sh/uv)"; \
  echo "  pyenv:  pyenv install 3.12        (https://github.com/pyenv/pyenv)"; \
  echo "and try again, or name one yourself: make venv PYTHON=/path/to/python3.12"; \
} >&2; exit 1
endef

venv: $(STAMP)

$(STAMP): setup.py
	@$(MAKE_VENV)
	@echo "installing torch, megatron-core and the tools into $(VENV); this takes some minutes"
	$(PY) -m pip install --quiet --editable ".[dev]"
	@touch $@

# Four ranks want four GPUs; a machine with fewer trains on its CPU.
train: $(STAMP)
	@gpus=$$($(PY) -c 'import torch; print(torch.cuda.device_count())'); \
	if [ "$$gpus" -lt $(NPROC) ]; then \
	    echo "$$gpus GPUs for $(NPROC) ranks: training on the CPU"; export CUDA_VISIBLE_DEVICES=; \
	fi; \
	OMP_NUM_THREADS=1 $(PY) -m torch.distributed.run --standalone --nproc-per-node=$(NPROC) \
	    scripts/pretrain.py --config $(CONFIG) $(ARGS)

test: $(STAMP)
	$(PY) -m pytest $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/codespell

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

# The programs among the files of scripts/bench, not what they share.
bench: $(STAMP)
	@benches=($$(grep -l __main__ scripts/bench/*.py)); \
	for bench in "$${benches[@]}"; do echo "== $$bench"; $(PY) "$$bench" $(ARGS); done

clean:
	rm -rf $(VENV)
