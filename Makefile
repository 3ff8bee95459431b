# The commands of this project; `make help` lists them. Needs Python >= 3.11 with venv and pip; all else goes into .venv.
# ARGS is handed on:   make train ARGS="--zero 1 --steps 50"     make test ARGS="-k layout -x"

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# A process for each core and one more (tests/conftest.py), each with one thread: ranks are many already. Tests start many
# interpreters, which find compiled files.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: train
train: $(VENV)/.extra-train  ## train a GPT on two local ranks, into out/; again: resume
	@$(BIN)/python examples/train_gpt.py --save out/checkpoints --resume $(ARGS)

.PHONY: mixture
mixture: $(VENV)/.extra-train  ## train a mixture of experts on two local ranks, with and without balancing, into out/
	@$(BIN)/python examples/mixture.py $(ARGS)

.PHONY: mesh
mesh: $(VENV)/.extra-train $(VENV)/.extra-test  ## train a Llama on 2 x 2 x 2 simulated ranks; resume on four processes
	@$(BIN)/python examples/llama_mesh.py $(ARGS)

.PHONY: on-paper
on-paper: $(VENV)/.extra-train  ## plan a 70 B model on 1,024 ranks in under a minute, with pictures
	@$(BIN)/python examples/on_paper.py $(ARGS)

.PHONY: long-context
long-context: $(VENV)/.extra-train  ## train on long contexts split among ranks; draw what length costs
	@$(BIN)/python examples/long_context.py $(ARGS)

.PHONY: test
test: $(VENV)/.extra-test  ## run the tests
	@$(PYTEST) $(ARGS)

.PHONY: laws
laws: $(VENV)/.extra-test  ## run the property-based tests alone, with many more examples each, and all cases of sampled tests
	@HYPOTHESIS_PROFILE=laws $(PYTEST) -m "law or sample" --timeout=3600 $(ARGS)

.PHONY: faults
faults: $(VENV)/.extra-test $(VENV)/.extra-clusters  ## kill ranks under torchrun, SLURM and Ray; cut off a host; end processes two hundred times
	@FUNCTIONAL_DS_KILLS=50 FUNCTIONAL_DS_ENDS=200 $(BIN)/python -m pytest --timeout=600 \
	  tests/fitting/test_killed.py tests/fitting/test_hosts.py tests/fitting/test_clusters.py tests/ends $(ARGS)

.PHONY: versions
versions:  ## run the tests on each Python and torch that this machine can have
	@$(PYTHON) .ci/versions $(ARGS)

.PHONY: bench
bench: $(VENV)/.extra-bench  ## compare with DDP, FSDP2, DeepSpeed and others
	@$(BIN)/python benchmarks/peers.py $(ARGS)

.PHONY: bench-comm
bench-comm: $(VENV)/.extra-train  ## compare collectives with torch.distributed
	@$(BIN)/python benchmarks/comm.py $(ARGS)

.PHONY: bench-hosts
bench-hosts: $(VENV)/.extra-train $(VENV)/.extra-test  ## compare on two hosts with slow links: network namespaces, as root
	@$(BIN)/python benchmarks/hosts.py $(ARGS)

.PHONY: bench-pipeline
bench-pipeline: $(VENV)/.extra-train  ## compare pipelines with torch.distributed.pipelining
	@$(BIN)/python benchmarks/pipeline.py $(ARGS)

.PHONY: bench-experts
bench-experts: $(VENV)/.extra-bench $(VENV)/.extra-test  ## compare a mixture of experts with transformers' and DeepSpeed's
	@$(BIN)/python benchmarks/experts.py $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(VENV)/.extra-train  ## measure one GPU against plain PyTorch
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

.PHONY: bench-checkpoint
bench-checkpoint: $(VENV)/.extra-train  ## compare checkpoints with torch's and dd
	@$(BIN)/python benchmarks/checkpoint.py $(ARGS)

.PHONY: bench-offload
bench-offload: $(VENV)/.extra-train  ## measure optimizer states on a disk against dd
	@$(BIN)/python benchmarks/offload.py $(ARGS)

# -a writes all pages: after a build of some, the search would lack the keywords of the others.
.PHONY: docs
docs: $(VENV)/.extra-docs  ## draw the figures and build the site, into out/docs
	@$(BIN)/python docs/figures/make.py
	@$(BIN)/python -m sphinx -a -W --keep-going -q -d out/docs/.doctrees docs out/docs $(ARGS)

.PHONY: docs-check
docs-check: docs $(VENV)/.extra-test  ## open the built site in chromium: widths, links, search, formulas
	@FUNCTIONAL_DS_SITE=out/docs $(BIN)/python -m pytest -q tests/test_site.py $(ARGS)

.PHONY: lint
lint: $(VENV)/.extra-lint  ## ruff's checks and format, the words of pages and docstrings, then the types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --diff --quiet .
	@$(BIN)/python .ci/words
	@.ci/typecheck.sh $(BIN)/python

.PHONY: release
release: $(VENV)/.torch  ## build wheel and sdist into dist/, and try both in fresh virtual environments; URL= of the repository
	@.ci/release $(BIN)/python $(URL)

.PHONY: typecheck
typecheck: $(VENV)/.extra-lint  ## check the types of the built wheel
	@.ci/typecheck.sh $(BIN)/python

.PHONY: clean
clean:  ## remove .venv, builds and caches; out/ stays
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each thing installed, so that a second run installs nothing.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is no Python >= 3.11; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and pinned: left to choose, pip may fetch a build that is gigabytes larger.
$(VENV)/.torch: constraints.txt $(VENV)/.python
	@echo "installing torch into $(VENV), once; this can take minutes" >&2
	@$(PIP) torch setuptools wheel
	@touch $@

# The pinned setuptools builds the library here (--no-build-isolation), as it builds the wheel that is type-checked.
$(VENV)/.extra-%: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "installing functional_ds[$*] into $(VENV)" >&2
	@$(PIP) --no-build-isolation -e '.[$*]'
	@touch $@

# DeepSpeed's build needs these beside torch; DS_BUILD_OPS=0 builds none of its kernels.
$(VENV)/.extra-bench: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "installing functional_ds[bench] into $(VENV)" >&2
	@$(PIP) ninja py-cpuinfo
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation -e '.[bench]'
	@touch $@
