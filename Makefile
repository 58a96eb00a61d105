# Everything runs from .venv, which the first target that needs it makes. `make` alone lists the targets.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-server

# The first Python that runs, is new enough, and can make environments. Looked for only when .venv has to be made.
PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo "$$candidate"; break; }; done)

# More processes than cores, because many tests wait for servers and workers of their own; tests/conftest.py mixes them with others.
TEST_PROCESSES ?= 4
# More for pytest, e.g. `make test TESTARGS='tests/core -x'`.
TESTARGS ?=
# Two minutes on two cores. More for `tasuki sim`, e.g. `make sim SEEDS=500 SIMARGS='--from 2001'`.
SEEDS ?= 2000
SIMARGS ?=

# Debian packages that the tests need and that no wheel brings.
SYSTEM_PACKAGES ?= caddy chromium curl fonts-vlgothic haproxy iproute2 keepalived nginx-light nodejs pgbouncer quantum-espresso quantum-espresso-data redis-server tmux

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo up test sim soak check format bench system-deps clean

help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) ## Show jobs surviving the death of a worker and of the server
	@$(BIN)/tasuki demo

up: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP)) ## Start a server and local workers here, until Ctrl-C
	@$(BIN)/tasuki up

# Compiled once: where Python is told to write no bytecode, each of the thousand processes of the tests would do it for itself,
# and each of pytest's own would rewrite all the assertions (here two do it). Hypothesis' table of characters, too, takes each of them 2 s.
test: export PYTHONDONTWRITEBYTECODE =
test: $(STAMP) ## Run the tests (TESTARGS='tests/core -x' for some of them)
	@$(BIN)/python -m compileall -q src
	@$(BIN)/python -c 'from hypothesis import strategies; strategies.text().validate()'
	@test -d tests/__pycache__ || ls -d $(or $(filter tests/%,$(TESTARGS)),tests/*/) | \
		xargs -n 11 -P 2 $(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 || true
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations=25 $(TESTARGS)

sim: $(STAMP) ## Run SEEDS=2000 seeds of the simulator on all cores (docs/simulator.md)
	@$(BIN)/tasuki sim --seeds $(SEEDS) --store mixed $(SIMARGS)

soak: $(STAMP) ## Run the tests that take minutes
	@HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m soak --timeout 1800 $(TESTARGS)

check: $(STAMP) ## Lint, formatting, generated code, types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python scripts/make_proto.py --check
	@$(BIN)/mypy

format: $(STAMP) ## Put the code into the common format, and fix what the linter can fix
	@$(BIN)/ruff check --fix-only
	@$(BIN)/ruff format

bench: $(STAMP) ## Run every benchmark in its quick mode
	@set -e; for script in $(filter-out bench/_%,$(wildcard bench/*.py)); do \
		echo "== $$script --quick"; $(BIN)/python "$$script" --quick; done

system-deps: ## Install the Debian packages that the tests need (as root)
ifeq ($(strip $(SYSTEM_PACKAGES)),)
	@echo "system-deps: no Debian package is needed"
else
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "system-deps: not root, or no apt-get here; please install: $(SYSTEM_PACKAGES)"; \
	elif dpkg-query --show $(SYSTEM_PACKAGES) >/dev/null 2>&1; then \
		echo "system-deps: already installed: $(SYSTEM_PACKAGES)"; \
	else \
		apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends $(SYSTEM_PACKAGES); \
	fi
endif

clean: ## Remove what the targets above made (not tasuki-data)
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment whose Python was removed or upgraded away is made anew; otherwise only what pyproject.toml asks for changes.
# Who only wants to see tasuki run gets half of the packages: `make demo` and `make up` need no test tools.
$(STAMP): EXTRAS := server,s3,test
$(DEMO_STAMP): EXTRAS := server
$(STAMP) $(DEMO_STAMP): pyproject.toml
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
		python="$(PYTHON)"; \
		if [ -z "$$python" ]; then \
			echo "tasuki needs Python 3.11 or newer with the venv module, and found none on PATH." >&2; \
			echo "Install one (Debian: apt-get install python3-venv), or name it: make PYTHON=/path/to/python3.12" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$python"; \
		"$$python" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "Installing tasuki[$(EXTRAS)] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(EXTRAS)]'
	@touch $@
