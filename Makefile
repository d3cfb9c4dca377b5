# Every target sets up .venv by itself, once; `make test PYTHON3=python3.12` chooses the interpreter.
PYTHON3 ?= python3
PYTHON := .venv/bin/python
STAMP := .venv/.installed

.PHONY: help setup demo test lint notebooks bench clean

help:
	@echo "make demo       train 48 CNNs as one array; table, picture, ratio"
	@echo "make test       tests, and the examples in docstrings and README"
	@echo "make lint       ruff and pyright"
	@echo "make notebooks  run the notebooks top to bottom"
	@echo "make bench      ratios measured side by side"
	@echo "make clean      remove .venv and everything that was made"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up .venv; this takes a minute or two"
	$(PYTHON3) -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(PYTHON) examples/digits.py

test: $(STAMP)
	$(PYTHON) -m pytest

lint: $(STAMP)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m pyright

notebooks: $(STAMP)
	$(PYTHON) notebooks/run.py --check

bench: $(STAMP)
	$(PYTHON) -m benchmarks

clean:
	rm -rf .venv out build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
