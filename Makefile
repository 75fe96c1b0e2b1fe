# `make setup` once; `make test`, `make quickstart`. `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-agents setup-bridge test test-fast test-matrix test-faults test-runs test-durations mutants soak gpu-check lint audit sbom quickstart quickstart-stop arithmetic arithmetic-stop \
	agent agent-stop study study-stop lab clean

PYTHON := .venv/bin/python
# For tools/ and tests/, which are not installed; the package itself is, in editable form.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export OMP_NUM_THREADS ?= 1

QUICKSTART := $(PYTHON) examples/quickstart/run.py
QUICKSTART_OPTIONS := $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) \
	$(if $(ENGINE),--engine $(ENGINE)) $(if $(SERVER_DTYPE),--server-dtype $(SERVER_DTYPE)) $(if $(ASYNC),--asynchronous) \
	$(if $(COLOCATE),--colocate)

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv (once; later it only checks), with or without a GPU
	@scripts/setup

setup-vllm: setup ## Lay vLLM for the CPU beside .venv (once), for make quickstart ENGINE=vllm and the tests
	@scripts/setup-vllm

setup-agents: setup ## Make .venv-agents (once), the harnesses of make agent, with which tests ask the gateway too
	@scripts/setup-agents

setup-bridge: setup ## Lay Megatron-Bridge beside .venv (once), for --rollout-model-provider bridge and its tests
	@scripts/setup-bridge

# Tests start thousands of interpreters; without bytecode each would compile the package again.
test test-matrix test-faults: export PYTHONDONTWRITEBYTECODE :=

# Four processes share the tests (tests/schedule.py), as each waits for servers for almost half of its time.
test: setup-vllm setup-agents ## Run every test; TESTS=path or TESTS="-k name" for some of them
	$(PYTHON) -m pytest $(if $(TESTS),$(TESTS),-n 4 --durations=10 --record=runs/tests)

test-fast: setup-vllm ## Run the tests that start no process, in about 2 minutes; TESTS= chooses
	$(PYTHON) -m pytest --fast -q -r fE -n 3 --ignore=tests/matrix $(TESTS)

test-matrix: setup-vllm setup-bridge ## Run what make test leaves out: every release of megatron-core (fetches five wheels once), layouts, sizes; MEGATRON_CHECKOUT= adds one
	MEGATRON_RELEASES=all $(PYTHON) -m pytest -n 2 -m matrix $(TESTS)

# Everything that breaks something on purpose, the long ones too; a slice of it runs with `make test`.
test-faults: setup-vllm ## Run all drills, under 30 minutes on 2 cores; TABLE=file writes what they promised and saw, TESTS= chooses
	FAULTS=all MEGATRON_RELEASES=all $(PYTHON) -m pytest -n 2 -m drill -p tests.faults.table \
		$(if $(TABLE),--faults-table=$(TABLE)) $(if $(TESTS),$(TESTS),--record=runs/test-faults)

test-runs: ## Tabulate what whole runs of make test did, in Markdown; RUNS=runs/test-faults for those of make test-faults
	@$(PYTHON) -m tests.record $(if $(RUNS),$(RUNS),runs/tests)

test-durations: ## Write tests/durations.json, by which make test orders its files, from the newest of whole runs
	$(PYTHON) -m tests.record runs/tests --durations > tests/durations.json.new && mv tests/durations.json.new tests/durations.json

# One process, at the lowest priority; what it leaves in runs/mutants is its report and the lines that each test runs.
mutants: setup ## Plant 600 small faults, one at a time, and list those that no fast test finds; MUTANTS= SEED= FILES="core/*.py" TESTS= AGAIN=1 SLOW=1
	nice $(PYTHON) -m tools.mutants $(if $(MUTANTS),--mutants $(MUTANTS)) $(if $(SEED),--seed $(SEED)) \
		$(if $(FILES),--files $(foreach file,$(FILES),'$(file)')) $(if $(TESTS),--tests $(TESTS)) $(if $(AGAIN),--again) $(if $(SLOW),--slow)

# Its exit status: 0 all as promised, 1 something was not, 3 something could not be judged; make prints it as "Error N".
soak: setup ## Train twice at the same time, with random faults, joins and leaves and without, in an hour or so; OUT=new folder, STEPS= or HOURS=, SEED= EVERY= CHANGES_EVERY= RANKS=
	$(PYTHON) tests/faults/soak.py $(if $(OUT),$(OUT),runs/soak-$(shell date +%Y%m%d-%H%M%S)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(HOURS),--hours $(HOURS)) $(if $(SEED),--seed $(SEED)) $(if $(EVERY),--every $(EVERY)) \
		$(if $(CHANGES_EVERY),--changes-every $(CHANGES_EVERY)) $(if $(RANKS),--ranks $(RANKS))

# Its exit status: 0 all held, 3 something was not run, 1 something failed; make prints it as "Error N".
gpu-check: setup ## Show on one GPU what only a GPU can, in 10 minutes, without network; ONLY="part ..." TABLE=file; no GPU: a rehearsal
	$(PYTHON) -m tools.gpu_check $(if $(ONLY),--only $(ONLY)) $(if $(TABLE),--table $(TABLE))

lint: setup ## Check style and format
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check .

audit: setup ## Compare the locks with known advisories, without network; ADVISORIES=checkout of pypa/advisory-database renews these
	$(PYTHON) scripts/audit.py $(if $(ADVISORIES),--renew $(ADVISORIES))

sbom: setup ## Write the locks' bills of materials (CycloneDX) into requirements/sbom
	$(PYTHON) scripts/sbom.py

quickstart: $(if $(filter vllm,$(ENGINE)),setup-vllm,setup) ## Train the tiny MoE against a real SGLang server; ENGINE=vllm SEED= STEPS= SERVER_DTYPE= ASYNC=1 COLOCATE=1
	$(QUICKSTART) $(QUICKSTART_OPTIONS)

quickstart-stop: setup ## End what an interrupted quickstart left running
	$(QUICKSTART) --stop

arithmetic: setup ## From chat messages and a verifier to a Hugging Face folder that solves more; SEED= STEPS=
	$(PYTHON) examples/arithmetic/run.py $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS))

arithmetic-stop: setup ## End what an interrupted arithmetic run left running
	$(PYTHON) examples/arithmetic/run.py --stop

agent: setup-agents ## A tiny model learns to use a tool in a harness as it is; AGENT=anthropic, langgraph, openai_agents or pydantic_ai, SEED= STEPS=
	$(PYTHON) examples/agent/run.py $(if $(AGENT),--agent $(AGENT)) $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS))

agent-stop: setup ## End what an interrupted agent run left running
	$(PYTHON) examples/agent/run.py --stop

STUDY_OPTIONS := $(if $(QUICK),--quick) $(if $(STEPS),--steps $(STEPS)) $(if $(SEEDS),--seeds $(SEEDS)) \
	$(if $(ARMS),--arms $(ARMS)) $(if $(OUT),--out $(OUT))

study: setup ## Train the tiny MoE with a mismatch under each correction, hours; QUICK=1 STEPS= SEEDS=2,3,4 ARMS=none,twin OUT=; again: goes on
	$(PYTHON) examples/study/run.py $(STUDY_OPTIONS)

LAB_OPTIONS := $(if $(OUT),--out $(OUT)) $(if $(PARTS),--parts $(PARTS)) $(if $(KINDS),--kinds $(KINDS)) \
	$(if $(LENGTHS),--lengths $(LENGTHS)) $(if $(BLOCKS),--blocks $(BLOCKS)) $(if $(ARMS),--arms $(ARMS)) $(if $(SEEDS),--seeds $(SEEDS)) \
	$(if $(WORKERS),--workers $(WORKERS))

lab: setup ## Bias and variance of every correction by enumeration, and trainings of 100 seeds; OUT= PARTS="map long policies bounds coupled training auto" KINDS= LENGTHS= BLOCKS= ARMS= SEEDS= WORKERS=
	$(PYTHON) -m lab.run $(LAB_OPTIONS)

study-stop: setup ## End what an interrupted study left running
	$(PYTHON) examples/study/run.py --stop

clean: ## Remove caches and .venv (the packages that it shares with other checkouts stay)
	rm -rf .venv .venv-agents .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
