"""What tests of this room share: files of code that are imported, and grad mode."""

import importlib
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest
import torch


@pytest.fixture
def without_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Imports a file as the module of its name; or a text, as a new file with a name that others may have."""
    numbers = itertools.count()

    def load(path, text=None):
        if text is not None:
            path = tmp_path / f"text {next(numbers)}" / f"{path}.py"
            path.parent.mkdir()
            path.write_text(text)
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def installed(tmp_path_factory, monkeypatch):
    """Makes installed packages of texts, and imports them unless it is told not to."""
    place = tmp_path_factory.mktemp("packages") / "site-packages"
    place.mkdir()
    monkeypatch.syspath_prepend(place)

    def make(name, text, *, is_imported=True):
        (place / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        del sys.modules[name]  # so that it goes with the test
        monkeypatch.setitem(sys.modules, name, module)
        if not is_imported:
            del sys.modules[name]
        return module

    return make
