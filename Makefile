# make demo   what mpguard does, on this machine, in a few minutes
# make test   everything that has to hold before a change lands
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: demo test check install clean

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

test: check
	$(BIN)/python -m pytest -n auto

clean:
	rm -rf $(VENV) demo-run .mypy_cache .ruff_cache .pytest_cache .hypothesis
