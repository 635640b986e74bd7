# make demo    a tiny MiniMax-M3, served by stock vLLM on this CPU through m3hal
# make test    the test suite
# Both set up .venv by themselves, once. `make help` lists the rest.

PYTHON ?= python3
VENV   ?= .venv
PY      = $(VENV)/bin/python
STAMP   = $(VENV)/.m3hal-ready
INPUTS  = scripts/setup_venv.py scripts/constraints.txt $(wildcard pyproject.toml */pyproject.toml */*/pyproject.toml)

.PHONY: help setup demo test test-all lint format wheelhouse docs clean

help:
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## make .venv (the other targets do it when needed)

$(STAMP): $(INPUTS)
	$(PYTHON) scripts/setup_venv.py $(VENV)
	@touch $@

demo: $(STAMP)  ## serve a tiny MiniMax-M3 on this CPU and compare its tokens with transformers'
	$(PY) -m m3hal.demo

test: $(STAMP)  ## the test suite
	$(PY) -m pytest -m "not slow" $(ARGS)

test-all: $(STAMP)  ## the test suite with the slow tests, and those that read vendors' and vLLM's wheels
	$(PY) scripts/vendor_wheels.py
	$(PY) -m pytest $(ARGS)

lint: $(STAMP)  ## ruff and mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)  ## let ruff fix and format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMP)  ## write docs/operators.md from the definitions, docs/support.md from the claims
	$(PY) scripts/operators_page.py
	$(PY) scripts/support_page.py

wheelhouse: $(STAMP)  ## build every distribution's wheel into dist/
	$(PY) -m pip wheel --no-deps --no-build-isolation -w dist . ./conformance ./backends/*

clean:  ## remove .venv, wheels and caches
	rm -rf $(VENV) dist build demo .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
