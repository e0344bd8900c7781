# make demo       what mpguard does, on this machine, in a few minutes
# make test       everything that has to hold before a change lands
# make test-lint  all tests that need no framework, in an environment without torch
# make test-nodes several nodes on this machine: two and four launchers, and what happens when one dies; minutes
# make docs       write the generated pages of docs/, and build the site into site/
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DOCS := $(VENV)/.installed-docs
# An environment without torch, accelerate, DeepSpeed and transformers, as the linter's users have it.
LINT_VENV := .venv-lint
LINT_INSTALLED := $(LINT_VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: demo test test-lint test-nodes check docs install clean

install: $(INSTALLED)

# The marker makes a second `make` start at once; it is older than what decides the installation.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV) with $(PYTHON): a minute or two the first time"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: install
	$(BIN)/python examples/demo.py

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

$(LINT_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LINT_VENV)
	$(LINT_VENV)/bin/python -m pip install --quiet --editable '.[test]'
	@touch $@

test-lint: $(LINT_INSTALLED)
	$(LINT_VENV)/bin/python -m pytest -n auto --dist worksteal

test: check
	$(BIN)/python -m pytest -n auto --dist worksteal

test-nodes: install
	$(BIN)/python -m pytest tests/nodes

# Needs no torch and no framework, so it does not wait for `install`.
$(INSTALLED_DOCS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

docs: $(INSTALLED_DOCS)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(LINT_VENV) site demo-run .mypy_cache .ruff_cache .pytest_cache .hypothesis
