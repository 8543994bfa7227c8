# make setup   environment in .venv (about three minutes; done once, and again when pyproject.toml changes)
# make demo    train and compare the four small models, report in runs/demo
# make test    lint, types and tests
# make lint    ruff and mypy only
# make clean   remove .venv and caches; runs/ stays

PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.ready

# Used on machines without a GPU. An open range could select a CUDA build of several GB there.
CPU_TORCH = torch==2.13.0
# The release that belongs to it; a CPU build of torch brings none, and the tests run kernels in its interpreter.
CPU_TRITON = triton==3.7.1
CPU_INDEX = https://download.pytorch.org/whl/cpu

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: help setup demo test lint clean
# Each target may use every core, so make -j runs them one after the other as well.
.NOTPARALLEL:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "Python 3.10 or newer is needed, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "[1/3] environment in $(VENV)"; \
	  $(PYTHON) -m venv --clear $(VENV) >/dev/null 2>&1 || { \
	    echo "'$(PYTHON) -m venv $(VENV)' failed: this Python has no venv module with pip" \
	      "(Debian and Ubuntu: apt install python3-venv), or the folder cannot be written." >&2; exit 1; }; }
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "[2/3] ccq-attention with torch for this machine's GPU"; \
	  $(BIN)/pip install --editable .; \
	elif [ "$$(uname -s)" != Linux ]; then \
	  echo "[2/3] $(CPU_TORCH)"; \
	  $(BIN)/pip install "$(CPU_TORCH)"; \
	else \
	  echo "[2/3] $(CPU_TORCH), CPU build"; \
	  $(BIN)/pip install --no-deps --timeout 10 --retries 0 --index-url $(CPU_INDEX) "$(CPU_TORCH)" 2>/dev/null || { \
	    echo "$(CPU_INDEX) cannot be reached or has no such build for this machine." \
	      "Taking pip's default index, whose Linux build may be the CUDA one (several GB)."; \
	    $(BIN)/pip install "$(CPU_TORCH)"; } && \
	  $(BIN)/pip install --quiet "$(CPU_TRITON)"; \
	fi
	@echo "[3/3] ccq-attention, its other dependencies and the tools for tests"
	@$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@
	@echo "ready: $(BIN)/ccq"

demo: $(STAMP)
	$(BIN)/ccq compare --preset tiny --out runs/demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One thread a worker: torch's own threads would fight over the cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
