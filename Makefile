# `make demo` and `make test` do all their own set-up. To use a certain Python: make PYTHON=python3.13 test
SHELL := /bin/sh
.DEFAULT_GOAL := help

EXTRAS := tests,training
# One for each core, from two to eight. Each has files, or rooms, of its own (tests/conftest.py): their tests share
# programs. A test that hangs, such as a kernel that waits for what never comes, ends its worker after ten minutes, and
# the report names it. With AGAIN=--last-failed what failed runs again.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$(( n < 2 ? 2 : n > 8 ? 8 : n )))
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart=2 $(AGAIN) \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# Compilers allocate much, which is quicker in large pages, where glibc and the kernel have them.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
SHARED = $(if $(SHARE),--share $(SHARE))
# What runs on the oldest supported jax: the tests marked `contract`. Only their files are read, for others import
# what is not installed there.
CONTRACT_TESTS = $(shell grep -rl 'pytest\.mark\.contract' tests --include='test_*.py')

# Of the cases that are compiled for H200, those which the oldest jax compiles too; all if empty.
CASES_0112 := head_64_group_16 head_64_block_24 8_queries_head_256 window 40_lanes bf16_16x128 append_64 decode_loop \
	step_on_a_mesh

# Pages are looked at where there is a Chromium.
BROWSER := $(if $(shell command -v chromium),,--no-browser)

PY := .venv/bin/python
PY_0112 := .venv-0112/bin/python
PY_AOT := .venv-aot/bin/python
PY_AOT_0112 := .venv-aot-0112/bin/python
PY_TPU := .venv-tpu/bin/python
PY_DIST := .venv-dist/bin/python
PY_DOCS := .venv-docs/bin/python
PY_INTEGRATIONS := .venv-integrations/bin/python
PY_FLEET := .venv-fleet/bin/python
PIP_INSTALL := --require-virtualenv --disable-pip-version-check install --quiet --no-compile

# Where the environment says that modules are not to be kept compiled, each of the dozens of processes that start
# here would compile jax again, for two seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help .venv .venv-0112 .venv-aot .venv-aot-0112 .venv-tpu .venv-dist .venv-docs .venv-integrations .venv-fleet demo \
	block-map test test-slow test-all test-0112 aot aot-newest aot-emulated aot-loops aot-steps aot-0112 aot-benchmark aot-tpu lint mutants bench \
	dist docs integrations processes fleet clean distclean

help:
	@echo "make demo | block-map | test | test-all | lint | bench | mutants | test-0112 | aot | aot-tpu | dist | docs | integrations | processes | fleet | .venv | clean | distclean"

demo: .venv
	$(PY) -m experiments.decode
	$(PY) -m experiments.prefix_prompts
	$(PY) -m experiments.serve --demo
	$(PY) -m experiments.tiers --demo
	@echo "To serve the model over HTTP, with a page that shows the blocks: $(PY) -m experiments.server"

block-map: .venv
	$(PY) -m experiments.decode --map

# Every guarantee once, see tests/promises.md.
test: .venv
	$(PY) $(PYTEST) -m "not slow"

# What `make test` leaves out: more cases, more seeds, studies. Here, for test-0112, dist and mutants SHARE=0/4
# chooses the first quarter.
test-slow: .venv
	$(PY) $(PYTEST) -m slow $(SHARED)

test-all: test test-slow

test-0112: .venv-0112
	$(PY_0112) $(PYTEST) -m "contract and not newest" $(SHARED) $(CONTRACT_TESTS)

# The kernels, a model's decode loop and steps of a cache compiled for H200, without a GPU: by the newest jax in all
# shapes, by the oldest in a shape or two of each kernel, and with them the loops of the benchmark. What the kernels
# compile to is run by an emulator. And every public operation and step of decoding, in which loops, launches and pool
# copies are counted, and in three of Llama 3.2 1B the bytes that move.
aot: aot-newest aot-emulated aot-loops aot-steps aot-0112 aot-benchmark

aot-newest: .venv-aot
	$(PY_AOT) -m tests.aot.gpu

aot-emulated: .venv-aot
	$(PY_AOT) -m tests.aot.emulated

aot-loops: .venv-aot
	$(PY_AOT) -m tests.aot.loops

aot-steps: .venv-aot
	$(PY_AOT) -m tests.aot.decode_steps

aot-0112: .venv-aot-0112
	$(PY_AOT_0112) -m tests.aot.gpu $(CASES_0112)

aot-benchmark: .venv-aot-0112
	$(PY_AOT_0112) -m tests.aot.benchmark

# The TPU kernels compiled for three generations of TPUs, without one; operations and steps of decoding for one.
aot-tpu: .venv-tpu
	$(PY_TPU) -m tests.aot.tpu
	$(PY_TPU) -m tests.aot.tpu_programs

lint: .venv/.made-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

# All of them, or those with one of WORDS in their names; some are for a gate of `make aot` to notice.
mutants: .venv .venv-aot
	$(PY) -m tests.mutants $(SHARED) $(WORDS)

bench: .venv
	$(PY) -m experiments.bookkeeping

# The sdist, a wheel from it, and both tried in fresh environments outside of this folder.
dist: .venv-dist
	rm -rf dist
	$(PY_DIST) -m build
	$(PY_DIST) -m twine check --strict dist/*
	$(PY_DIST) -m tests.wheel $(SHARED) dist

# The site, in build/site: without a warning, every public name with an entry, every link and anchor with its target;
# looked at in Chromium, where there is one, light and dark, on a desk and on a phone.
docs: .venv-docs
	NO_MKDOCS_2_WARNING=1 $(PY_DOCS) -m mkdocs build --quiet --strict
	$(PY_DOCS) -m tests.site.built_pages build/site
	$(if $(BROWSER),,$(PY_DOCS) -m tests.site.browser build/site)

# Programs of others that talk to this library, as they are.
integrations: .venv-integrations
	$(PY_INTEGRATIONS) -m tests.integrations.dynamo_indexer
	$(PY_INTEGRATIONS) -m tests.integrations.server $(BROWSER)
	$(PY_INTEGRATIONS) -m tests.integrations.harness
	$(PY_INTEGRATIONS) -m tests.integrations.trainer

# Engines on meshes of two and three processes, of which some are stopped, killed, late or different. Half of their time
# they wait, for each other and for clocks: a worker more keeps the cores busy.
processes: .venv
	$(PY) -m pytest -n $$(($(WORKERS) + 1)) -m slow tests/processes/test_distributed_team.py

# Two replicas on Ray Serve, of which one is killed under load.
fleet: .venv-fleet
	$(PY_FLEET) -m tests.integrations.fleet

# clean leaves the environments, distclean leaves a fresh clone.
clean:
	rm -rf .cache build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-0112 .venv-aot .venv-aot-0112 .venv-tpu .venv-dist .venv-docs .venv-integrations .venv-fleet

# Environments. The stamp is touched last, so that an interrupted installation is done again.
.venv: .venv/.made
.venv-0112: .venv-0112/.made
.venv-aot: .venv-aot/.made
.venv-aot-0112: .venv-aot-0112/.made
.venv-tpu: .venv-tpu/.made
.venv-dist: .venv-dist/.made
.venv-docs: .venv-docs/.made
.venv-integrations: .venv-integrations/.made
.venv-fleet: .venv-fleet/.made

.venv/.made: pyproject.toml Makefile
	@$(call make_venv,.venv)
	$(PY) -m pip $(PIP_INSTALL) --editable '.[$(EXTRAS)]'
	@touch $@

.venv/.made-dev: .venv/.made
	$(PY) -m pip $(PIP_INSTALL) --editable '.[dev]'
	@touch $@

.venv-0112/.made: pyproject.toml Makefile
	@$(call make_venv,.venv-0112)
	$(PY_0112) -m pip $(PIP_INSTALL) jax==0.11.2 --editable '.[tests]'
	@touch $@

# These see what another environment has, and hold only what they add.
.venv-aot/.made: .venv/.made
	@$(call make_venv_on,.venv-aot,.venv)
	$(PY) -m pip --python $(PY_AOT) $(PIP_INSTALL) --no-deps $(call cuda_compiler,$(PY))
	@touch $@

.venv-aot-0112/.made: .venv-0112/.made
	@$(call make_venv_on,.venv-aot-0112,.venv-0112)
	$(PY_0112) -m pip --python $(PY_AOT_0112) $(PIP_INSTALL) flax
	$(PY_0112) -m pip --python $(PY_AOT_0112) $(PIP_INSTALL) --no-deps $(call cuda_compiler,$(PY_0112))
	@touch $@

.venv-tpu/.made: .venv-0112/.made
	@$(call make_venv_on,.venv-tpu,.venv-0112)
	$(PY_0112) -m pip --python $(PY_TPU) $(PIP_INSTALL) flax
	$(PY_0112) -m pip --python $(PY_TPU) $(PIP_INSTALL) --no-deps libtpu==0.0.48.1
	@touch $@

.venv-dist/.made: Makefile
	@$(call make_venv,.venv-dist)
	$(PY_DIST) -m pip $(PIP_INSTALL) build twine
	@touch $@

.venv-docs/.made: .venv/.made
	@$(call make_venv_on,.venv-docs,.venv)
	$(PY) -m pip --python $(PY_DOCS) $(PIP_INSTALL) --editable '.[docs]' $(if $(BROWSER),,playwright)
	@touch $@

.venv-integrations/.made: .venv/.made
	@$(call make_venv_on,.venv-integrations,.venv)
	$(PY) -m pip --python $(PY_INTEGRATIONS) $(PIP_INSTALL) ai-dynamo-runtime openai lm-eval==0.4.13 google-tunix==0.1.7 \
		$(if $(BROWSER),,playwright)
	@touch $@

.venv-fleet/.made: .venv/.made
	@$(call make_venv_on,.venv-fleet,.venv)
	$(PY) -m pip --python $(PY_FLEET) $(PIP_INSTALL) 'ray[serve]==2.60.*'
	@touch $@

# XLA's CUDA plugin of the interpreter's jax, and the compiler and disassembler that it calls; no CUDA libraries.
define cuda_compiler
$(foreach package,jax-cuda13-plugin jax-cuda13-pjrt,$(package)==$$($(1) -c 'import jax; print(jax.__version__)')) \
	'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-nvdisasm==13.2.*'
endef

# A candidate counts when it runs here (a pyenv shim may exist and refuse), is new enough and can make environments.
# An environment counts when it is one, whole: a broken one is made anew, and never is anything installed outside it.
runs = >/dev/null 2>&1 -c
usable = $(runs) 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))'
whole = $(runs) 'import sys, pip; sys.exit(sys.version_info < (3, 12) or sys.prefix == sys.base_prefix)'

define make_venv
if $(1)/bin/python $(whole); then exit 0; fi; \
for candidate in "$(PYTHON)" python3.12 python3.13 python3.14 python3 python \
    "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do \
  if [ -n "$$candidate" ] && "$$candidate" $(usable); then \
    echo "making $(1) with $$("$$candidate" -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
    exec "$$candidate" -m venv --clear $(1); \
  fi; \
done; \
echo "No Python of at least 3.12 with the venv and ensurepip modules was found: install one, or name it with make PYTHON=/path/to/python." >&2; \
exit 1
endef

# $(1) on top of $(2): a path file, relative to the folder that it lies in, names the packages of the other.
define make_venv_on
$(2)/bin/python -m venv --clear --without-pip $(1) && for site in $(1)/lib/python3.*/site-packages; do \
  echo "../../../../$(2)/$${site#$(1)/}" > "$$site/base.pth"; \
done
endef
