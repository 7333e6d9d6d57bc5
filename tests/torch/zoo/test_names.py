"""A model has one namespace in all processes, whatever their hash seed, folder and history."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.examples import LIBRARIES
from tests.helpers.outputs import warnings_in
from tests.torch.zoo import names

HERE = Path(__file__).parent

# The zoo is imported from the folder that is given.
SCRIPT = """
import runpy, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
    del sys.modules[name]
sys.path.insert(0, sys.argv[1])
runpy.run_module("tests.torch.zoo.names", run_name="__main__")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What another process finds, with a hash seed and a folder of its own."""
    folder = tmp_path_factory.mktemp("folder")
    copy = folder / HERE.relative_to(warm.ROOT)
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("__pycache__", "test_*"))
    for package in (copy.parent, copy.parents[1]):
        (package / "__init__.py").touch()
    process = warm.start(SCRIPT, folder, imports=LIBRARIES).done(timeout=300)
    return json.loads(process.out)


@pytest.mark.slow
@pytest.mark.parametrize("name", names.ALL)
def test_the_namespace_is_that_of_another_process(name, found, log):
    there = found[name]
    assert "error" not in there, there["error"]
    assert there["warnings"] == []  # it would say that it is good for a process only
    assert there["names"] == list(names.names(names.ALL[name]))
    assert len(set(there["names"])) == 1  # the first call has left the model as it was
    assert warnings_in(log) == []
