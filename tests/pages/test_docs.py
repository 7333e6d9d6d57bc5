"""What README.md and the docstrings show is what happens."""

import contextlib
import doctest
import importlib
import io
import pathlib
import pkgutil
import re

import pytest

import torchcache2
from tests.helpers import warm

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```(?:\s*```text\n(.*?)```)?", re.DOTALL)


def without_times(text):
    return re.sub(r"-?\d+\.\d+ s\b", "… s", text).strip()


def test_readme_code_prints_what_the_readme_says(tmp_path):
    # As files, because a key covers source code, which the code of a string does not have.
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert len(blocks) >= 3
    shared = ""
    for number, (code, expected) in enumerate(blocks):
        shared += code
        script = tmp_path / f"block{number}.py"
        script.write_text(shared if "import torch" not in code else code)
        shared = shared if "import torch" not in code else code
        run = warm.run(script, cwd=tmp_path, warnings=["error"])
        said = [
            line for line in run.err.splitlines() if "Without the dataset, CachedDataset(None" not in line
        ]
        assert said == []  # but for what `warmup` says in the end
        if expected:
            assert without_times(run.out).endswith(without_times(expected))


MODULES = sorted(module.name for module in pkgutil.walk_packages(torchcache2.__path__, "torchcache2."))


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    output, module = io.StringIO(), importlib.import_module(name)
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    found = finder.find(module, name)
    text = pathlib.Path(module.__file__).read_text()
    for thing in re.findall(r"^(?:class|def) (\w+)", text, re.MULTILINE):
        if getattr(module, thing).__module__ == "torchcache2":  # as public classes say, wherever they are
            found += finder.find(getattr(module, thing), module=module)
    with contextlib.redirect_stdout(output):
        failed = sum(runner.run(one).failed for one in found)
    assert failed == 0, output.getvalue()
    assert any(one.examples for one in found) == bool(re.search(r"^ *>>> ", text, re.MULTILINE))


def test_public_names_have_docstrings():
    for name in torchcache2.__all__:
        thing = getattr(torchcache2, name)
        if name != "__version__":
            assert thing.__doc__ and len(thing.__doc__) > 20, name


def test_the_changelog_has_this_version():
    assert f"## {torchcache2.__version__}" in (ROOT / "CHANGELOG.md").read_text()
