# make            set up, build, the main job, then the site
# make site       build/site/, which opens from disk; make site-open: show it; make site-pictures: those of the README;
#                 make vendor: fetch its libraries anew
# make test       the tests; make lint: style, types, ptxas; make format: rewrite; make clean: forget the build
# make portability  grids that the tests thin out
# make help       these lines
# What earlier runs made of the same files is taken from the user's cache directory; NO_CACHE=1 makes everything anew.
# PYTHON=python3.12 chooses the Python of a new .venv. NO_VENV=1 uses the one that is there, with torch, and installs nothing.

ifdef NO_VENV
PYTHON ?= python3
RUN := $(PYTHON)
ENVIRONMENT :=
CLANG_FORMAT := clang-format
# A GPU holds one process's large cases at a time, and an existing environment may lack pytest-xdist.
TEST_FLAGS ?=
else
RUN := .venv/bin/python
ENVIRONMENT := .venv/.installed
CLANG_FORMAT := .venv/bin/clang-format
TEST_FLAGS ?= $(if $(wildcard /dev/nvidiactl),,-n auto --dist worksteal)
endif

ifdef NO_CACHE
export KERNEL_TWINS_NO_CACHE := 1
export MYPY_CACHE_DIR := /dev/null
CACHE_FLAGS := --no-cache
else
export MYPY_CACHE_DIR := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kernel-twins/mypy
endif

CUDA_SOURCES := $(shell find cuda-kernels hardware-survey -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.cpp')
EXAMPLES := $(shell find tests/fixtures -name '*.cu' -o -name '*.h' -o -name '*.cpp')
BUILD_INPUTS := $(CUDA_SOURCES) $(shell find kernel_twins/ops -name '*.py') $(wildcard build_support/*.py) \
	$(wildcard kernel_twins/spec/*.py) setup.py

.PHONY: all build test portability lint format site site-open site-pictures vendor clean help FORCE
all: build
	$(RUN) profiling/ncu_report.py
	$(RUN) web/build.py

# Modules are compiled when they are imported, which few of torch's are.
.venv/.installed: requirements.txt
	python=$$(PYTHON='$(PYTHON)' sh build_support/preflight.sh) && $$python -m venv --clear .venv
	.venv/bin/python -m pip install --disable-pip-version-check --no-compile -r requirements.txt
	touch $@

build: build/.built
build/.built: $(ENVIRONMENT) $(BUILD_INPUTS) build/.settings
	$(RUN) setup.py build_ext
	touch $@

# What the build depends on beside files; rewritten, and so newer, only where it changed.
build/.settings: FORCE
	@mkdir -p build
	@echo '$(RUN) $(CUDA_HOME) $(TORCH_CUDA_ARCH_LIST)' | cmp -s - $@ || \
		echo '$(RUN) $(CUDA_HOME) $(TORCH_CUDA_ARCH_LIST)' > $@

test: build
	REQUIRE_BUILD=1 $(RUN) -m pytest $(TEST_FLAGS) $(CACHE_FLAGS)

# Grids that the tests thin out. Pairs of a configuration and a case, of which the tests compile each configuration and
# each case: a search passes over a pair that does not fit, so that no result depends on one.
portability: build
	EVERY_PAIR=1 REQUIRE_BUILD=1 $(RUN) -m pytest $(TEST_FLAGS) $(CACHE_FLAGS) tests/compiler/test_triton_aot.py tests/compiler/test_wgmma_registers.py

lint: build
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(CLANG_FORMAT) --dry-run -Werror $(CUDA_SOURCES) $(EXAMPLES)
	$(RUN) -m build_support.ptxas_gate

format: $(ENVIRONMENT)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(CLANG_FORMAT) -i $(CUDA_SOURCES) $(EXAMPLES)

# From committed measurements alone: no GPU, and nothing compiled.
site: $(ENVIRONMENT)
	$(RUN) web/build.py

site-open: site
	$(RUN) -m webbrowser -t 'file://$(CURDIR)/build/site/index.html'

site-pictures: site
	$(RUN) web/photograph.py

vendor: $(ENVIRONMENT)
	$(RUN) web/vendor.py

clean:
	rm -rf build dist kernel_twins/_C*.so kernel_twins/_ladder*.so compile_commands.json *.egg-info

help:
	@sed -n '/^#/!q; s/^# //p' Makefile
