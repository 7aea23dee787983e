# Commands for working on Shardwise. `make` alone lists them.
# They make their own environment in .venv; to use one of yours as it is: make test PYTHON=/path/to/python

# Another PyTorch has an environment of its own: make test TORCH=torch==2.12.0 (of several gigabytes, where the index has a CUDA build).
ifeq ($(origin TORCH),command line)
  VENV ?= .venv-$(subst ==,-,$(TORCH))
else
  VENV ?= .venv
endif
TORCH ?= torch==2.13.0
# Processes that share the tests of `make test`, each with its own warm ranks: two more than two cores, as many tests wait for
# programs they start. 0: none.
WORKERS ?= 4
# More words for the command behind a target: make demo ARGS=--train.steps=50, make test ARGS="-k layout"
ARGS ?=

# Compiled Python files are kept: without them every process that the tests start compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

# Ranks are processes: threads inside each would only fight over the cores.
export OMP_NUM_THREADS ?= 1

ifeq ($(origin PYTHON),command line)
  ENV :=
  export PYTHONPATH := src
  # Where the package is not installed, pytest does not find its plugin by itself.
  PLUGIN := $(shell PYTHONPATH=src $(PYTHON) tools/plugin_flag.py)
else
  PYTHON := $(VENV)/bin/python
  ENV := $(VENV)/.ready
endif

PYTEST = $(PYTHON) -m pytest -q $(PLUGIN)
PURE = tests/config tests/cli/test_main.py tests/recipe tests/techniques/test_make.py tests/techniques/test_edits.py tests/techniques/data/test_units.py \
  tests/test_errors.py tests/test_house.py tests/test_layout.py
CODE = src tests tools $(wildcard examples benchmarks)

.DEFAULT_GOAL := help
.PHONY: help demo finetune test check soak gpu lint picture docs

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(ENV)  ## train a small model on 2 local processes, about a minute, and prove its gradients
	@$(PYTHON) -m shardwise train $(ARGS)

finetune: $(ENV)  ## fine-tune a tiny model directory in 4 bits by LoRA adapters on 2 local processes, two minutes, and open it in PEFT
	@$(PYTHON) examples/small_chat.py runs/chat
	@$(PYTHON) -m shardwise train examples/chat.yaml --train.prove=false
	@$(PYTHON) -m shardwise train examples/lora.yaml $(ARGS)
	@if $(PYTHON) -c "import peft, bitsandbytes" 2>/dev/null; then $(PYTHON) examples/in_peft.py runs/chat-lora; \
	else echo "peft or bitsandbytes is not installed: python examples/in_peft.py runs/chat-lora opens the adapters in them"; fi

test: $(ENV)  ## the whole suite, on a clean checkout too (minutes)
	@echo "tests: a dot each; the first that uses ranks waits some seconds for PyTorch"
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m "not soak and not gpu" $(ARGS)

check: $(ENV)  ## format, lint, types and the tests without PyTorch (under a minute)
	@echo "format" && $(PYTHON) -m ruff format --check $(CODE)
	@echo "lint" && $(PYTHON) -m ruff check $(CODE)
	@echo "types" && $(PYTHON) -m pyrefly check --python-interpreter-path $$(command -v $(PYTHON))
	@echo "house" && $(PYTHON) tools/house.py
	@echo "pure tests" && $(PYTEST) -m "not soak and not gpu" $(PURE) $(ARGS)

soak: $(ENV)  ## the long matrices (an hour and more)
	@echo "the long matrices: a dot each, some take minutes"
	@$(PYTEST) -m soak --timeout 3600 $(ARGS)

gpu: $(ENV)  ## what makes sense on one CUDA device; says so if there is none
	@echo "looking for a CUDA device"
	@$(PYTHON) tools/find_gpu.py
	@$(PYTEST) -m gpu $(ARGS)
	@$(PYTHON) -m shardwise train --launch.device=cuda --launch.nproc=1

docs: $(ENV)  ## write the pages that are made from the code: API, errors, files that pages show, other systems, the table of rooms
	@$(PYTHON) tools/api_pages.py
	@$(PYTHON) tools/error_index.py
	@$(PYTHON) tools/shown_files.py
	@$(PYTHON) tools/dialects.py
	@$(PYTHON) tools/house.py --write

picture: $(ENV)  ## measure the curves of 1, 2 and 4 ranks and of tp, check them, draw the pictures of README and docs (half an hour)
	@$(PYTHON) tools/make_picture.py $(ARGS)
	@echo "the pictures of the pages"
	@$(PYTHON) tools/draw_pages.py

lint: $(ENV)  ## format the code and mend what the linter can mend
	@$(PYTHON) -m ruff format $(CODE)
	@$(PYTHON) -m ruff check --fix $(CODE)

$(VENV)/.ready: pyproject.toml tools/setup_env.py
	@python=$$(sh tools/find_python.sh) && "$$python" tools/setup_env.py $(VENV) --torch '$(TORCH)'
