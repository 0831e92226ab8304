# `make` alone lists the targets. Every path below is relative, so that the clone may lie anywhere, blanks included.
PYTHON ?= python3
RECIPE ?=
ARGS ?=
NP ?=
TESTS ?=
SEED ?=

SHELL := /bin/bash
BIN := .venv/bin
# Tests start horovodrun and mpirun by name.
WITH_PATH := PATH="$(CURDIR)/$(BIN):$$PATH"
# Each step of the set-up leaves a stamp. It runs again if the stamp is older than a file that the step depends on.
STAMPS := .venv/.stamps
HOROVOD_FILES = $(shell find packaging/patches $(wildcard packaging/*horovod*) -type f -not -path '*/__pycache__/*')

.DEFAULT_GOAL := help
.PHONY: help env train test test-slow test-image campaign bench bench-quick gpu-check check docs lock audit clean FORCE

help:
	@echo "make train         set up .venv, then train on all GPUs, or on 2 ranks without one"
	@echo "                   RECIPE=digits  NP=4  ARGS=\"--epochs 5\""
	@echo "make test          set up .venv, then run the tests (two to four minutes on 2 idle cores)"
	@echo "make test-slow     the tests that take minutes (30 on 2 idle cores; HVD_TRAIN_NO_SKIPS=1: none may be skipped)"
	@echo "make test-image    build the container image and run it (podman or docker; 20 GB, 15 minutes)"
	@echo "make campaign      random faults, a state of 500 MB, half an hour (as root); SECONDS=600 SEED=1 REDUCTION=exact"
	@echo "make bench         every benchmark and its record, on an idle machine (three hours; as root)"
	@echo "make bench-quick   the ratios, in less than five minutes"
	@echo "make gpu-check     the trainer on this machine's GPUs (30 minutes); ARGS=\"--stages sums,fp16\": under three minutes each"
	@echo "make check         ruff, ruff format --check, mypy --strict, clang-format"
	@echo "make docs          the web site, in build/site: these pages, all flags and commands, the Python API"
	@echo "make lock          renew versions and digests of all packages; ARGS=--upgrade takes the newest"
	@echo "make audit         known vulnerabilities of the pinned packages, and a bill of materials of .venv (needs the network)"
	@echo "make env           set up .venv and nothing else; PYTHON=python3.12 chooses its Python"
	@echo "make clean         remove .venv and all that was built (not runs/)"

# One set-up runs at a time in a clone.
env:
	@mkdir -p build
	@flock --nonblock build/setup.lock true || echo "==> another set-up is running in this clone: waiting for it"
	@flock build/setup.lock $(MAKE) --silent $(STAMPS)/project

$(STAMPS)/environment: FORCE
$(STAMPS)/packages: $(STAMPS)/environment $(wildcard requirements/*.txt requirements/*/*.txt)
$(STAMPS)/horovod: $(STAMPS)/packages packaging/patches $(HOROVOD_FILES)
$(STAMPS)/project: $(STAMPS)/packages pyproject.toml | $(STAMPS)/horovod

# A Python that the user names must be the one in .venv; otherwise a .venv that works stays.
$(addprefix $(STAMPS)/,environment packages horovod project):
	@PYTHON="$(PYTHON)" CHOSEN="$(filter-out file,$(origin PYTHON))" packaging/environment.sh $(@F)

train: env
	@exec $(BIN)/hvd-train launch $(if $(NP),--np $(NP)) -- train $(RECIPE) $(ARGS)

# Two processes: one runs the tests that start launchers, the other all else.
test: env
	@$(WITH_PATH) $(BIN)/python -m tests.run $(TESTS) $(ARGS)

# Two processes: one runs the files whose tests make hosts, one file at a time, the other all else.
test-slow: env
	@$(WITH_PATH) $(BIN)/python -m pytest -n 2 --dist loadfile -m slow --durations=15 $(TESTS) $(ARGS)

test-image: env
	@$(WITH_PATH) $(BIN)/python -m pytest -m image tests/integration/test_image.py $(ARGS)

campaign: env
	@$(WITH_PATH) CAMPAIGN_SECONDS="$(or $(SECONDS),1800)" CAMPAIGN_SEED="$(or $(SEED),0)" \
		CAMPAIGN_REDUCTION="$(or $(REDUCTION),fast)" \
		$(BIN)/python -m pytest -m campaign tests/integration/test_campaign.py $(ARGS)

bench: env
	@export $(WITH_PATH); for name in speed input recovery growth; do $(BIN)/python -m benchmarks.$$name || exit 1; done

bench-quick: env
	@export $(WITH_PATH); for name in "speed resnet18" "speed elastic" "speed commits" input; do \
	  $(BIN)/python -m benchmarks.$$name --quick || exit 1; done

gpu-check: env
	@$(WITH_PATH) $(BIN)/python -m tests.gpu_check $(ARGS)

check: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find hvd_train packaging tests -name '*.c' -o -name '*.cc' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

# Without torch: the tools have an environment of their own, in build/docs.
docs:
	@$(PYTHON) -m venv build/docs
	@build/docs/bin/python -m pip install --quiet --require-hashes -r requirements/locks/docs.txt && \
	PYTHONPATH=. build/docs/bin/python packaging/docs.py && build/docs/bin/mkdocs build --strict
	@echo "build/site/index.html"

# Versions first; then a lock for each list, with the digest of every file of a version. What run.txt has is not repeated.
lock: UV = ../$(BIN)/uv pip compile --quiet --no-annotate --no-header --universal --python-version=3.10
lock: env
	@cd requirements && $(UV) $(ARGS) -o constraints.txt {run,build,nvcc,mpi,dev}.txt && \
	for name in run build nvcc mpi dev; do \
	  $(UV) --generate-hashes -c constraints.txt $$others -o locks/$$name.txt $$name.txt || exit 1; \
	  others=$${others:-$$(sed -n 's/^\([A-Za-z0-9_.-]*\)==.*/--no-emit-package \1/p' locks/run.txt)}; \
	done && \
	for name in audit docs; do $(UV) $(ARGS) --generate-hashes -o locks/$$name.txt $$name.txt || exit 1; done

# The tools have an environment of their own, in build/audit.
audit: env
	@$(BIN)/python -m venv build/audit
	@build/audit/bin/python -m pip install --quiet --require-hashes -r requirements/locks/audit.txt && \
	build/audit/bin/cyclonedx-py environment $(BIN)/python --output-reproducible --output-file build/sbom.cdx.json && \
	build/audit/bin/pip-audit --strict --disable-pip --require-hashes $(ARGS) $$(printf -- '-r %s ' requirements/locks/{run,build,mpi,nvcc,dev}.txt)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
