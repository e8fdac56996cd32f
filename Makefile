# make demo, test and bench need Python >= 3.10 and a C++ compiler, and bring the rest.
#
#   TORCH   the PyTorch to install, as pip takes it:  make test TORCH=torch==2.13.0
#   VENV    the virtual environment to make and use
#   PYTHON  the interpreter to make it from; gpu-check uses it as it is
#   ARGS    handed on to the program that is run

PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
SOURCES := setup.py pyproject.toml $(shell find csrc maxunpool_cuda -type f -name '*.[hpc]*' -not -name '*.pyc')
# Says in its name which PyTorch was asked for; another one is installed over it.
REQUIREMENT := $(VENV)/.torch-$(subst /,_,$(TORCH))

.PHONY: demo test bench lint gpu-check clean

demo: $(VENV)/.demo
	$(VENV)/bin/python examples/segnet_mri.py $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/pytest $(ARGS)

bench: $(VENV)/.bench
	$(VENV)/bin/python -m benchmarks $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.cu' '*.cuh')
	$(VENV)/bin/mypy

gpu-check:
	$(PYTHON) tests/gpu_check.py $(ARGS)

clean:
	rm -rf build out *.egg-info

$(REQUIREMENT):
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing $(TORCH) into $(VENV). A CUDA build of PyTorch takes some minutes."
	$(PIP) --upgrade pip
	$(PIP) "$(TORCH)" ninja numpy "setuptools>=77"
	rm -f $(VENV)/.torch-* && touch "$(REQUIREMENT)"

$(VENV)/.demo $(VENV)/.test $(VENV)/.bench: $(VENV)/.%: $(SOURCES) $(REQUIREMENT)
	@echo "Building maxunpool_cuda. With CUDA kernels this takes some minutes."
	$(PIP) --no-build-isolation ".[$*]"
	@cd $(VENV) && bin/python -c "from maxunpool_cuda import build_info as b; \
	print('Built with', 'CPU and CUDA' if b()['cuda'] else 'CPU', 'kernels:', b())"
	touch $@

$(VENV)/.lint: pyproject.toml | $(REQUIREMENT)
	$(PIP) --group lint
	touch $@
