# Headrace: every command a developer needs. `make help` lists them.
#
# Needs Python 3.11 or newer with venv and pip, and make. Everything else goes into .venv, which is filled again only
# when pyproject.toml or constraints.txt change. Another interpreter: `make run PYTHON=python3.13`.
# More arguments for the server: `make run SERVE='--config my.yaml'`.

PYTHON ?= python3
MODEL ?= efficientnet-lite0
SERVE ?=
INDEX ?= 0
TESTS ?= tests

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PROTOS := $(wildcard protos/*/*.proto protos/*/*/*.proto)
# The package under protos/ (not the file) is the unit: all stubs of all .proto files are made in one call.
PROTOC = PATH="$(CURDIR)/$(BIN):$$PATH" $(PY) -m grpc_tools.protoc -I.
PIP_INSTALL := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt
# Two processes of pytest, a file in one of them; tests that judge times are marked `alone` and have the machine after that.
SIDE_BY_SIDE = $(PY) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder
NO_TESTS := 5
# Runs a server in its own foreground process group, so that Ctrl-C ends it in order and make passes its exit code on.
FOREGROUND := exec $(PY) deploy/foreground.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

##@ Use

.PHONY: run
run: fetch ## Install, fetch the default model and serve it; Ctrl-C stops
	@$(FOREGROUND) $(BIN)/headrace serve $(SERVE)

.PHONY: demo
demo: fetch $(VENV)/.zoo ## Start everything, show every task on real input, stop (fetches 270 MB once)
	@$(FOREGROUND) $(BIN)/headrace demo

.PHONY: run-gateway
run-gateway: fetch ## Only the gateway and its preprocess pool, without torch in the process
	@$(FOREGROUND) $(PY) -m gateway $(SERVE)

.PHONY: run-worker
run-worker: fetch ## Only one worker (`INDEX=1`: the second one); before or after the gateway, on CUDA or a CPU
	@$(FOREGROUND) $(PY) -m workers --index $(INDEX) $(SERVE)

.PHONY: fetch
fetch: $(VENV)/.runtime ## Fetch the default model and 20 photos; quick when they are there
	@$(BIN)/headrace models fetch $(MODEL) builtin --photos

##@ Check

.PHONY: test
test: $(VENV)/.dev fetch ## Install and run every test; `make test TESTS=tests/unit/gateway` runs some
	@$(SIDE_BY_SIDE) -m "not alone" $(TESTS) || [ $$? = $(NO_TESTS) ]
	@$(PY) -m pytest -m alone $(TESTS) || [ $$? = $(NO_TESTS) ]

.PHONY: test-unit
test-unit: $(VENV)/.dev ## Only the unit and architecture tests: seconds, no model, no network
	@$(SIDE_BY_SIDE) tests/unit tests/architecture

.PHONY: test-gpu
test-gpu: $(VENV)/.dev ## The tests that need a CUDA device; without one they are skipped
	@$(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	|| echo "torch sees no CUDA device on this machine: all of these tests are skipped"
	@$(PY) -m pytest tests/gpu

.PHONY: coverage
coverage: $(VENV)/.dev ## Unit and integration tests with a coverage report
	@$(PY) -m pytest --cov --cov-report=term-missing:skip-covered tests/unit tests/integration

.PHONY: check
check: check-format check-lint check-types check-imports check-proto ## Format, lint, types, import contracts, stubs up to date

.PHONY: check-format check-lint check-types check-imports check-proto
check-format: $(VENV)/.dev
	@echo "format"
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run 'make format'" >&2; exit 1; }

check-lint: $(VENV)/.dev
	@echo "lint"
	@$(BIN)/ruff check --quiet .

check-types: $(VENV)/.dev
	@echo "types"
	@$(BIN)/mypy --no-error-summary

check-imports: $(VENV)/.dev
	@echo "imports"
	@$(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }

check-proto: $(VENV)/.dev
	@echo "stubs"
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT \
	&& $(PROTOC) --python_out="$$fresh" --grpc_python_out="$$fresh" --mypy_out=quiet:"$$fresh" --mypy_grpc_out=quiet:"$$fresh" $(PROTOS) \
	&& cd "$$fresh" && find . -type f | while read -r stub; do \
		cmp -s "$$stub" "$(CURDIR)/$$stub" || { echo "$$stub is not what its .proto says: run 'make proto'" >&2; exit 1; }; \
	done

.PHONY: format
format: $(VENV)/.dev ## Format and repair what ruff can
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .

##@ Build and measure

.PHONY: proto
proto: $(VENV)/.dev ## Make the committed stubs from the .proto files
	@$(PROTOC) --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

.PHONY: stubs
stubs: $(VENV)/.dev ## A wheel in dist/ with only the stubs and the client, for other services
	@$(PY) deploy/client/build.py

.PHONY: bench
bench: $(VENV)/.dev fetch ## Measure the server beside the bare loop and plain gRPC (about 5 minutes)
	@$(PY) -m bench.foundation

.PHONY: bench-open-inference
bench-open-inference: $(VENV)/.dev fetch ## Measure the Open Inference Protocol with perf_analyzer (about 4 minutes)
	@$(PY) -m bench.open_inference

.PHONY: bench-small
bench-small: $(VENV)/.dev ## Measure small tensors: calls and streams beside plain gRPC (about 2 minutes)
	@$(PY) -m bench.small_tensors

.PHONY: bench-overload
bench-overload: $(VENV)/.dev ## Offer two and four times what the server can do: what is left? (about 4 minutes)
	@$(PY) -m bench.overload

.PHONY: bench-loads
bench-loads: $(VENV)/.dev fetch ## Measure live traffic while versions load, and memory after many loads (about 8 minutes)
	@$(PY) -m bench.model_loads

.PHONY: bench-texts
bench-texts: $(VENV)/.dev ## Measure texts of many lengths: buckets, padding, bare loops (about 6 minutes)
	@$(PY) -m bench.text_lengths

.PHONY: bench-tasks
bench-tasks: $(VENV)/.dev fetch ## Measure every task beside the bare loop of its model, and all at once (about 4 minutes)
	@$(PY) -m bench.tasks

.PHONY: bench-generation
bench-generation: $(VENV)/.dev ## Measure generated text beside the bare loop of the same network (about 3 minutes)
	@$(PY) -m bench.generation

.PHONY: bench-gpu
bench-gpu: $(VENV)/.dev fetch ## Measure a CUDA device alone, in the worker and behind the server (about 5 minutes)
	@$(PY) -m bench.gpu

.PHONY: venv
venv: $(VENV)/.dev ## Only install everything into .venv

.PHONY: clean
clean: ## Remove what was built; keeps .venv, models and photos
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage *.egg-info
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: clean-all
clean-all: clean ## Remove .venv and downloads, too; models stay
	@rm -rf $(VENV) .cache

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } \
	/^##@ / { printf "\n%s\n", substr($$0, 5) } \
	/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---------------------------------------------------------------- installing, only when something changed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "Headrace needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt
	@echo "installing what the server needs (once; torch is large)"
	@$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.zoo: $(VENV)/.runtime
	@echo "installing what converts models of the zoo (once)"
	@$(PIP_INSTALL) --editable '.[zoo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing what the tests and checks need (once)"
	@$(PIP_INSTALL) --editable '.[dev]'
	@touch $@
