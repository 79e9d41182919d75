# Everything runs in a virtual environment that is made when it is missing.
#   make run    the default experiment: what does dividing by sqrt(d_k) buy?
#   make claims every claim of the articles, checked
#   make test   the whole suite;  make test PYTHON=python3.12 uses its own .venv-3.12
PYTHON ?= python3
ifeq ($(PYTHON),python3)
VENV ?= .venv
else
VENV ?= .venv-$(patsubst python%,%,$(notdir $(PYTHON)))
endif
BIN = $(VENV)/bin
READY = $(VENV)/.ready
WORKDIR ?= runs/dk_scaling
BENCH ?= sweep

.PHONY: run claims test lint venv bench clean
run: $(READY)
	$(BIN)/python launch.py --experiment=dk_scaling --workdir=$(WORKDIR)

claims: $(READY)
	$(BIN)/python launch.py --experiment=claims --workdir=runs/claims

test: $(READY)
	$(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

bench: $(READY)
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

venv: $(READY)

$(READY): setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info
