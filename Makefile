# make venv       the environment that all targets use (.venv); built once, rebuilt when its pins change
# make tune       the main job: tune one model preset on a short budget, then show what serves a call, and its kernel
# make test       every check that runs without a GPU, on its most telling cases; CI runs this and nothing else
# make test-all   make test, then exhaustive and crosscompile-all: before a release, and after changes of templates
# make exhaustive the other cases of the tests, marked so
# make crosscompile-all  every kernel of either Triton to machine code, of which make test has two of each family
# make gpu-test   the tests that need a GPU, GPU_JOBS (4) at a time on all GPUs, then those that look at a clock
# make flash-attn-test  FlashAttention's own tests with flashgen in its place: FLASH_ATTENTION is a clone of it
# make fuzz       random files and random calls, other ones each time, CASES of them (10000), and KILLS of a writer (60)
# make docs       docs/supported.md again, from the table of kernel families
# make databases  tuning_db/ again, after a schema revision
# make site       the documentation as a site in build/site
# make release    checks what a release needs, builds the archives, prints the command for the tag, names its other files
# make bundle     the kernels of the H200's records, compiled, in dist/nvidia_h200.kernels: a file of a release
# make lint       formatting, lint, types and import contracts       make format   rewrite files in the one format
#
# Without a GPU, make tune ranks for TARGET, of whose architecture no record ships: what is found is what serves.
# PYTHON=python3.12 chooses the interpreter. One that already has torch with a usable GPU keeps that torch.

PYTHON ?= python3
VENV ?= .venv
MODEL ?= gpt2
BUDGET ?= 30s
SAMPLE ?= b1-h12-s1024-d64-causal
TARGET ?= a100
CASES ?= 10000
KILLS ?= 60
GPU_JOBS ?= 4
FLASH_ATTENTION ?= ../flash-attention
FLASH_ATTN_OPTIONS ?=

BIN := $(VENV)/bin
TRITONS := 3.6 3.9
OLDEST := $(firstword $(TRITONS))

# Where the environment forbids bytecode, each process of the tests and each compile process would translate Triton,
# flashgen and the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.PRECIOUS: .venvs/triton-%/.stamp
.PHONY: venv tune test test-all docs site release bundle databases lint format pytest interpreter exhaustive crosscompile crosscompile-all gpu-test flash-attn-test fuzz sanitize clean

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints/cpu.txt scripts/make_venv.py
	$(PYTHON) scripts/make_venv.py $(VENV)

tune: venv
	@target=$$($(BIN)/python -c "import torch; print('' if torch.cuda.is_available() else '--target $(TARGET)')") \
		&& $(BIN)/python -m flashgen tune --model $(MODEL) --budget $(BUDGET) $$target \
		&& $(BIN)/python -m flashgen explain $(SAMPLE) $$target \
		&& $(BIN)/python -m flashgen render $(SAMPLE) $$target

# What has one core to itself for a while (the installers, mypy, the last kernels of a stage) goes side by side; the tests
# follow alone, since some look at the clock.
test:
	$(MAKE) -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync) lint crosscompile interpreter
	$(MAKE) pytest

test-all:
	$(MAKE) test
	$(MAKE) exhaustive
	$(MAKE) crosscompile-all

docs: venv
	PYTHONPATH=$(CURDIR) $(BIN)/python scripts/supported.py

site: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

release: venv test-all
	PYTHONPATH=$(CURDIR) $(BIN)/python scripts/release.py

# By the oldest Triton. Under a variable of the compiler no kernel could be given away.
bundle: venv .venvs/triton-$(OLDEST)/.stamp
	mkdir -p dist
	env -u TRITON_DISABLE_LINE_INFO FLASHGEN_DB=dist/none.sqlite3 \
		PYTHONPATH=$$(echo .venvs/triton-$(OLDEST)/lib/python3.*/site-packages):$(CURDIR) \
		$(BIN)/python -m flashgen db export dist/nvidia_h200.sqlite3 --device h200 --all --with-binaries

databases: venv
	PYTHONPATH=$(CURDIR) $(BIN)/python scripts/databases.py

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: venv
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# One test process a core leaves none for the threads that torch would start in each of them.
pytest: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadgroup

# Triton reads TRITON_INTERPRET when a kernel is defined, so interpreted numerics need a process of their own.
interpreter: venv
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 tests/interpreter

# What pyproject.toml leaves out of the two above; tests/tiers.py says which cases these are.
exhaustive: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "exhaustive and not gpu" -n auto --maxprocesses 8 --dist loadgroup
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -m exhaustive -n auto --maxprocesses 8 tests/interpreter

crosscompile: $(TRITONS:%=crosscompile-%)

# scripts/crosscompile_jobs.py says which kernels these are, and what the newest has fewer of.
crosscompile-%: .venvs/triton-%/.stamp
	PYTHONPATH=$(CURDIR) .venvs/triton-$*/bin/python scripts/crosscompile.py $(if $(filter-out $*,$(OLDEST)),--few) --brief

crosscompile-all: $(TRITONS:%=.venvs/triton-%/.stamp)
	PYTHONPATH=$(CURDIR) .venvs/triton-$(OLDEST)/bin/python scripts/crosscompile.py
	PYTHONPATH=$(CURDIR) .venvs/triton-$(lastword $(TRITONS))/bin/python scripts/crosscompile.py --few

.venvs/triton-%/.stamp: constraints/triton-%.txt
	$(PYTHON) -m venv .venvs/triton-$*
	.venvs/triton-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	touch $@

# A failure names its case: run it again with FUZZ_SEED, FUZZ_FIRST and CASES=1.
fuzz: venv
	OMP_NUM_THREADS=1 FUZZ_CASES=$(CASES) FUZZ_SEED=$${FUZZ_SEED:-$$(date +%s)} KILL_ROUNDS=$(KILLS) \
		$(BIN)/python -m pytest -n auto --maxprocesses 8 tests/fuzz tests/db/test_processes.py

# Both parts in any case: what fails in the first is no reason not to know of the second. Tests of a second and of a
# minute lie side by side, so workers get few at a time, and references on the CPU get one thread each.
gpu-test: venv
	@status=0; \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "gpu and not alone" -n $(GPU_JOBS) --maxschedchunk 2 tests/gpu tests/test_readme.py || status=1; \
		$(BIN)/python -m pytest -m alone tests/gpu || status=1; \
		exit $$status

# FLASH_ATTN_OPTIONS='--version 3 --sample 10 --limit-seconds 540'. Nothing is fetched; the tests import einops.
flash-attn-test: venv
	$(BIN)/python -m scripts.flash_attn_tests $(FLASH_ATTENTION) $(FLASH_ATTN_OPTIONS)

# The kernels of serving under compute-sanitizer, which comes with the CUDA toolkit.
sanitize: venv
	$(BIN)/python -m scripts.sanitize_decode

clean:
	rm -rf $(VENV) .venvs dist build .pytest_cache .mypy_cache .ruff_cache
