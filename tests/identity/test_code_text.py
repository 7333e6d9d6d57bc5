"""Text that is not the code that runs: a file edited after it was imported, a notebook's cell replaced."""

# ruff: noqa: E501 (texts of small files, one a line)

import __future__

import ast
import linecache
import os
import sys
import types

import pytest
import torch

from tests.helpers.outputs import namespace, warnings_in
from torchcache2 import torchcache
from torchcache2.identity.sourcecode import CompiledTexts, compiled, function_source

X = torch.rand(2, 3, generator=torch.Generator().manual_seed(3))


pytestmark = pytest.mark.usefixtures("without_grad")


def written(path, text):
    """A file that looks as if it had been there for years."""
    later = path.stat().st_mtime + 1 if path.exists() else 1e9
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (later, later))


KINDS = {
    "function": "def model(x):\n    return x * 2\n",
    "lambda": "model = lambda x: x * 2\n",
    "lambda in a call": "def same(f, n): return f\nmodel = same(\n    lambda x: x * 2, 5)\n",
    "closure": "def make(n):\n    def model(x):\n        return x * 2 * n\n    return model\nmodel = make(1)\n",
    "decorated": "def same(f):\n    return f\n@same\n@same\ndef model(x):\n    return x * 2\n",
    "constant within": "def model(x):\n    return [x * i for i in (1, 2)][1]\n",
    "nested": "def model(x):\n    def f(y):\n        return y * 2\n    return f(x)\n",
    "condition": "if True:\n    def model(x):\n        return x * 2\nelse:\n    def model(x):\n        return x\n",
}


@pytest.mark.parametrize("name", KINDS)
def test_the_new_text_of_an_edited_file_never_gets_the_old_codes_namespace(name, load, tmp_path, log):
    path, text = tmp_path / "model.py", KINDS[name]
    written(path, text)
    old = load(path).model
    unedited = namespace(old)
    assert warnings_in(log) == []
    edited = text.replace("2", "3")
    written(path, edited)
    stale = torchcache(old)
    assert torch.equal(stale(X), X * 2)
    assert torch.equal(stale(X), X * 2) and stale.cache_instance.stats().hits == 2
    assert warnings_in(log) == []
    new = load(path).model
    assert torch.equal(new(X), X * 3)
    assert len({unedited, stale.cache_instance.module_hash, namespace(new)}) == 3


EDITS = [
    ("return x * 1", "return x * 1.0"),
    ("return x * 1", "return x * True"),
    ("return x * 0.0", "return x * -0.0"),
    ("return x.sin()", "return x.cos()"),
    ("return x in (1, 2)", "return x in (1, 2.0)"),
    ("return 'a' in {'a', 'b'}", "return 'a' in {'a', 'c'}"),
    ("return f(y=1)", "return f(z=1)"),
    ("y = x; return y", "x = x; return x"),
    ("return x * 2", "return x * 9\n\ndef model(x):\n    return x * 2"),  # it has moved
    ("return x  # one", "return x  # another"),
]


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_small_edits_are_seen_and_comments_are_none(old, new, load, tmp_path):
    path, texts = tmp_path / "model.py", [f"def model(x):\n    {body}\n" for body in (old, new)]
    written(path, texts[0])
    function = load(path).model
    assert function_source(function, CompiledTexts()) == texts[0]
    written(path, texts[1])
    assert function_source(function, CompiledTexts()) == (texts[1] if "another" in new else None)


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_code_without_a_text_differs_where_it_computes_something_else(old, new, load, tmp_path):
    path, found = tmp_path / "model.py", []
    for number, body in enumerate((old, new)):
        text = "\n" * number + f"def model(x):\n    def inner(x): {body.splitlines()[0]}\n    {body}\n"
        written(path, text)
        found.append(compiled(load(path).model.__code__))
    assert (found[0] == found[1]) == ("another" in new)


READABLE = {
    "docstring and text over lines": 'class A:\n    def model(x):\n        """One.\n\n   Two."""\n'
    '        y = """\n  text\n"""\n        return x\nmodel = A.model\n',
    "private names": "class A:\n    def model(x):\n        __y = x\n        return __y\nmodel = A.model\n",
    "super": "class B:\n    def f(self, x): return x\nclass A(B):\n    def f(self, x):\n"
    "        return super().f(x)\ndef model(x):\n    return A().f(x)\n",
    "future": "from __future__ import annotations\ndef model(x: nothing) -> nothing:\n    y: no = x\n    return y\n",
    "asserts": "def model(x):\n    assert len(x), 'none'\n    return x\n",
    "debug": "def model(x):\n    if __debug__:\n        return x\n    return x * 2\n",
    "sets": "def model(x):\n    return x if 'a' in {'a', 'b', 'c', 'd', 'e'} else 0\n",
    "wrong escape": "def model(x):\n    '\\d'\n    return x\n",
    "comparison with a number": "def model(x):\n    return x if 5 is 5 else x\n",
    "await": "async def g(): pass\ndef model(x):\n    return x\n",
    "generator": "def model(x):\n    return sum((x for _ in range(2)), start=0)\n",
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass A:\n    n: int = 2\ndef model(x):\n    return x * A().n\n",
    "enum": "import enum\nclass A(enum.Enum):\n    N = 2\ndef model(x):\n    return x * A.N.value\n",
    "named tuple": "from typing import NamedTuple\nclass A(NamedTuple):\n    n: int = 2\ndef model(x):\n    return x * A().n\n",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", READABLE)
def test_what_is_as_it_was_imported_is_readable(name, load, tmp_path, log):
    written(tmp_path / "model.py", READABLE[name])
    namespace(load(tmp_path / "model.py").model)
    assert warnings_in(log) == []


MADE = {
    "dataclass": "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: int = 1\n",
    "named tuple": "import typing\nclass C(typing.NamedTuple):\n    a: int = 1\n",
    "class": "class C:\n    a = 1\n",
}


@pytest.mark.parametrize("scope", [{}, {"__name__": "__main__"}])
@pytest.mark.parametrize("kind", MADE)
def test_a_method_of_a_class_that_exec_has_made_counts(kind, scope, log):
    def model(factor):
        own = dict(scope)
        exec(f"{MADE[kind]}    def scale(self, x):\n        return x * self.a * {factor}\n", own)
        made = own["C"]
        return torchcache(lambda x: made().scale(x))

    two, again, three = (model(factor) for factor in (2, 2, 3))
    assert torch.equal(two(X), X * 2) and torch.equal(three(X), X * 3)
    assert namespace(two) == namespace(again) != namespace(three)
    assert warnings_in(log) == []


# Cells of a notebook.


def cell(text, name="<cell 1>", flags=0):
    scope = vars(sys.modules["__main__"])
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    running = eval(compile(text, name, "exec", flags=flags, dont_inherit=True), scope)
    if running is not None:
        with pytest.raises(StopIteration):
            running.send(None)
    return scope["model"]


@pytest.fixture
def _cells(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    yield
    for name in [name for name in linecache.cache if name.startswith("<cell")]:
        del linecache.cache[name]


@pytest.mark.usefixtures("_cells")
def test_a_cell_whose_text_is_replaced(log):
    first = cell("def model(x):\n    return x * 2\n")
    before = namespace(first)
    assert warnings_in(log) == []
    second = cell("def model(x):\n    return x * 3\n")
    after = namespace(second)
    assert warnings_in(log) == []
    stale = namespace(first)
    assert len({before, after, stale}) == 3
    assert warnings_in(log) == []


@pytest.mark.usefixtures("_cells")
def test_cells_with_the_features_of_earlier_cells_and_with_await_are_readable(log):
    flags = __future__.annotations.compiler_flag | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    text = "def model(x: nothing):\n    def f(y: nothing): return y\n    return f(x)\nasync def g(): pass\n"
    namespace(cell(text, "<cell 2>", flags))
    namespace(cell(text + "if 0:\n    await g()\n", "<cell 3>", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | flags))
    assert warnings_in(log) == []


# Modules that count by their file.


@pytest.mark.parametrize("which", ["helper", "deeper"])
@pytest.mark.parametrize(
    "text",
    [
        "import helper\ndef model(x):\n    h = helper\n    return h.g(x)\n",
        "def model(x):\n    import helper\n    return helper.g(x)\n",
    ],
    ids=["as a whole", "import within"],
)
def test_a_module_whose_file_was_edited_after_it_was_imported(which, text, load, tmp_path, log):
    texts = {
        "deeper": "def f(x):\n    return x * 2\n",
        "helper": "import deeper\ndef g(x):\n    return deeper.f(x) * 2\n",
    }
    found = []
    for edit in (False, True):
        for name, content in texts.items():
            written(tmp_path / f"{name}.py", content)
            load(tmp_path / f"{name}.py")
        written(tmp_path / "model.py", text)
        if edit:
            written(tmp_path / f"{which}.py", texts[which].replace("2", "3"))
        found.append(namespace(load(tmp_path / "model.py").model))
    for name in texts:
        load(tmp_path / f"{name}.py")
    found.append(namespace(load(tmp_path / "model.py").model))
    assert len(set(found)) == 3
    assert warnings_in(log) == []


def test_an_edit_that_leaves_size_and_time_of_the_file_alone(load, tmp_path):
    """Until it is loaded again, the code counts that runs."""
    path, found = tmp_path / "helper.py", []
    written(tmp_path / "model.py", "def model(x):\n    import helper\n    return helper.g(x)\n")
    written(path, "def g(x):\n    return x * 2\n")
    load(path)
    found.append(namespace(load(tmp_path / "model.py").model))
    before = path.stat()
    path.write_text("def g(x):\n    return x * 3\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found.append(namespace(load(tmp_path / "model.py").model))
    load(path)
    found.append(namespace(load(tmp_path / "model.py").model))
    assert found[0] == found[1] != found[2]


def test_a_module_whose_file_is_gone_counts_by_its_instructions(load, tmp_path, log):
    written(tmp_path / "model.py", "import helper\ndef model(x):\n    h = helper\n    return h.g(x)\n")
    found = []
    for factor in "232":
        written(tmp_path / "helper.py", f"def g(x):\n    return x * {factor}\n")
        load(tmp_path / "helper.py")
        (tmp_path / "helper.py").unlink()
        found.append(namespace(load(tmp_path / "model.py").model))
    assert found[0] == found[2] != found[1]
    assert warnings_in(log) == []
