"""Private names of other libraries are in one file, and the package works without each of them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchcache2

FOLDER = Path(torchcache2.__file__).parent
PRIVATE = FOLDER / "core" / "private.py"
_NAME = re.compile(r"_[a-zA-Z]\w*")
_READ = ("getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller")
# Named in the documentation of Python, and of fsspec for those who call or write a file system.
DOCUMENTED = {"_asdict", "_exit", "_fields", "_getframe", "_replace"} | {
    *("_cat_file", "_get_file", "_info", "_ls", "_pipe_file", "_put_file", "_rm_file"),
    *("_get_kwargs_from_urls", "_strip_protocol"),
}


def is_private(name):
    return any(map(_NAME.fullmatch, name.split(".")))


def own_names(trees):
    """The private names that the package itself gives to attributes, functions and classes."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def foreign(tree, own):
    """Where a file names what is private to another library, as texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torchcache2"):
            names = [f"{node.module}.{alias.name}" for alias in node.names] if not node.level else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _READ:
            names = [one.value for one in node.args if isinstance(one, ast.Constant)]
        else:
            continue
        for name in names:
            if is_private(str(name)) and not {*filter(_NAME.fullmatch, name.split("."))} <= own:
                yield ast.unparse(node)


def test_private_names_of_other_libraries_are_in_one_file():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.rglob("*.py")}
    own = {*own_names(trees.values()), *DOCUMENTED}
    found = {str(path): list(foreign(tree, own)) for path, tree in trees.items() if path != PRIVATE}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\nx = torch._C", ["torch._C"]),
        ("x = torch.fx._symbolic_trace.flag", ["torch.fx._symbolic_trace"]),
        ("from torch.utils import _pytree as pytree", ["from torch.utils import _pytree as pytree"]),
        ("from torch._ops import OpOverload", ["from torch._ops import OpOverload"]),
        ("def f():\n    import torch._dynamo.exc", ["import torch._dynamo.exc"]),
        ("x = module._buffers", ["module._buffers"]),
        ("x = getattr(tensor, '_version', 0)", ["getattr(tensor, '_version', 0)"]),
        ("f = operator.attrgetter('options._timeout')", ["operator.attrgetter('options._timeout')"]),
        ("threading._register_atexit(f)", ["threading._register_atexit"]),
        ("from torchcache2.core import _x\nx = self._mine.__dict__", []),
        ("from ._x import y\nclass A:\n    _mine = 1\nx = other._mine + row._asdict()", []),
    ],
)
def test_the_check_finds_a_planted_name(text, found):
    tree = ast.parse(text)
    assert list(foreign(tree, {*own_names([tree]), *DOCUMENTED, "_mine"})) == found


def names_of(text):
    """The private names in the file that has them all: its texts that are nothing but such a name."""
    texts = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)}
    return sorted(
        one for one in texts if isinstance(one, str) and re.fullmatch(r"[\w.]+", one) and is_private(one)
    )


# The names of the file are changed before it is run: it looks them up in vain, and torch still has them.
SCRIPT = """
import importlib.util, json, os, sys, traceback
import numpy, torch, torch.distributed, torch.multiprocessing, xxhash, brotli, safetensors, filelock
import torch._library.custom_ops, torch.fx, torch.nn.utils.parametrize
path, cases = sys.argv[1], json.loads(sys.argv[2])
source = open(path).read()

def check(gone):
    text = source
    for name in gone:
        text = text.replace(json.dumps(name), json.dumps(name + "_gone"))
    assert text != source or not gone
    spec = importlib.util.spec_from_file_location("torchcache2.core.private", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    if "torch.utils._pytree" in gone:  # there has to be one: it is where a public one would be
        sys.modules["torch.utils.pytree"] = torch.utils.pytree = torch.utils._pytree
    exec(compile(text, path, "exec"), vars(module))
    layers = {name: one for name, one in vars(torch.nn).items() if not name.startswith("Lazy")}
    assert all(issubclass(one, module.DROPOUTS) for name, one in layers.items() if "Dropout" in name)
    assert all(issubclass(one, module.BATCH_NORMS) for name, one in layers.items() if "BatchNorm" in name)
    work()

def made():
    from torch import nn

    @torch.library.custom_op("planted::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm, self.drop = nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x):
            return self.drop(self.norm(self.linear(x))) + double(self.shift)

    return Net

def work():
    from torchcache2 import torchcache

    for cached in (torchcache(made())(), torchcache(made()())):
        plain = made()().eval().requires_grad_(False)
        cached.load_state_dict(plain.state_dict())
        cached.eval().requires_grad_(False)
        x = torch.rand(6, 8)
        for hits in (0, 6):
            assert torch.equal(cached(x), plain(x))
            assert cached.cache_instance.stats().hits == hits, cached.cache_instance.stats()
        with torch.no_grad():  # edits are still noticed, be they of parameters, buffers or hooks
            cached.linear.weight.add_(1)
            assert not torch.equal(cached(x), plain(x))
            plain.load_state_dict(cached.state_dict())
            assert torch.equal(cached(x), plain(x))
        cached.linear.register_forward_hook(lambda module, args, output: output + 1)
        assert torch.equal(cached(x), plain.norm(plain.linear(x) + 1) + 2)
        cached.train()
        assert not torch.equal(cached(x), cached(x))

made()()(torch.rand(2, 8))  # which imports a thousand modules of torch, once for all
for gone in cases:
    pid = os.fork()
    if pid == 0:
        try:
            check(gone)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1]:
        print(*gone, flush=True)
"""


def without(cases):
    """Those of the cases, each a list of names, without which the package does not work; and why."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(PRIVATE), json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=True)
    return done.stdout.split("\n")[:-1], done.stderr


NAMES = names_of(PRIVATE.read_text(encoding="utf-8"))
GROUPS = 6  # one process after another, each without some names; those of one chain are in different ones


@pytest.mark.slow
def test_the_package_works_without_the_private_names():
    assert len(NAMES) > 30
    failed, why = without([[], *[NAMES[start::GROUPS] for start in range(GROUPS)]])
    assert failed == [], why


@pytest.mark.soak  # takes a minute; groups of them are tested each time
def test_the_package_works_without_any_one_of_the_private_names():
    failed, why = without([[name] for name in NAMES])
    assert failed == [], why
