# Everything happens in .venv; nothing is installed outside it. `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help install serve test test-full lint lock clean

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
STAMP := $(VENV)/.installed

# A stamp beside an interpreter that does not run (its Python was removed or upgraded) says nothing.
ifneq ($(shell $(PY) -c 'print(1)' 2>/dev/null),1)
$(shell rm -f $(STAMP))
endif

# requirements.txt is a lock for one Python version; the first interpreter found that has it makes the .venv.
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null && echo "$$p" && break; done)
MODEL ?= kimi-k3-tiny
PORT ?= 0
PYTEST_ARGS ?=

help: ## Show this list
	@echo "Kimi K3 on stock SGLang 0.5.16"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

install: $(STAMP) ## Make .venv with every pinned dependency and this package (once; about 9 GB)

serve: $(STAMP) ## Serve a tiny K3, ask it one question, stay up until Ctrl-C (PORT=30000, MODEL=path)
	@$(PY) examples/serve_tiny.py --model $(MODEL) --port $(PORT)

test: $(STAMP) ## Run the tests that CI runs, on CPU (PYTEST_ARGS='-k name')
	$(PY) -m pytest -m "not gpu and not multigpu and not full" $(PYTEST_ARGS)

test-full: $(STAMP) ## Run these and the long matrices, on CPU
	$(PY) -m pytest -m "not gpu and not multigpu" $(PYTEST_ARGS)

lint: $(STAMP) ## Check style and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# A .venv without its stamp is one whose installation was cut short: pip would take half a package for a whole one,
# so it is made anew. With a stamp that is merely older than the two files, the .venv is brought up to date in place.
$(STAMP): requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 found, for which requirements.txt is locked." \
		"Install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -f $(STAMP) || { echo "[1/4] Making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $(STAMP)
	@echo "[2/4] Bringing pip and setuptools to the locked versions"
	@$(PIP) install --quiet $$(grep -E '^(pip|setuptools)==' requirements.txt)
	@echo "[3/4] Installing SGLang and what it needs (downloads about 3 GB the first time)"
	@$(PIP) install -r requirements.txt
	@echo "[4/4] Installing this package, editable"
	@PYTHONWARNINGS=ignore $(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

lock: ## Resolve the dependencies anew and rewrite requirements.txt
	$(PYTHON) -m venv --clear .cache/lock
	.cache/lock/bin/python -m pip install --upgrade pip
	.cache/lock/bin/python -m pip install --upgrade setuptools --editable '.[dev]'
	{ echo "# Written by \`make lock\` for Python 3.11 on Linux x86-64: what pip resolves for sglang-k3[dev]. Do not edit."; \
		.cache/lock/bin/python -m pip freeze --all --exclude-editable; } > .cache/requirements.txt
	mv .cache/requirements.txt requirements.txt
	rm -r .cache/lock

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
