# make demo      cache a frozen backbone on real data, with and without: the example
# make test      linter, types, and the tests that are quick: four minutes
# make test-all  also the tests that are marked as slow
# make bench     the benchmarks: tables and plots for the documentation
# make docs      the documentation, in .docs
# make soak      all tests, those that run a sample as a whole
# make lowest    the quick tests on the oldest torch and the oldest Python that are supported
# make newest    those of what depends on torch, on the newest torch and the newest Python that are supported
# make pythons   those of what reads bytecode, on the other Pythons that are supported
# make test-gpu  what depends on torch with its tensors on a GPU, and the tests that need one

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -W error::SyntaxWarning
# Four processes, as many tests wait rather than compute; each takes some of the other's when it has none left.
PYTEST = -m pytest -n 4 --dist worksteal
QUICK = $(PYTEST) -m "not slow"
INSTALL = bin/pip install --quiet --no-compile
# The first of pyenv's Pythons of a version, or that of the system.
python = $(firstword $(wildcard $(HOME)/.pyenv/versions/3.$1.*/bin/python3.$1) python3.$1)
OTHERS = $(filter-out $(shell $(PYTHON) -c 'import sys; print(sys.version_info.minor)'),11 12)
# The tests are compiled once, not at every start: a third of the time that it takes to collect them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-rest test-all test-gpu bench docs soak clean $(foreach leg,lowest newest pythons,$(leg) install-$(leg))

demo: $(VENV)/examples
	@echo "The demo takes about a minute on 2 cores, and ends with the path of its plot."
	$(RUN) examples/linear_probe.py

test: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy & types=$$!; $(RUN) $(QUICK); tests=$$?; \
	wait $$types && exit $$tests  # types are checked while pytest collects

test-rest: $(VENV)/test
	$(RUN) $(PYTEST) -m slow

test-all: test test-rest

# In one process: the tests of memory that runs out take all that the GPU has.
test-gpu: $(VENV)/test
	$(RUN) -m pytest --device cuda $(addprefix tests/,decorator engine identity torch gpu)

bench: $(VENV)/bench
	-$(VENV)/$(INSTALL) --no-deps --requirement tests/benchmarks/peers.txt
	$(RUN) -m tests.benchmarks --markdown docs/tables --plots docs
	$(RUN) -m pytest tests/benchmarks/test_faults.py

docs: $(VENV)/docs
	$(VENV)/bin/sphinx-build -W -b html docs .docs

soak: $(VENV)/test $(VENV)/zoo
	SOAK=1 $(RUN) -m pytest -s
	$(RUN) -m pytest --device cpu tests/gpu

lowest newest pythons: %: install-%  # `.ci/run` asks whether what a leg needs can be had
install-lowest install-newest: install-%: $(VENV)-%/installed
install-pythons: $(OTHERS:%=$(VENV)-3.%/installed)

# Google's libraries warn of the old Python, also in the processes that tests start.
lowest: export PYTHONWARNINGS = ignore:You are using a non-supported Python version:FutureWarning
lowest:
	$(VENV)-lowest/bin/python $(QUICK) -W "$$PYTHONWARNINGS" \
		-W 'ignore:`torch.utils._pytree._register_pytree_node`:FutureWarning' $(patsubst %,--ignore=tests/%,cli project system tiers/disk)

newest:
	$(VENV)-newest/bin/python $(QUICK) -W "ignore:Guards may run slower" $(addprefix tests/,core decorator engine identity torch)

pythons:
	$(foreach minor,$(OTHERS),$(VENV)-3.$(minor)/bin/python $(QUICK) tests/identity/test_code_*.py &&) true

# Without the constraints: they are what keeps torch from being the newest.
$(VENV)-newest/installed: NEEDS = torch -e . --group test
$(VENV)-lowest/installed: NEEDS = "torch==2.4.*" "numpy==1.26.*" "transformers<4.50" "diffusers<0.34" -e . --group test
$(VENV)-newest/installed: LEG = $(call python,13)
$(VENV)-lowest/installed: LEG = $(call python,10)
$(VENV)-newest/installed $(VENV)-lowest/installed: pyproject.toml
	$(LEG) -m venv --clear $(@D)
	$(@D)/$(INSTALL) "pip>=25.1"  # knows dependency groups
	$(@D)/$(INSTALL) $(NEEDS)
	touch $@

# The gigabytes of CUDA libraries, if torch brings any, are those of the newest: they are for no certain Python.
$(VENV)-3.%/installed: $(VENV)-newest/installed
	$(call python,$*) -m venv --clear $(@D)
	$(@D)/$(INSTALL) --no-deps torch -e .
	$(@D)/$(INSTALL) numpy xxhash brotli filelock safetensors tqdm \
		sympy networkx jinja2 fsspec typing-extensions setuptools pytest pytest-xdist hypothesis
	cd $(@D)/lib/python3.$*/site-packages && ln -s ../../../../$(VENV)-newest/lib/python3.*/site-packages/nvidia .
	touch $@

$(VENV)/examples: NEEDS = -e ".[examples]"
$(VENV)/%: NEEDS = -e . --group $*
$(VENV)/%: pyproject.toml constraints.txt
	@echo "Installing torch and what else this needs into $(VENV): some minutes, the first time only."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/$(INSTALL) "pip>=25.1"
	$(VENV)/$(INSTALL) --constraint constraints.txt $(NEEDS)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .mypy_cache .pytest_cache .ruff_cache .hypothesis
