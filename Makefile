# Goes from a fresh machine (Debian/Ubuntu, Python 3.11 to 3.13, a C++ compiler) to figures or tests in one command.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
CORES ?= all
PROFILE ?=
PYTEST ?=
GPU ?=
# Test processes: one more than there are cores, since many tests wait for a drive or for another process, and at most
# four, since the longest test file limits more.
WORKERS ?= -n $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 4)))
ifdef CUDA
CONSTRAINTS ?= constraints-cuda.txt
EXTRAS ?= cuda,deepspeed,huggingface,lint,test,workflow
else
CONSTRAINTS ?= constraints.txt
EXTRAS ?= deepspeed,huggingface,lint,test,workflow
endif

IN_VENV := export PATH="$(CURDIR)/$(VENV)/bin:$$PATH";
CPP = $(shell find memascend/csrc tests -name '*.cpp' -o -name '*.h')
SNAKEMAKE := $(IN_VENV) snakemake --cores $(CORES)
export PYTHON MAX_JOBS MEMASCEND_CACHE MEMASCEND_CPU_LEVEL LOCKED NO_SYSTEM_PACKAGES

.PHONY: help setup figures smoke artifact gpu test zoo zoo-drop-in zoo-night chaos lint format tidy coverage native-tests python-tests numa-guest numa-test ops docs diagrams clean deepspeed_016 lock release

.DEFAULT:
	@echo "make: there is no target '$@' (make help lists them)" >&2; exit 2

help: ## list the targets
	@grep -hE '^[a-z_0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z_0-9-]+):.*## (.*)/make \1|\2/' | column -t -s '|'
	@echo 'words: PROFILE=smoke|quick|paper|full|gpu  CORES=n  PYTEST="-k name --run-slow"  CUDA=1  PYTHON=/path/to/python3'

setup: ## system packages, .venv, pinned dependencies, extension, DeepSpeed's ops; nothing when all is there
	@workflows/setup/setup.sh $(VENV) $(CONSTRAINTS) $(EXTRAS)

figures: setup ## every exhibit that is built: runs, models, figures/index.html
	@$(SNAKEMAKE) figures $(if $(PROFILE),--config profile=$(PROFILE))

smoke: setup ## the same in minutes, on the smallest twins
	@$(SNAKEMAKE) figures --config profile=smoke

artifact: setup ## the profile's artifact, one zip; checked from the zip alone
	@$(SNAKEMAKE) artifact $(if $(PROFILE),--config profile=$(PROFILE))
	@$(SNAKEMAKE) artifact-verify $(if $(PROFILE),--config profile=$(PROFILE))

gpu: setup ## on a machine with an NVIDIA GPU: doctor, tests, profile and artifact, a line for each; GPU=--rehearse without one
	@$(IN_VENV) python -m workflows.gpu $(GPU)

test: setup ## all tests but those that are slow or need what this machine lacks
	@$(MAKE) -j $$(($$(nproc) + 1)) native-tests python-tests

python-tests: setup
	@$(IN_VENV) pytest $(WORKERS) $(PYTEST)

zoo: setup ## every architecture of transformers through cache and engine, and the page of outcomes: 10 minutes
	@rm -rf .cache/zoo && mkdir -p .cache/zoo
	@$(IN_VENV) MEMASCEND_ZOO_OUTCOMES=$(CURDIR)/.cache/zoo pytest $(WORKERS) --run-slow tests/zoo/test_architectures.py $(PYTEST)
	@$(IN_VENV) python -m tests.zoo.page .cache/zoo

zoo-drop-in: setup ## every architecture through the drop-in on DeepSpeed, and its column of that page: 30 minutes
	@rm -rf .cache/zoo-drop-in && mkdir -p .cache/zoo-drop-in
	@$(IN_VENV) MEMASCEND_ZOO_DROP_IN=all MEMASCEND_ZOO_OUTCOMES=$(CURDIR)/.cache/zoo-drop-in pytest --run-slow tests/zoo/test_drop_in.py $(PYTEST)
	@$(IN_VENV) python -m tests.zoo.page .cache/zoo-drop-in

zoo-night: setup ## the zoo's part of a night: 20 architectures through the drop-in, 1,000 random programs, by the date
	@$(IN_VENV) pytest $(WORKERS) --run-slow tests/zoo/test_drop_in.py tests/zoo/test_random_programs.py $(PYTEST)

CHAOS ?= --seeds 0:1000 --minutes 60
chaos: setup ## seeded faults on everything that trains, and the page of what became of them: an hour; goes on where it ended
	@$(IN_VENV) nice -n 10 python -m tests.chaos $(CHAOS) --out results/chaos/$${MEMASCEND_HOST:-local}.json
	@$(IN_VENV) python -m tests.chaos.page

# `make test` runs them in parallel with the Python tests, which leave a sixth of the cores' time idle.
native-tests: setup ## the C++ core without Python, under AddressSanitizer and ThreadSanitizer
	@nice -n 19 $(MAKE) -s $(if $(findstring jobserver,$(MAKEFLAGS)),,-j $$(nproc)) -C tests/native

numa-guest: setup ## kernel and emulator of a machine with CPU-less memory nodes, from Debian packages, once
	@$(IN_VENV) python -m tests.numa_vm.images

numa-test: numa-guest ## tests that need such nodes, in that guest: minutes, nothing is timed
	@$(IN_VENV) pytest -m numa_vm $(PYTEST)

lint: setup ## ruff, mypy, clang-format, codespell, snakefmt, snakemake --lint
	@$(IN_VENV) ruff check . && ruff format --check . && snakefmt --check Snakefile workflows/rules && snakemake --lint
	@$(IN_VENV) clang-format --dry-run -Werror $(CPP) && codespell && mypy

format: setup ## what the formatters can do by themselves
	@$(IN_VENV) ruff check --fix-only . && ruff format . && snakefmt Snakefile workflows/rules && clang-format -i $(CPP)

CLANG_TIDY := 23.1.4
TIDY_ENV := .cache/envs/clang-tidy-$(CLANG_TIDY)
tidy: $(TIDY_ENV)/.made ## clang-tidy on the C++ core, with the checks of .clang-tidy: a minute of two cores
	@cd memascend/csrc/core && printf '%s\n' *.cpp | \
	  xargs -P $$(nproc) -I FILE $(CURDIR)/$(TIDY_ENV)/bin/clang-tidy --quiet FILE -- -std=c++20 -I.. -fopenmp

# clang-tidy has its own environment and is not in the extra `lint`, because it takes 150 MB.
$(TIDY_ENV)/.made: | setup
	@$(VENV)/bin/python -m venv $(TIDY_ENV)
	@$(TIDY_ENV)/bin/pip install --quiet --disable-pip-version-check clang-tidy==$(CLANG_TIDY)
	@touch $@

coverage: setup ## lines of the library that the tests run, with the programs that they start; twice as long as the tests
	@rm -rf .cache/coverage && mkdir -p .cache/coverage
	@$(IN_VENV) coverage run -m pytest $(WORKERS) $(PYTEST) || failed=1; coverage combine --quiet && coverage report && exit $${failed:-0}

ops: setup ## DeepSpeed's compiled ops alone (part of setup)
	@$(IN_VENV) python workflows/setup/build_ops.py

DIST ?= dist
release: setup ## sdist and wheel of the last commit in dist/, tried in an empty environment: some minutes
	@$(IN_VENV) python -m workflows.release.make --out $(DIST)

lock: setup ## the pins with the hash of each file, in locks/, from the constraint files
	@$(IN_VENV) python -m workflows.release.lock

DOCS_ENV := .cache/envs/docs
docs: setup $(DOCS_ENV)/.made ## the documentation as a site with search: .cache/site/index.html
	@$(IN_VENV) python docs/site/commands.py > .cache/commands.json
	@NO_MKDOCS_2_WARNING=1 $(DOCS_ENV)/bin/mkdocs build --strict --quiet
	@echo "$(CURDIR)/.cache/site/index.html"

$(DOCS_ENV)/.made: constraints-docs.txt
	@rm -rf $(DOCS_ENV)
	@$(VENV)/bin/python -m venv $(DOCS_ENV)
	@$(DOCS_ENV)/bin/pip install --quiet --disable-pip-version-check -r constraints-docs.txt
	@touch $@

diagrams: setup ## redraw the pictures in docs/ from the code and the papers' numbers
	@$(IN_VENV) python docs/diagrams.py && PYTHONPATH=. python docs/papers.py && python -m workflows.derive.gallery
	@$(IN_VENV) python -m workflows.derive.simulator results/reference/epyc-genoa-2core/validation.json --draw-in .cache && cp .cache/simulator.svg docs/img

deepspeed_016: ## the papers' releases (DeepSpeed 0.16.7, transformers 4.51), in .cache/envs
	@workflows/setup/setup.sh .cache/envs/$@ constraints-deepspeed-0.16.txt papers

clean: ## remove what was built in this checkout (not .venv, results, figures or compiled DeepSpeed ops)
	@rm -rf build memascend.egg-info memascend/_C*.so .pytest_cache .ruff_cache .hypothesis .cache/setup.log
	@find . -name __pycache__ -not -path './.venv/*' -not -path './.cache/*' -prune -exec rm -rf {} +
