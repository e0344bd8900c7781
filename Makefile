# make demo       what mpguard does, on this machine, in a few minutes
# make test       everything that has to hold before a change lands
# make test-lint  all tests that need no framework, in an environment without torch
# make test-nodes several nodes on this machine: two and four launchers, and what happens when one dies; minutes
# make test-newest        the newest versions that pip offers: writes constraints-newest.txt, prints what moved; an hour
# make test-newest-short  every patch, and a program per framework, with constraints-newest.txt; 10 minutes at most
# make test-oldest        the oldest versions that pyproject.toml promises; by hand, before a release
# make docs       write the generated pages of docs/, and build the site into site/
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DOCS := $(VENV)/.installed-docs
# An environment without torch, accelerate, DeepSpeed and transformers, as the linter's users have it.
LINT_VENV := .venv-lint
LINT_INSTALLED := $(LINT_VENV)/.installed
# The newest and the oldest versions.
NEWEST_VENV := .venv-newest
SHORT_VENV := .venv-newest-short
OLDEST_VENV := .venv-oldest
FRAMEWORKS := peft trl lightning
# What runs with other versions than the pinned ones; the short part of it.
VERSION_TESTS := tests/runtime tests/targets tests/nn tests/stock tests/examples tests/newest
SHORT_TESTS := tests/newest tests/runtime/patches/test_fit.py tests/runtime/patches/test_windows.py
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: demo test test-lint test-nodes test-newest test-newest-short test-oldest check docs install install-newest-short clean

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

# With each other interpreter that is on PATH, too, or those that are named: PYTHONS="python3.10 python3.12" make test-lint
# constraints.txt is for Python 3.11: some of its versions do not exist for an older one, so pip resolves for the others.
# All of them run; what failed is named at the end.
PYTHONS ?= $(filter-out $(notdir $(PYTHON)),$(shell for version in 10 11 12 13 14; do \
	python3.$$version -c "" 2> /dev/null && echo python3.$$version; done))
test-lint: $(LINT_INSTALLED)
	@failed=; \
	$(LINT_VENV)/bin/python -m pytest -n auto --dist worksteal || failed=$(PYTHON); \
	for python in $(PYTHONS); do \
		venv=$(LINT_VENV)-$$(basename $$python); echo "$$python -m pytest"; \
		$$python -m venv $$venv && \
		env -u PIP_CONSTRAINT $$venv/bin/python -m pip install --quiet --editable '.[test]' && \
		$$venv/bin/python -m pytest -n auto --dist worksteal || failed="$$failed $$python"; \
	done; \
	test -z "$$failed" || { echo "failed with: $$failed"; exit 1; }

# Extensions that are built with other versions of torch, DeepSpeed's operators, have a folder of their own.
test-newest: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(NEWEST_VENV)/torch_extensions
test-newest-short: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(SHORT_VENV)/torch_extensions
test-oldest: export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(OLDEST_VENV)/torch_extensions

# Without constraints: what `pip install` brings today.
test-newest:
	$(PYTHON) -m venv $(NEWEST_VENV)
	env -u PIP_CONSTRAINT $(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade --upgrade-strategy eager \
		--editable '.[all,test]' $(FRAMEWORKS)
	$(PYTHON) .ci/constraints.py $(NEWEST_VENV)/bin/python
	$(NEWEST_VENV)/bin/python -m pytest $(VERSION_TESTS) -n auto --dist worksteal

# A release of others never blocks it: pip resolves from the committed file.
$(SHORT_VENV)/.installed: pyproject.toml constraints.txt constraints-newest.txt .ci/constraints.py
	$(PYTHON) -m venv $(SHORT_VENV)
	$(PYTHON) .ci/constraints.py --short > $(SHORT_VENV)/constraints.txt
	env PIP_CONSTRAINT=$(CURDIR)/$(SHORT_VENV)/constraints.txt $(SHORT_VENV)/bin/python -m pip install --quiet \
		--editable '.[all,test]' $(FRAMEWORKS)
	@touch $@

install-newest-short: $(SHORT_VENV)/.installed

test-newest-short: install-newest-short
	$(SHORT_VENV)/bin/python -m pytest $(SHORT_TESTS) -n auto --dist worksteal

test-oldest:
	$(PYTHON) -m venv $(OLDEST_VENV)
	env -u PIP_CONSTRAINT $(OLDEST_VENV)/bin/python -m pip install --quiet --editable '.[all,test]' peft \
		torch==2.11.0 accelerate==1.15.0 deepspeed==0.19.8 transformers==5.0.0 torchao==0.18.0
	$(OLDEST_VENV)/bin/python -m pytest $(VERSION_TESTS) -n auto --dist worksteal

# mypy runs next to the tests, on a core that they leave idle while they start; what it found is printed after them.
test: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & types=$$!; \
	echo "$(BIN)/python -m pytest -n auto --dist worksteal"; \
	$(BIN)/python -m pytest -n auto --dist worksteal; tested=$$?; \
	wait $$types; typed=$$?; echo "$(BIN)/mypy"; cat $(VENV)/mypy.log; \
	exit $$((tested | typed))

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
	rm -rf $(VENV) $(LINT_VENV)* $(NEWEST_VENV) $(SHORT_VENV) $(OLDEST_VENV) site demo-run .mypy_cache .ruff_cache .pytest_cache .hypothesis
