# `make serve` serves a model, `make test` runs the suite; both set up everything they need in .venv first.

MODEL        ?= demo
PRECISION    ?= int4
BLOCK_SIZE   ?= 128
EFFECTIVE_BITS ?=
TARGET       ?= onnxruntime
HOST         ?= 127.0.0.1
HTTP_PORT    ?= 8000
GRPC_PORT    ?= 8001
METRICS_PORT ?= 8002
PROFILE      ?=
PYTHON       ?= python3
# Only the builder needs torch, and on a CPU any build of it does. Installed first and as one version, so that pip takes a CPU
# build of it (2.13.0+cpu) where one is offered and keeps one that is there, instead of replacing it by the newest release with
# gigabytes of CUDA libraries. With a GPU say e.g. TORCH='torch>=2.13'.
TORCH        ?= torch==2.13.0

VENV   := .venv
# Stamps named after what was installed: a checkout that only touches pyproject.toml installs nothing.
STAMP  := $(VENV)/.installed-$(shell cat pyproject.toml | cksum | cut -d' ' -f1)
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check
# The whole path or hub id, since two models may differ in their folder only: Qwen/Qwen3-0.6B -> Qwen--Qwen3-0.6B-int4-b128.
NAME   := $(subst /,--,$(patsubst /%,%,$(patsubst ./%,%,$(patsubst %/,%,$(MODEL:.gguf=)))))-$(PRECISION)$(if $(filter int4 mixed,$(PRECISION)),-b$(BLOCK_SIZE))$(EFFECTIVE_BITS:%=-e%)$(if $(filter-out onnxruntime,$(TARGET)),-$(TARGET))
ENGINE := engines/$(NAME)

ifneq ($(words $(MODEL)),1)
$(error MODEL must be a hub id, a folder or a .gguf file, without spaces; got "$(MODEL)")
endif

.PHONY: help setup serve engine test lint clean
.DEFAULT_GOAL := help

help: ## Show what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 18
	@echo
	@echo "  serve and engine take MODEL ($(MODEL)), PRECISION ($(PRECISION)), BLOCK_SIZE ($(BLOCK_SIZE)), TARGET ($(TARGET)) and"
	@echo "  EFFECTIVE_BITS (of mixed); serve also HOST, HTTP_PORT, GRPC_PORT, METRICS_PORT and PROFILE (a file of"
	@echo "  model_repository/llm/configs, without .pbtxt)"

setup: $(STAMP)-serve ## Install what serving needs, and nothing else

serve: engine ## Serve MODEL with Triton until Ctrl-C
	@exec $(VENV)/bin/python scripts/serve.py --engine $(ENGINE) --host $(HOST) --http-port $(HTTP_PORT) \
		--grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT) --model-config-name "$(PROFILE)"

engine: $(ENGINE)/engine.json ## Build the engine of MODEL unless it is there

$(ENGINE)/engine.json: | $(STAMP)-serve
	@$(VENV)/bin/python -m build_engines build --model "$(MODEL)" --precision $(PRECISION) --block-size $(BLOCK_SIZE) \
		$(EFFECTIVE_BITS:%=--effective-bits %) --target $(TARGET) --output $(ENGINE)

test: $(STAMP)-dev ## Run the whole suite
	$(VENV)/bin/python -m pytest

lint: $(STAMP)-dev ## Check style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy scripts
	$(VENV)/bin/hadolint Dockerfile Dockerfile.cpu

clean: ## Remove the environment, engines and caches
	rm -rf $(VENV) engines .cache .pytest_cache .mypy_cache .ruff_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 12) else "Python %d.%d cannot run the packaged Triton (its numpy 1 has no build for it); use 3.10, 3.11 or 3.12: make PYTHON=python3.11 ..." % v)'
	@echo "Making $(VENV) ..."
	@# Half an environment (without pip, say) would pass for a whole one the next time.
	@$(PYTHON) -m venv $(VENV) && $(PIP) install --quiet --upgrade pip || { rm -rf $(VENV); exit 1; }

$(STAMP)-serve: | $(VENV)/bin/python
	@echo "Installing packages (a few minutes the first time) ..."
	$(PIP) install --progress-bar on '$(TORCH)'
	$(PIP) install --progress-bar on -e '.[runtime,triton,client,build,demo]'
	@touch $@

$(STAMP)-dev: $(STAMP)-serve
	$(PIP) install --progress-bar on -e '.[dev]'
	@touch $@
