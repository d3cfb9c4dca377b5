# Every target sets up .venv by itself, once; `make test PYTHON3=python3.12` chooses the interpreter.
PYTHON3 ?= python3
PYTHON := .venv/bin/python
STAMP := .venv/.installed
XLA_PYTHON := .venv-xla/bin/python
XLA_STAMP := .venv-xla/.installed

.PHONY: help setup demo test test-more test-all test-xla wheel mutants lint docs notebooks bench clean

help:
	@echo "make demo       train 48 CNNs as one array; table, picture, ratio"
	@echo "make test       tests, and the examples in docstrings, README and documentation; some minutes"
	@echo "make test-more  the same, longer tables, crash and benchmark tests, and make test-xla; half an hour"
	@echo "make test-all   the same, and the longest; takes long"
	@echo "make test-xla   tests on XLA and on the oldest PyTorch supported, in .venv-xla (some GB)"
	@echo "make wheel      build wheel and sdist, and test the wheel in a fresh environment"
	@echo "make mutants    change the source in SAMPLE=200 small ways, and name the changes that no test notices"
	@echo "make lint       ruff and pyright"
	@echo "make docs       the documentation, in out/docs; warnings are errors"
	@echo "make notebooks  run the notebooks top to bottom"
	@echo "make bench      eight models of every workload in every way to train, side by side; takes long"
	@echo "make clean      remove .venv, .venv-xla and everything that was made"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON3) is no Python 3.10 or later: name one that is, make $(or $(MAKECMDGOALS),test) PYTHON3=python3.12"; exit 1; }
	@$(PYTHON3) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON3) cannot make an environment: install its venv, apt-get install python3-venv"; exit 1; }
	@echo "Setting up .venv; this takes a minute or two"
	$(PYTHON3) -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(PYTHON) examples/digits.py

test: $(STAMP)
	$(PYTHON) -m pytest -n auto --dist worksteal -m "not exhaustive"

test-more: test
	$(PYTHON) -m pytest -n auto --dist worksteal -m "exhaustive and not soak"
	$(MAKE) test-xla

test-all: test-more
	$(PYTHON) -m pytest -n auto --dist worksteal -m soak
	$(MAKE) test-xla XLA_MARKERS=soak

$(XLA_STAMP): pyproject.toml constraints.txt
	@echo "Setting up .venv-xla with several GB of packages; this takes some minutes"
	$(PYTHON3) -m venv .venv-xla
	grep -v '^torch==' constraints.txt > .venv-xla/constraints.txt
	$(XLA_PYTHON) -m pip install --quiet --disable-pip-version-check --progress-bar off \
		-c .venv-xla/constraints.txt -e '.[examples,xla]' hypothesis pytest pytest-timeout pytest-xdist
	@touch $@

# Most of the time on XLA goes into compiling, and graphs this small gain nothing from an optimised one. One process alone
# would hold so many programs that it runs into the system's limit of memory maps.
XLA_MARKERS ?= not soak
test-xla: export PJRT_DEVICE := CPU
test-xla: export XLA_FLAGS := --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
test-xla: $(XLA_STAMP)
	$(XLA_PYTHON) -m pytest -n auto -m "$(XLA_MARKERS)" tests/test_xla.py
	$(XLA_PYTHON) -m pytest -n auto -m "not exhaustive" \
		$(foreach name,contract/test_contract models/test_checkpoint models/test_stack rules/test_rules run/test_data run/test_fit \
		test_layers test_random,tests/$(name).py)

# `make wheel TORCH=2.9.0` tests the wheel with the oldest PyTorch supported, whose packages are some GB.
wheel: $(STAMP)
	$(PYTHON) .ci/wheel.py $(if $(TORCH),--torch $(TORCH))

SAMPLE ?= 200

mutants: $(STAMP)
	$(PYTHON) tests/helpers/mutants.py --sample $(SAMPLE)

lint: $(STAMP)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m pyright

docs: $(STAMP)
	$(PYTHON) -m sphinx -W --keep-going -E -q -b html docs out/docs
	@echo "out/docs/index.html"

notebooks: $(STAMP)
	$(PYTHON) notebooks/run.py --check

bench: $(STAMP)
	$(PYTHON) -m benchmarks sweep --size small --models 8 --verbose

clean:
	rm -rf .venv .venv-xla out docs/notebooks build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
