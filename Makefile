# One home for the commands a person types. `make` alone lists them.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help up test check lint types imports migrations compiled bench soak clean product dev parts

# Any Python from 3.11 on; name one yourself with `make up PYTHON=/path/to/python`.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
RUN := .venv/bin/python
# All but tests/real. The longest files come first, the shortest last, so that no lane is left alone at the end.
SUITE := tests/up tests/browser tests/flows tests/workers tests/frontend_api tests/contract tests/controlplane tests/fleet \
	tests/test_docs.py
# Three lanes on two cores, as tests often wait; a file's tests stay in one. Real engines fill the machine by themselves: one lane.
LANES := -n 3 --dist loadfile --no-loadscope-reorder
PYTEST := $(RUN) -m pytest --maxfail=10

help: ## list these
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null \
		|| sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1   \2/p' Makefile

up: product ## serve a real model, disaggregated (RUNTIME=sim: stand-in engines, within seconds)
	@test "$(RUNTIME)" = sim || exec $(RUN) -m frontend_api.build --if-possible
	@exec $(RUN) -m controlplane.up

test: dev parts ## checks and tests, real vLLM and NIXL included, as CI does
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check compiled
	$(PYTEST) $(LANES) -m "not real and not gpu" $(SUITE)
	$(PYTEST) $(LANES) -p tests.compiled tests/frontend_api
	$(RUN) tests/controlplane/postgres.py $(PYTEST) $(LANES) tests/controlplane
	$(PYTEST) -m "real$$(command -v nvidia-smi >/dev/null && echo ' or gpu')" tests

check: lint types imports migrations ## ruff, mypy, import rules, missing migrations

lint: dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: dev
	$(RUN) -m mypy

imports: dev
	.venv/bin/lint-imports

migrations: dev
	@home=$$(mktemp -d); TANDEM_HOME=$$home $(RUN) manage.py makemigrations --check --dry-run; \
		status=$$?; rm -rf $$home; exit $$status

compiled: dev
	$(RUN) -m frontend_api.build

bench: dev ## measure the router
	$(RUN) -m frontend_api.build --if-possible
	$(RUN) -m tests.bench

soak: dev ## the flows (mixed load, restarts, kills) again and again (SOAK_SECONDS=600)
	@end=$$(($$(date +%s) + $${SOAK_SECONDS:-600})); \
		while [ $$(date +%s) -lt $$end ]; do $(RUN) -m pytest tests/flows -q -x || exit 1; done

clean: ## remove the virtual environment and caches of this checkout, never the state folder
	if [ -e .venv ] || [ -L .venv ]; then mv .venv .venv.old-$$$$; fi
	rm -rf .venv.old-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info test-results
	find . -name __pycache__ -not -path './.tandem/*' -prune -exec rm -rf {} +

product: ## install Tandem into .venv and start nothing (for nodes, or for the router alone)
product dev:
	@test -n "$(PYTHON)" || { echo 'Tandem needs Python 3.11 or newer and found none: install it (Debian, Ubuntu:' \
		'`apt-get install python3 python3-venv`), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo 'Tandem needs Python 3.11 or newer, and' \
		'$(PYTHON) is older or does not run: name another one, make $(MAKECMDGOALS) PYTHON=/path/to/python' >&2; exit 1; }
	@exec $(PYTHON) controlplane/up/bootstrap.py $(filter dev,$@) $(if $(filter file,$(origin PYTHON)),,--this-python)

parts: dev
	@missing=; \
	command -v gcc >/dev/null || missing="$$missing gcc libc6-dev"; \
	$(RUN) -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' 2>/dev/null || \
		missing="$$missing python3-dev"; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$$missing postgresql"; \
	test -n "$$missing" || exit 0; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "The tests need$$missing. As root: apt-get install$$missing" >&2; exit 1; \
	fi; \
	echo "Installing$$missing"; \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null
