# make demo and make test do all the set-up themselves; nothing else is needed on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

.PHONY: demo test check fixture clean

demo: .venv/installed
	scripts/demo

test: .venv/installed-dev
	scripts/check
	$(BIN)/python -m pytest

check: .venv/installed-dev
	scripts/check

# Trains the tiny checkpoint again from nothing (hours on a CPU); fixtures/README.md says how.
fixture: .venv/installed-dev
	$(BIN)/python fixtures/train.py

clean:
	rm -rf .venv demo build *.egg-info

# torch first and by version: a CPU build already on the machine is then kept.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install $$(grep '^torch==' constraints.txt)
	$(PIP) install -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) install -c constraints.txt -e '.[dev]'
	touch $@
