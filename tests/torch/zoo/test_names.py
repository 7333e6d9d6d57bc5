import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.zoo.models import ENTRIES

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two processes find, each with a hash seed and a folder of its own."""
    processes = []
    for seed in "12":
        folder = tmp_path_factory.mktemp(f"folder{seed}")
        copy = folder / HERE.relative_to(ROOT)
        shutil.copytree(HERE, copy, ignore=shutil.ignore_patterns("__pycache__", "test_*"))
        for package in (copy.parent, copy.parents[1]):
            (package / "__init__.py").touch()
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.torch.zoo.names"]
        with (folder / "out").open("w") as out:
            process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, stdout=out)
        processes.append((process, folder / "out"))
    for process, _ in processes:
        assert process.wait(300) == 0
    return [json.loads(out.read_text()) for _, out in processes]


@pytest.mark.parametrize("name", [*ENTRIES, "loaded gpt2", "loaded bert", "loaded autoencoder"])
def test_the_namespace_is_that_of_another_process(name, found):
    first, second = (each[name] for each in found)
    assert "error" not in first, first["error"]
    assert first["warnings"] == second["warnings"] == []  # it would say that it is good for a process only
    assert first["names"] == second["names"]
    assert len(set(first["names"])) == 1  # the first call has left the model as it was
