# Everything a newcomer runs. Needs python >= 3.11 with venv, make and the package index.
PYTHON ?= python3
PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install dev test test-full lint bench clean

help:
	@echo "make install    build .venv with the package, its tools and PostgreSQL binaries"
	@echo "make dev        start a development server (ARGS=\"...\" are passed to 'ffd dev')"
	@echo "make test       lint, types, layers, migrations and the suite"
	@echo "make test-full  the same with long races and soaks"
	@echo "make bench      benchmarks, ratios side by side"

# The stamp makes every target work from a fresh clone and cost nothing afterwards.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ffd needs python 3.11 or later, this is " + sys.version)'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch .venv/.installed

install: .venv/.installed

dev: install
	@.venv/bin/ffd dev $(ARGS)

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	.venv/bin/lint-imports
	.venv/bin/squawk migrations/*.sql

test: lint
	$(PY) -m pytest -n 2 $(ARGS)

test-full: lint
	FFD_TEST_FULL=1 $(PY) -m pytest -n 2 $(ARGS)

bench: install
	$(PY) -m benchmarks $(ARGS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
