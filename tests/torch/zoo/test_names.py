"""A model has one namespace in all processes, whatever their hash seed and folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.zoo import names

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What another process finds, with a hash seed and a folder of its own."""
    folder = tmp_path_factory.mktemp("folder")
    copy = folder / HERE.relative_to(ROOT)
    shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("__pycache__", "test_*"))
    for package in (copy.parent, copy.parents[1]):
        (package / "__init__.py").touch()
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.torch.zoo.names"]
    ran = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", names.ALL)
def test_the_namespace_is_that_of_another_process(name, found, log):
    there = found[name]
    assert "error" not in there, there["error"]
    assert there["warnings"] == []  # it would say that it is good for a process only
    assert there["names"] == list(names.names(names.ALL[name]))
    assert len(set(there["names"])) == 1  # the first call has left the model as it was
    assert [record.getMessage() for record in log if record.levelname == "WARNING"] == []
