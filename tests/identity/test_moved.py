"""Files of the package may move: keys stay, and pickles can be loaded."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import moved, warm
from torchcache2.files import filesystem

PACKAGE = Path(filesystem.__file__).parents[1]
# Files under other names, as a refactoring gives them; whole rooms besides.
RENAMED = {
    "decorator.torchcache": "decorator.facade",
    "decorator.modulecache": "decorator.caching",
    "decorator.wrap": "decorator.patching",
    "core.settings": "core.options",
    "core.keys": "core.batchkeys",
    "core.errors": "core.exceptions",
    "engine.stats": "engine.counts",
    "engine.cache": "engine.machine",
    "identity.walk": "identity.walking",
}
ROOMS = {"decorator": "faces", "engine": "motor"}


def refactored(folder):
    """A copy of the package in a folder, whose files and rooms have other names."""
    package = folder / "torchcache2"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in RENAMED.items():
        (package / f"{old.replace('.', '/')}.py").rename(package / f"{new.replace('.', '/')}.py")
    for old, new in ROOMS.items():
        (package / old).rename(package / new)
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for old, new in RENAMED.items():
            text = re.sub(rf"""(torchcache2\.|["']){re.escape(old)}\b""", rf"\g<1>{new}", text)
            room, file = old.split(".")
            text = re.sub(rf"(from torchcache2\.{room} import ){file}\b", rf"\g<1>{new.split('.')[1]}", text)
        for old, new in ROOMS.items():
            text = re.sub(rf"""(torchcache2\.|["']){old}\.""", rf"\g<1>{new}.", text)
            text = re.sub(rf"(from torchcache2\.){old} import", rf"\g<1>{new} import", text)
        path.write_text(text, encoding="utf-8")
    return folder


def run(root, place, own, others):
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "moved.py", str(own), str(others)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What a process says with the package as it is, and what one says whose package has other names."""
    folder = tmp_path_factory.mktemp("moved")
    for name in ("place", "here", "there", "none"):
        (folder / name).mkdir()
    shutil.copy(moved.__file__, folder / "place" / "moved.py")
    other = refactored(folder / "other")
    script = folder / "place" / "moved.py"
    here = warm.run(script, folder / "here", folder / "none", cwd=script.parent)
    there = run(other, folder / "place", folder / "there", folder / "here")
    again = warm.run(script, folder / "none", folder / "there", cwd=script.parent)
    return json.loads(here.out), there, json.loads(again.out)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*moved.MAKERS, *(f"argument {name}" for name in moved.ARGUMENTS)])
def test_a_moved_file_changes_no_key(name, said):
    here, there, _ = (one["namespaces"][name] for one in said)
    assert here == there


@pytest.mark.parametrize("name", moved.PICKLED)
def test_a_pickle_is_loaded_by_the_other_layout_and_names_public_paths(name, said):
    _, there, again = (one["loaded"] for one in said)
    assert there[name] == again[name]
    assert all(path.count(".") == 1 for path in there[name])
