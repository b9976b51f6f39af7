.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash -euo pipefail

# The first Python that is new enough; `make demo PYTHON=python3.12` takes another. Everything is installed into .venv.
PYTHON ?= $(firstword $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p; done; true))
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# What pyproject lists, as arguments for pip.
listed = $$($(PY) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))$(1))')
SOURCES := pyproject.toml $(shell find sarp_cluster -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
JOBS := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
SAMPLES := $(wildcard examples/sample/*.zst examples/sample/*.gz)
BENCHMARKS := $(filter-out __init__,$(basename $(notdir $(wildcard bench/*.py))))

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: build ## install, replay sample traces over a real store on this disk, explain; kill an index, then a shard of a cluster
	@rm -rf .demo
	$(VENV)/bin/sarp replay --store-dir .demo $(SAMPLES)
	@echo; echo "The four stores are in .demo:"; du -sh --apparent-size .demo/*
	@echo; $(PY) examples/crash_demo.py
	@echo; $(PY) examples/cluster_demo.py

test: $(VENV)/.dev build ## run all tests
	@$(PY) -m pytest

chaos: $(VENV)/.dev build ## kill, cut the power and break the disk, for minutes (as root: all of it)
	@$(PY) -m pytest -m chaos

check: $(VENV)/.dev ## lint, format, types, import rules and spelling, in seconds
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/codespell

bench: $(VENV)/.bench build ## run each benchmark of bench/ with its defaults
	for benchmark in $(BENCHMARKS); do $(PY) -m bench.$$benchmark; done

build: $(VENV)/.built ## compile in place what changed of the core

clean: ## remove all that make has made, the virtual environment too
	rm -rf $(VENV) .demo build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find sarp_cluster \( -name '*.so' -o -name '*.c' \) -delete
	find sarp_cluster shard bench examples tests -name __pycache__ -exec rm -rf {} +

# Stamps, so that each step is done once. The build tools live in the environment: pip and the build in place then compile
# with the same ones.
$(VENV)/.tools: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade $(call listed,["build-system"]["requires"])
	@touch $@

$(VENV)/.runtime: $(VENV)/.tools
	$(PIP) --no-build-isolation --editable .
	@touch $@ $(VENV)/.built

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) $(call listed,["project"]["optional-dependencies"]["dev"])
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) $(call listed,["project"]["optional-dependencies"]["bench"])
	@touch $@

# pip has compiled everything once; after that only what changed is.
$(VENV)/.built: $(SOURCES) | $(VENV)/.runtime
	CFLAGS="$${CFLAGS:-} -Wno-sign-compare" $(PY) -W ignore -c 'from setuptools import setup; setup()' -q build_ext --inplace --parallel $(JOBS)
	@touch $@

.PHONY: help demo test chaos check bench build clean
