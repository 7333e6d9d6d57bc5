import ast
import importlib
import re
import subprocess
import sys
import threading
import types
import weakref
from collections.abc import MutableMapping, MutableSequence, MutableSet
from pathlib import Path

import pytest

import torchcache2

NAME = "torchcache2"
FOLDER = Path(torchcache2.__file__).parent

# From the top down: a file imports from files below it only.
LAYERS = [
    "__main__",
    "cli",
    "commands",
    "output",
    "archive",
    "removal",
    "report",
    "verdict",
    "module",
    "instance",
    "binding",
    "forward",
    "shortcuts",
    "explain",
    "cache",
    "bypass",
    "computation",
    "probing",
    "undo",
    "collectives",
    "probes",
    "structure",
    "probe",
    "batch",
    "verify",
    "stats",
    "tiers.stack",
    "tiers.memory",
    "tiers.table",
    "tiers.arena",
    "scratch",
    "tiers.disk",
    "tiers.sealing",
    "tiers.known",
    "tiers.health",
    "tiers.writer",
    "tiers.fetch",
    "tiers.located",
    "tiers.places",
    "tiers.pending",
    "tiers.base",
    "index",
    "eviction",
    "namespace",
    "watch",
    "tensorwatch",
    "purity",
    "randomness",
    "fingerprint",
    "objectwalk",
    "annotations",
    "programs",
    "ownerwalk",
    "leftout",
    "codewalk",
    "namewalk",
    "lateimports",
    "operators",
    "installed",
    "assigned",
    "imports",
    "sources",
    "names",
    "compiled",
    "arguments",
    "argumentwalk",
    "entries",
    "modes",
    "directory",
    "filenames",
    "segmentread",
    "segmentparse",
    "segmentwrite",
    "segment",
    "storage",
    "descriptors",
    "schemajson",
    "leafjson",
    "classnames",
    "jsonparts",
    "keys",
    "rows",
    "gather",
    "transfer",
    "describe",
    "containers",
    "digest",
    "settings",
    "codec",
    "tracing",
    "locks",
    "logs",
    "errors",
    "version",
]


def sources(folder=FOLDER):
    """Text of every file, by dotted name below the package; a package's own file is "" or ends in a dot."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1]) + "." if parts[-1] == "__init__" else ".".join(parts)
        found[name.removeprefix(".")] = path.read_text(encoding="utf-8")
    return found


def imports(name, text, files):
    """Names of the files of the package that a file imports, wherever in it that is."""
    package = [NAME, *name.split(".")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *filter(None, [node.module])])
            inner = base.removeprefix(f"{NAME}.") + "." if base != NAME else ""
            wanted = [f"{base}.{a.name}" if inner + a.name in files else base for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            wanted = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        else:
            continue
        for target in wanted:
            if target == NAME or str(target).startswith(f"{NAME}."):
                found = target.removeprefix(NAME).removeprefix(".")
                yield found if found in files else f"{found}.".removeprefix(".")


def faults(files, layers):
    """What is wrong with the imports of these files, as texts."""
    rank = {name: depth for depth, name in enumerate(layers)}
    ordinary = {name for name in files if name and not name.endswith(".")}
    for name in sorted(ordinary - set(layers)):
        yield f"{name} is in no layer"
    for name in sorted(set(layers) - ordinary):
        yield f"{name} is a layer and no file"
    for name, text in files.items():
        for target in imports(name, text, files) if name else ():
            if rank.get(target, -1) <= rank.get(name, len(layers)):
                yield f"{name} imports {target or NAME}"


def test_imports_go_downwards_only_and_every_file_has_its_layer():
    assert list(faults(sources(), LAYERS)) == []


def test_every_file_is_imported_somewhere():
    files = sources()
    assert {target for name, text in files.items() for target in imports(name, text, files)} == set(
        LAYERS
    ) - {"__main__"}


FILES = {
    "": "from torchcache2.top import thing",
    "tiers.": '"""Tiers."""',
    "top": "import os\nfrom torchcache2.tiers.one import thing",
    "tiers.one": "from torchcache2 import low",
    "low": "import torchcache2_other, torch",
}
ORDER = ["top", "tiers.one", "low"]


def test_the_check_passes_what_is_right():
    assert list(faults(FILES, ORDER)) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("low", "from torchcache2.top import thing", "low imports top"),
        ("low", "import torchcache2.tiers.one", "low imports tiers.one"),
        ("low", "import torch, torchcache2.top as other", "low imports top"),
        ("low", "from torchcache2 import top", "low imports top"),
        ("low", "from torchcache2.tiers import one", "low imports tiers.one"),
        ("low", "from . import top", "low imports top"),
        ("low", "from .top import thing", "low imports top"),
        ("low", "from .tiers import one", "low imports tiers.one"),
        ("tiers.one", "from .. import top", "tiers.one imports top"),
        ("tiers.one", "from ..top import thing", "tiers.one imports top"),
        ("low", "def f():\n    from torchcache2.top import thing", "low imports top"),
        ("low", "if TYPE_CHECKING:\n    from torchcache2.top import thing", "low imports top"),
        ("low", "importlib.import_module('torchcache2.top')", "low imports top"),
        ("low", "from torchcache2 import Cache", "low imports torchcache2"),
        ("low", "import torchcache2", "low imports torchcache2"),
        ("low", "from torchcache2.low import thing", "low imports low"),
        ("top", "from torchcache2.tiers import thing", "top imports tiers."),
        ("tiers.", "from torchcache2.low import thing", "tiers. imports low"),
        ("top", "from torchcache2.gone import thing", "top imports gone."),
    ],
)
def test_the_check_finds_a_planted_import(name, text, fault):
    assert list(faults(FILES | {name: text}, ORDER)) == [fault]


def test_the_check_finds_a_planted_cycle():
    cycle = {"low": "from torchcache2.tiers import one", "tiers.one": "from torchcache2 import low"}
    assert list(faults(FILES | cycle, ORDER)) == ["low imports tiers.one"]
    # No order of the layers makes a cycle right.
    assert list(faults(FILES | cycle, ["top", "low", "tiers.one"])) == ["tiers.one imports low"]


def test_the_check_finds_a_file_without_a_layer_and_a_layer_without_a_file():
    assert list(faults(FILES | {"new": ""}, ORDER)) == ["new is in no layer"]
    assert list(faults(FILES, [*ORDER, "old"])) == ["old is a layer and no file"]


def test_the_check_finds_a_planted_file(tmp_path):
    (tmp_path / "tiers").mkdir()
    for name in ("__init__", "low", "tiers/__init__", "tiers/disk"):
        (tmp_path / f"{name}.py").write_text("from torchcache2.tiers.disk import thing")
    files = sources(tmp_path)
    assert sorted(files) == ["", "low", "tiers.", "tiers.disk"]
    assert "low imports tiers.disk" in list(faults(files, ["tiers.disk", "low"]))


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


@pytest.mark.parametrize("name", LAYERS)
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
    submodules = {layer.split(".")[0] for layer in LAYERS}
    assert public - submodules == set(module.__all__) - {"__version__"}
    assert all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'torch'"):
        _ = module.torch


def test_importing_the_package_imports_no_torch():
    script = "import sys, torchcache2; print('torch' in sys.modules, torchcache2.OptionError.__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False OptionError\n", done.stderr
