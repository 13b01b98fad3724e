# make demo    plan and train a small model on this machine's CPU
# make test    lint, format, types and tests: all that must pass before a change lands
# make slow    the tests that `make test` leaves out
# make fuzz    random programs on simulated ranks beside one process: make fuzz CASES=10000 SEED=0
# make docs    the documentation, in build/site; a warning or a broken link is an error
# make reference       writes the generated parts of the documentation again
# make release         packages in dist/, the wheel tried in a fresh environment outside of the checkout, and the docs
# make bench   strategies measured beside their predictions and beside PyTorch's own tools, on small models
# make bench-planner   how long planning and solving take
# make cuda-check      graphs and casts on CUDA, as a CUDA build of PyTorch sees them; no GPU, an environment of 5 GB
# make gpu       what one NVIDIA GPU can show, in less than ten minutes (GPU_SECONDS=590) with that environment; what finds
#                no time left is listed, and measured by another run with RESUME=--resume. Results are written to benchmarks/results.
#                GPU_PYTHON=python3 takes a Python that has torch for CUDA, autopar's needs and pytest
#
# The environment is made in .venv on first use, and again when pyproject.toml changes.
# torch comes first and alone. Without a GPU it is the CPU build (192 MB); TORCH, if given, decides instead, for example
#   make test TORCH="torch==2.13.0 --index-url URL"

PYTHON ?= $(shell for python in python3.11 python3; do $$python -c "" 2>/dev/null && echo $$python && break; done)
TORCH ?=
TORCH_VERSION := 2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
CUDA_TORCH ?= torch===$(TORCH_VERSION)
GPU_PYTHON ?= .venv-cuda/bin/python
GPU_SECONDS ?= 590
RESUME ?=
CASES ?= 1000
SEED ?= 0

# Many processes of the tests and the demo import the same sources: they are compiled once, whatever the caller's setting.
export PYTHONDONTWRITEBYTECODE :=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
DEMO_READY := .venv/ready-demo
TEST_READY := .venv/ready-test
BENCH_READY := .venv/ready-bench
WHEEL_ENVIRONMENT = $(or $(TMPDIR),/tmp)/autopar-wheel

# An index that cannot be reached is no error to pip: the build is then found elsewhere, or not at all. What torch needs is
# installed with autopar, from the usual index.
define INSTALL_TORCH
if [ -n '$(TORCH)' ]; then $(PIP) install $(TORCH); \
elif nvidia-smi -L 2>/dev/null | grep -q GPU; then $(PIP) install torch==$(TORCH_VERSION); \
else \
	echo "nvidia-smi finds no GPU: installing PyTorch's CPU build, a download of about 192 MB"; \
	$(PIP) --retries 1 --timeout 15 install --no-deps torch==$(TORCH_VERSION)+cpu --extra-index-url $(CPU_INDEX) \
	|| { echo "no CPU build was found: installing the default one, on Linux 527 MB and CUDA's libraries besides"; \
		$(PIP) install torch==$(TORCH_VERSION); }; \
fi
endef

.PHONY: demo test lint style types pytest format slow fuzz docs reference release try-wheel bench bench-planner cuda-check \
	gpu clean

demo: $(DEMO_READY)
	$(BIN)/autopar demo

# Pyright takes one core for minutes: it runs beside the tests.
test: style
	$(MAKE) --jobs 2 types pytest

lint: style types

style: $(TEST_READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(TEST_READY)
	$(BIN)/pyright

# One thread each: two workers and their ranks share the cores.
pytest: $(TEST_READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

format: $(TEST_READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

slow: $(TEST_READY)
	$(BIN)/python -m pytest -m slow

fuzz: $(TEST_READY)
	$(BIN)/python -m tests.fuzz --cases $(CASES) --seed $(SEED)

docs: $(TEST_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "built build/site/index.html"

reference: $(TEST_READY)
	$(BIN)/python -m docs.site.reference

release: docs
	$(PIP) install -e ".[release]"
	rm -rf dist build/lib
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(MAKE) try-wheel

# Nothing of the checkout can be imported there.
try-wheel: PIP = $(WHEEL_ENVIRONMENT)/bin/python -m pip --quiet --disable-pip-version-check
try-wheel:
	rm -rf $(WHEEL_ENVIRONMENT)
	$(PYTHON) -m venv $(WHEEL_ENVIRONMENT)
	@$(INSTALL_TORCH)
	$(PIP) install dist/autopar-*.whl
	cd $(WHEEL_ENVIRONMENT) && bin/python -c "import autopar, sys; assert sys.prefix in autopar.__file__, autopar.__file__"
	cd $(WHEEL_ENVIRONMENT) && bin/autopar --version && bin/autopar plan tiny-mlp --mesh 2x2 --hardware h100
	rm -rf $(WHEEL_ENVIRONMENT)

bench: $(BENCH_READY)
	mkdir -p build/bench
	$(BIN)/autopar bench --suite small --steps 5 --csv build/bench/small.csv --json build/bench/small.json --plots build/bench

bench-planner: $(DEMO_READY)
	$(BIN)/python benchmarks/solve_speed.py
	$(BIN)/python -m benchmarks.plan_speed --quick

cuda-check: .venv-cuda/ready
	.venv-cuda/bin/python -m benchmarks.cuda_check

# The device is looked for first: an environment of 5 GB is not made in vain.
gpu:
	@nvidia-smi -L 2>/dev/null | grep -q GPU \
		|| { echo "make gpu measures on an NVIDIA GPU, and nvidia-smi finds none here: nothing was measured."; exit 1; }
	start=$$(date +%s); $(if $(filter .venv-cuda/bin/python,$(GPU_PYTHON)),$(MAKE) .venv-cuda/ready &&) \
		$(GPU_PYTHON) -m benchmarks.gpu $(RESUME) --seconds $$(($(GPU_SECONDS) - $$(date +%s) + start))

clean:
	rm -rf .venv .venv-cuda build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
		|| { echo "autopar needs Python 3.11 or newer, found '$(PYTHON)'; run make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

$(DEMO_READY): pyproject.toml | $(BIN)/python
	@$(INSTALL_TORCH)
	$(PIP) install -e ".[hf]"
	@touch $@

$(BENCH_READY): $(DEMO_READY)
	$(PIP) install -e ".[hf,bench]"
	@touch $@

$(TEST_READY): $(DEMO_READY)
	$(PIP) install -e ".[test,hf]"
	@touch $@

.venv-cuda/ready: pyproject.toml
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip --quiet --disable-pip-version-check install "$(CUDA_TORCH)"
	.venv-cuda/bin/python -m pip --quiet --disable-pip-version-check install -e ".[hf,gpu]"
	@touch $@
