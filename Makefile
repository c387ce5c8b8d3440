# Every target makes .venv and installs the package when needed; nothing but make and Python >= 3.11 is assumed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-dev

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format lint types toggles bench clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(STAMP) ## generate text with the bundled model, with and without tree speculation
	@$(BIN)/treedraft demo

test: $(STAMP) ## run the tests (without the slow ones)
	$(BIN)/python -m pytest -q -n auto

test-slow: $(STAMP) ## run the slow tests (up to an hour)
	$(BIN)/python -m pytest -q -m slow

check: format lint types toggles test ## format, lint, types, toggles and tests: what CI runs

format: $(STAMP) ## is the code formatted? (to format it: .venv/bin/ruff format)
	$(BIN)/ruff format --check .

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

types: $(STAMP) ## mypy
	$(BIN)/mypy

toggles: $(STAMP) ## can every registered fix be reverted, and does its witness notice?
	@$(BIN)/treedraft toggles check

bench: $(STAMP) ## tokens per second beside transformers, and acceptance; writes benchmarks/results
	$(BIN)/treedraft bench latency --compare transformers --out benchmarks/results
	$(BIN)/treedraft bench acceptance --out benchmarks/results

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# The stamp is written last, so an interrupted installation is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "treedraft needs Python >= 3.11, but $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	    { echo "Could not make $(VENV). On Debian or Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.[dev]'
	@touch $@
