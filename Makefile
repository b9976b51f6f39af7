.DEFAULT_GOAL := help
PYTHON ?= python

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

build: ## compile the core in place (needs the packages of [build-system] in the environment)
	$(PYTHON) -W ignore -c 'from setuptools import setup; setup()' -q build_ext --inplace --parallel 2

.PHONY: help build
