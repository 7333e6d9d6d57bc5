import ast
import functools
import importlib
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import MutableMapping, MutableSequence, MutableSet
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import torchcache2

NAME = "torchcache2"
FOLDER = Path(torchcache2.__file__).parent

# From the top down: a file imports from its own room, without a cycle, and from rooms below it. Rooms in
# parentheses are side by side, and know nothing of each other.
ROOMS = ["__main__", "cli", "datasets", "decorator", "engine", "tiers", ("files", "identity"), "core"]


def sources(folder=FOLDER):
    """Text of every file, by dotted name below the package; a package's own file is "" or ends in a dot."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1]) + "." if parts[-1] == "__init__" else ".".join(parts)
        found[name.removeprefix(".")] = path.read_text(encoding="utf-8")
    return found


@functools.cache
def importing(text):
    """What imports something in a file, wherever in it that is."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")))
    ]


def imports(name, text, files):
    """Names of the files of the package that a file imports, wherever in it that is."""
    package = [NAME, *name.split(".")[:-1]]
    for node in importing(text):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            inner = base.removeprefix(f"{NAME}.") + "." if base != NAME else ""
            wanted = [f"{base}.{a.name}" if inner + a.name in files else base for a in node.names]
        else:
            wanted = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        for target in wanted:
            if target == NAME or str(target).startswith(f"{NAME}."):
                found = target.removeprefix(NAME).removeprefix(".")
                yield found if found in files else f"{found}.".removeprefix(".")


def faults(files, rooms):
    """What is wrong with the imports of these files, as texts."""
    depth = {
        room: level
        for level, group in enumerate(rooms)
        for room in ([group] if isinstance(group, str) else group)
    }
    ordinary = sorted(name for name in files if name and not name.endswith("."))
    graph = {}
    for name in ordinary:
        if room_of(name) not in depth:
            yield f"{name} is in no room"
    for room in sorted(set(depth) - set(map(room_of, ordinary))):
        yield f"{room} is a room without files"
    for name in sorted(filter(None, files)):
        wanted = set(imports(name, files[name], files))
        graph[name] = {target for target in wanted if room_of(target) == room_of(name)}
        here = depth.get(room_of(name), len(rooms))
        for target in sorted(wanted):
            there = depth.get(room_of(target), -1)
            is_own = room_of(target) == room_of(name)
            if target not in ordinary or name not in ordinary or not (there > here or is_own):
                yield f"{name} imports {target or NAME}"
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"a cycle: {' -> '.join(error.args[1])}"


def room_of(name):
    return name.partition(".")[0]


def test_imports_go_downwards_only_and_every_file_has_its_room():
    assert list(faults(sources(), ROOMS)) == []


def test_only_the_package_itself_imports_datasets():
    files = sources()
    for name, text in files.items():
        wanted = {room_of(target) for target in imports(name, text, files)}
        assert "datasets" not in wanted or room_of(name) in ("", "datasets"), name


def test_every_file_is_imported_somewhere():
    files = sources()
    imported = {target for name, text in files.items() for target in imports(name, text, files)}
    faces = {"__main__"}
    assert imported == {name for name in files if name and not name.endswith(".")} - faces


def test_torch_may_be_built_without_distributed():
    for name, text in sources().items():
        for node in ast.parse(text).body:
            is_import = isinstance(node, ast.ImportFrom)
            assert not (is_import and f"{node.module}.".startswith("torch.distributed.")), name


FILES = {
    "": "from torchcache2.top.one import thing",
    "low.": '"""Low."""',
    "top.one": "import os\nfrom torchcache2.top.two import thing",
    "top.two": "from torchcache2.low.deep import one",
    "side.one": "",
    "low.deep.one": "from torchcache2.low import two",
    "low.two": "import torchcache2_other, torch",
}
ORDER = ["top", ("side", "low")]


def test_the_check_passes_what_is_right():
    assert list(faults(FILES, ORDER)) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("low.two", "from torchcache2.top.one import thing", "low.two imports top.one"),
        ("low.two", "import torchcache2.top.one", "low.two imports top.one"),
        ("low.two", "import torch, torchcache2.top.one as other", "low.two imports top.one"),
        ("low.two", "from torchcache2.top import one", "low.two imports top.one"),
        ("low.two", "from torchcache2.side import one", "low.two imports side.one"),
        ("low.two", "from ..top import one", "low.two imports top.one"),
        ("low.two", "from ..top.one import thing", "low.two imports top.one"),
        ("low.deep.one", "from ...top import one", "low.deep.one imports top.one"),
        ("low.two", "def f():\n    from torchcache2.top.one import thing", "low.two imports top.one"),
        (
            "low.two",
            "if TYPE_CHECKING:\n    from torchcache2.top.one import thing",
            "low.two imports top.one",
        ),
        ("low.two", "importlib.import_module('torchcache2.top.one')", "low.two imports top.one"),
        ("low.two", "from torchcache2 import Cache", "low.two imports torchcache2"),
        ("low.two", "import torchcache2", "low.two imports torchcache2"),
        ("top.one", "from torchcache2.low import thing", "top.one imports low."),
        ("low.", "from torchcache2.low.two import thing", "low. imports low.two"),
        ("top.one", "from torchcache2.gone import thing", "top.one imports gone."),
        ("low.two", "from torchcache2.low.two import thing", "a cycle: low.two -> low.two"),
        ("top.two", "from torchcache2.top import one", "a cycle: top.one -> top.two -> top.one"),
    ],
)
def test_the_check_finds_a_planted_import(name, text, fault):
    (found,) = faults(FILES | {name: text}, ORDER)
    assert set(found.split()) == set(fault.split())  # a cycle may begin with any of its files


def test_the_check_finds_a_file_without_a_room_and_a_room_without_a_file():
    assert list(faults(FILES | {"new.one": ""}, ORDER)) == ["new.one is in no room"]
    assert list(faults(FILES, [*ORDER, "old"])) == ["old is a room without files"]


def test_the_check_finds_a_planted_file(tmp_path):
    (tmp_path / "tiers").mkdir()
    for name in ("__init__", "low", "tiers/__init__", "tiers/disk"):
        (tmp_path / f"{name}.py").write_text("from torchcache2.tiers.disk import thing")
    files = sources(tmp_path)
    assert sorted(files) == ["", "low", "tiers.", "tiers.disk"]
    assert "low imports tiers.disk" in list(faults(files, ["tiers", "low"]))


# State: a module holds constants, and the logger.

CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*|__\w+__")
MUTABLE = (
    MutableMapping,
    MutableSequence,
    MutableSet,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.local,
    weakref.WeakKeyDictionary,
    weakref.WeakSet,
)
MUTATORS = [
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"),
    *("remove", "setdefault", "sort", "update"),
]


def variables(module):
    """Names of what a module holds that can change and is not called a constant."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, MUTABLE)
        and not CONSTANT.fullmatch(name)
        and not name.startswith("__builtins_dict__")  # where torch.compile has traced a module
    ]


def writes(text):
    """Where functions change what belongs to their module, and what they remember between calls."""
    tree = ast.parse(text)
    inside = [node for function in ast.walk(tree) if is_function(function) for node in ast.walk(function)]
    for node in inside:
        if isinstance(node, ast.Global):
            yield f"global {', '.join(node.names)}"
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if is_constant(node.value):
                yield ast.unparse(node)
        elif is_mutation(node):
            yield ast.unparse(node)
    for function in filter(is_function, ast.walk(tree)):
        for decorator in map(ast.unparse, getattr(function, "decorator_list", [])):
            if re.match(r"(functools\.)?(lru_)?cache\b", decorator):
                yield f"@{decorator}"


def is_mutation(node):
    if isinstance(node, ast.AugAssign):
        return is_constant(node.target)
    called = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in MUTATORS and is_constant(called.value)


def is_function(node):
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def is_constant(node):
    return isinstance(node, ast.Name) and CONSTANT.fullmatch(node.id) is not None


@pytest.mark.parametrize("name", sorted(name for name in sources() if name and not name.endswith(".")))
def test_a_module_has_no_state_but_the_logger(name):
    module = importlib.import_module(f"{NAME}.{name}")
    assert variables(module) == []
    assert list(writes(Path(module.__file__).read_text(encoding="utf-8"))) == []


def test_the_check_finds_planted_state():
    module = types.ModuleType("planted")
    module.seen, module._lock, module.last = {}, threading.Lock(), []
    module._TABLE, module.NAMES, module.size, module.function = {}, [], 5, len
    assert variables(module) == ["seen", "_lock", "last"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f():\n    global n\n    n = 1", ["global n"]),
        ("def f():\n    _TABLE['key'] = 1", ["_TABLE['key']"]),
        ("class A:\n    def f(self):\n        del _TABLE['key']", ["_TABLE['key']"]),
        ("def f():\n    NAMES.append(1)", ["NAMES.append(1)"]),
        ("f = lambda x: SEEN.add(x)", ["SEEN.add(x)"]),
        ("def f():\n    SEEN.size = 1", ["SEEN.size"]),
        ("def f(more):\n    global SEEN\n    SEEN |= more", ["global SEEN", "SEEN |= more"]),
        ("@functools.lru_cache(5)\ndef f(): pass", ["@functools.lru_cache(5)"]),
        ("@cache\ndef f(): pass", ["@cache"]),
        ("_TABLE = {}\n_TABLE['key'] = 1\n_TABLE.update(a=1)", []),
        ("def f(self):\n    table = {}\n    table['key'] = _TABLE['key']\n    self.names.append(1)", []),
    ],
)
def test_the_check_finds_planted_writes(text, found):
    assert list(writes(text)) == found


def test_the_public_names_are_all_there_and_nothing_else_is():
    module = importlib.import_module(NAME)
    public = {name for name in dir(module) if not name.startswith("_")}
    submodules = {room_of(name) for name in sources()}
    assert public - submodules == set(module.__all__) - {"__version__"}
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'torch'"):
        _ = module.torch


def test_importing_the_package_imports_no_torch():
    script = "import sys, torchcache2; print('torch' in sys.modules, torchcache2.OptionError.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False OptionError\n", done.stderr


TESTS = Path(__file__).parents[1]


def imported_tests(text):
    """Test files that a file imports: what two of them use belongs to `tests/helpers`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if re.search(r"(^|\.)test_\w+", name) and "tests" in name)


def test_no_test_file_imports_another():
    found = {path.name: list(imported_tests(path.read_text())) for path in TESTS.rglob("*.py")}
    assert len(found) > 100 and {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from tests.core.test_logs import log", ["tests.core.test_logs.log"]),
        ("def f():\n    import tests.core.test_logs", ["tests.core.test_logs"]),
        ("from tests.core import test_logs", ["tests.core.test_logs"]),
        ("from tests.helpers.storage import keys_of", []),
        ("from torch.testing import assert_close", []),
    ],
)
def test_the_check_finds_a_planted_import_of_a_test(text, found):
    assert list(imported_tests(text)) == found
