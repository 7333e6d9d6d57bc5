# make demo   cache a frozen backbone on real data, with and without: the example
# make test   lint, types and the whole suite
# make bench  the benchmarks, as a table
# make soak   the tests that take long
# make lowest the suite on the oldest torch that is supported

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python -W error::SyntaxWarning

.PHONY: demo test bench soak lowest clean

demo: $(VENV)/examples
	$(RUN) examples/linear_probe.py

test: $(VENV)/test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest

bench: $(VENV)/bench
	$(RUN) -m tests.benchmarks
	$(RUN) -m pytest tests/benchmarks/test_faults.py

soak: $(VENV)/test
	SOAK=1 $(RUN) -m pytest -s

# The registry's builds of old torch bring CUDA libraries: some gigabytes.
lowest:
	$(PYTHON) -m venv $(VENV)-lowest
	$(VENV)-lowest/bin/pip install --quiet "torch==2.4.*" -e ".[test]"
	$(VENV)-lowest/bin/python -m pytest

$(VENV)/%: pyproject.toml constraints.txt
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt -e ".[$*]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest .mypy_cache .pytest_cache .ruff_cache .hypothesis
