# make demo   cache a frozen backbone on real data, with and without: the example
# make check  lint, types and a minute of tests, while you work
# make test   lint, types and the whole suite
# make bench  the benchmarks: tables and plots for the documentation
# make docs   the documentation, in .docs
# make soak   the tests that take long
# make lowest the suite on the oldest torch and the oldest Python that are supported
# make newest the suite of what depends on torch, on the newest torch and the newest Python that are supported
# make pythons the tests of what reads bytecode, on the other Pythons that are supported
# make test-gpu the suite with its tensors on a GPU, and the tests that need one

PYTHON ?= python3
VENV ?= .venv
QUICK = $(addprefix tests/,core engine decorator/test_decorator.py decorator/test_forward.py identity/test_keys.py)
NOT_TORCH = system cli tiers/disk project pages/test_ray.py torch/zoo identity/test_xxh3.py identity/test_kernels.py
OF_TRANSFORMERS = $(addprefix pages/test_examples_,clip.py latents.py speech.py)  # and diffusers, of today
# Beside them what needs no accelerator: files, data sets, pages, the memory of the host; and stand-ins for one.
NOT_GPU = $(NOT_TORCH) core datasets files pages tiers engine/collective engine/test_pressure.py \
	$(addprefix torch/,test_sharded.py test_sharded_collective.py test_torch_modes.py)
# What depends on torch most; of the rest, the suite on one version is enough.
OF_TORCH = $(addprefix tests/,core decorator engine identity torch)
# What reads source and bytecode, which are different in each Python.
OF_PYTHON = $(wildcard tests/identity/test_code_*.py tests/identity/test_weights_read.py)
# Of the Pythons that are supported, those that this machine has, the oldest first.
PYTHONS = $(shell for minor in 10 11 12 13; do \
	for python in python3.$$minor "$$HOME"/.pyenv/versions/3.$$minor.*/bin/python3.$$minor; do \
	"$$python" -m ensurepip --version >/dev/null 2>&1 && echo "$$python" && break; done; done)
# Those that are not the Python of another leg.
OTHER_PYTHONS = $(filter-out $(firstword $(PYTHONS)) $(lastword $(PYTHONS)) \
	%$(shell $(PYTHON) -c 'import sys; print("python%d.%d" % sys.version_info[:2])'),$(PYTHONS))
BETWEEN = $(patsubst python%,%,$(notdir $(OTHER_PYTHONS)))
# Their pins are for older versions than the tests', or bring the libraries of four clouds; they work without.
PEERS = stocaching==0.2.1 torch-module-cache==0.1.4 litdata==0.2.76 \
	mosaicml-streaming==0.13.0 catalogue cramjam python-snappy zstd
PIP = "pip>=25.1"  # knows dependency groups
RUN = $(VENV)/bin/python -W error::SyntaxWarning
# Four processes run tests, as many of them wait rather than compute; each takes some of the other's when it has none left.
PARALLEL = -n 4 --dist worksteal
# The tests are compiled once, not at every start: a third of the time that it takes to collect them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check test test-gpu bench docs soak lowest newest pythons clean can-run-lowest can-run-newest can-run-pythons

demo: $(VENV)/examples
	@echo "The demo takes about a minute on 2 cores, and ends with the path of its plot."
	$(RUN) examples/linear_probe.py

check test: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy & types=$$!; \
	$(RUN) -m pytest $(PARALLEL) $(if $(filter check,$@),$(QUICK)); tests=$$?; \
	wait $$types && exit $$tests  # types are checked while pytest collects

# In one process: the tests of memory that runs out take all that the GPU has.
test-gpu: $(VENV)/test
	$(RUN) -m pytest --device cuda $(patsubst %,--ignore=tests/%,$(NOT_GPU))

bench: $(VENV)/bench
	-$(VENV)/bin/pip install --quiet --no-deps $(PEERS)
	$(RUN) -m tests.benchmarks --markdown docs/tables --plots docs
	$(RUN) -m pytest tests/benchmarks/test_faults.py

docs: $(VENV)/docs
	$(VENV)/bin/sphinx-build -W -b html docs .docs

soak: $(VENV)/test $(VENV)/zoo
	SOAK=1 $(RUN) -m pytest -s
	$(RUN) -m pytest --device cpu tests/gpu

# The builds of torch that a registry has bring CUDA libraries: some gigabytes. The transformers of
# today do not work with the old one, so neither do the zoo and examples of models, nor does NumPy with its Triton: kernels
# are tested with the Triton of today. Left out is also what tests processes, files, commands and this repository
# rather than torch; the code on the pages is run. Google's libraries warn of the old Python.
lowest: export PYTHONWARNINGS = ignore:You are using a non-supported Python version:FutureWarning
lowest: $(VENV)-lowest/installed
	$(VENV)-lowest/bin/python -m pytest $(PARALLEL) -W 'ignore:`torch.utils._pytree._register_pytree_node`:FutureWarning' \
		-W "$$PYTHONWARNINGS" $(patsubst %,--ignore=tests/%,$(NOT_TORCH) $(OF_TRANSFORMERS))

newest: $(VENV)-newest/installed
	$(VENV)-newest/bin/python -m pytest $(PARALLEL) -W "ignore:Guards may run slower" $(OF_TORCH) $(patsubst %,--ignore=tests/%,$(NOT_TORCH))

pythons: $(BETWEEN:%=$(VENV)-%/installed)
	$(foreach version,$(BETWEEN),$(VENV)-$(version)/bin/python -m pytest $(PARALLEL) $(OF_PYTHON) &&) true

# Whether what a leg needs can be had: `.ci/run` asks.
can-run-lowest: $(VENV)-lowest/installed
can-run-newest: $(VENV)-newest/installed
can-run-pythons: $(BETWEEN:%=$(VENV)-%/installed)

$(VENV)-lowest/installed: pyproject.toml
	$(firstword $(PYTHONS) $(PYTHON)) -m venv --clear $(VENV)-lowest
	$(VENV)-lowest/bin/pip install --quiet $(PIP)
	$(VENV)-lowest/bin/pip install --quiet "torch==2.4.*" "numpy==1.26.*" "transformers<4.50" "diffusers<0.34" \
		-e . --group test
	touch $@

# Without the constraints: they are what keeps torch from being the newest.
$(VENV)-newest/installed: pyproject.toml
	$(lastword $(PYTHON) $(PYTHONS)) -m venv --clear $(VENV)-newest
	$(VENV)-newest/bin/pip install --quiet $(PIP)
	$(VENV)-newest/bin/pip install --quiet torch -e . --group test
	touch $@

# The gigabytes of CUDA libraries, if torch brings any, are those of the newest: they are for no certain Python.
$(VENV)-3.%/installed: $(VENV)-newest/installed
	$(filter %python3.$*,$(PYTHONS)) -m venv --clear $(VENV)-3.$*
	$(VENV)-3.$*/bin/pip install --quiet --no-deps torch -e .
	$(VENV)-3.$*/bin/pip install --quiet numpy xxhash brotli filelock safetensors tqdm \
		sympy networkx jinja2 fsspec typing-extensions setuptools pytest pytest-xdist hypothesis
	cd $(VENV)-3.$*/lib/python3.$*/site-packages && ln -s ../../../../$(VENV)-newest/lib/python3.*/site-packages/nvidia .
	touch $@

$(VENV)/examples: NEEDS = -e ".[examples]"
$(VENV)/%: NEEDS = -e . --group $*
$(VENV)/%: pyproject.toml constraints.txt
	@echo "Installing torch and what else this needs into $(VENV): some minutes, the first time only."
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet $(PIP)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt $(NEEDS)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-* .mypy_cache .pytest_cache .ruff_cache .hypothesis
