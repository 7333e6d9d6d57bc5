"""What code only writes does not count, and of a configuration only what is read; all else counts."""

import argparse
import collections
import copy
import dataclasses
import os
import random
import sys
import threading
import types

import pytest
import torch
from torch import nn

from torchcache2 import torchcache

SOAK = bool(os.environ.get("SOAK"))
X = torch.arange(1.0, 9.0).view(4, 2)


pytestmark = pytest.mark.usefixtures("without_grad")


def stats(module):
    return module.cache_instance.stats()


# Random code: whatever it reads, in whatever way, an edit of that is noticed.

READS = [  # expressions of a number; A is an attribute or variable, S a module, N an object with fields
    "{s}.{a}",
    "getattr({s}, '{a}')",
    "getattr({s}, '{a}', 0.0)",
    "sum([{s}.{a} for _ in range(2)])",
    "(lambda: {s}.{a})()",
    "(lambda self: self.{a})({s})",
    "taken_{a}({s})",
    "sum(map(operator.attrgetter('{a}'), [{s}]))",
    "vars({s})['{a}']",
    "{s}.{n}.{f}",
    "getattr({s}.{n}, '{f}')",
    "field_{f}({s}.{n})",
    "vars({s}.{n})['{f}']",
    "next(one.{f} for one in [{s}.{n}])",
    "{g}.{f}",
    "getattr({g}, '{f}')",
    "field_{f}({g})",
    "sum(vars({g}).values())",
    "len({s}.{c})",
    "sum({s}.{c})",
    "float(bool({s}.{c}))",
    "len({l})",
    "(lambda held: len(held))({l})",
    "{v}",
]
WRITES = [
    "{s}.{a} += 1.0",
    "{s}.{a} = 3.0",
    "{s}.{a} = {s}.{a} + 1.0",
    "{s}.{c}.append(1.0)",
    "{s}.{c} += [1.0]",
    "{s}.{c}.extend([{s}.{a}, 1.0])",
    "{l}.append(1.0)",
    "{l}.insert(0, {l}[-1] if {l} else 1.0)",
    "{d}['k'] += 1",
    "{s}.{d2}['k'] += 1",
    "{s}.{d2}[len({s}.{c})] = 1",
    "{v} += 1.0",
    "{s}.{n}.{f} += 1.0",
    "{s}.{a} = 1.0; x = x * {s}.{a}",
    "setattr({s}, '{a}', 4.0)",
]
BLOCKS = [
    "{one}",
    "if x.dim() == 2:\n    {one}",
    "for _ in range(2):\n    {one}",
    "with torch.no_grad():\n    {one}",
    "try:\n    {one}\nfinally:\n    pass",
    "try:\n    raise KeyError\nexcept KeyError:\n    {one}",
    "def inner(x):\n    {outer}\n    {one}\n    return x\nx = inner(x)",
]
HEAD = """
import collections, operator, types
import torch
from torch import nn
G, H = types.SimpleNamespace(f=2.0, g=3.0), types.SimpleNamespace(f=5.0, g=7.0)
L, M, D, V, W = [], [], collections.Counter(), 1.0, 1.0
class Box:
    def __init__(self):
        self.f, self.g = 2.0, 3.0
def taken_a(one): return one.a
def taken_b(one): return one.b
def field_f(one): return one.f
def field_g(one): return one.g
class Base(nn.Module):
    def __init__(self, child=None):
        super().__init__()
        self.child = child
        self.a, self.b, self.c, self.d = 1.0, 2.0, [1.0], [2.0]
        self.m, self.n, self.count = Box(), types.SimpleNamespace(f=2.0, g=3.0), collections.Counter()
    def unused(self):
        return self.a, self.b, self.c, self.d, self.m, self.n, L, M, V, W
"""


def written(rng, name, has_child):
    """The source of a module with a random forward."""
    places = ["self", "self.child"] if has_child else ["self"]

    def filled(text):
        return text.format(
            s=rng.choice(places), a=rng.choice("ab"), c=rng.choice("cd"), n=rng.choice("mn"),
            f=rng.choice("fg"), g=rng.choice("GH"), l=rng.choice("LM"), d="D", d2="count", v=rng.choice("VW"),
        )  # fmt: skip

    def block(text, one, outer="pass"):
        lines = text.replace("{outer}", outer).split("\n")
        found = []
        for line in lines:
            indent = line[: len(line) - len(line.lstrip())]
            found += [indent + part for part in one.split("\n")] if "{one}" in line else [line]
        return "\n".join(found)

    body = ["global V, W"]
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        one = filled(rng.choice(WRITES)) if kind < 0.55 else f"x = x * (2.0 + {filled(rng.choice(READS))})"
        for _ in range(rng.randint(0, 2)):
            one = block(rng.choice(BLOCKS), one, "global V, W")
        body += one.split("\n")
    if has_child:
        body.insert(rng.randint(1, len(body)), "x = self.child(x)") if not any(
            line.startswith((" ", "def", "try", "if", "for", "with")) for line in body
        ) else body.append("x = self.child(x)")
    lines = "\n        ".join([*body, "return x"])
    return f"class {name}(Base):\n    def forward(self, x):\n        {lines}\n"


EDITS = [
    "m.{a} = {x}",
    "m.{c}.append({x})",
    "m.{c} = [{x}]",
    "m.{n}.{f} = {x}",
    "m.{n} = types.SimpleNamespace(f={x}, g={x})",
    "del m.{c}[:]",
    "mod.{g}.{f} = {x}",
    "mod.{l}.append({x})",
    "mod.{v} = {x}",
    "m.count['k'] = {x}",
]


def check(load, text, edit=lambda module, twin: None, *, probe=False):
    """A cached `Net` gives what a plain one gives, before edits, between them, and afterwards."""
    twins = [load("twin_of_test", text) for _ in range(2)]
    plain, below = (twin.Net().eval() for twin in twins)
    cached = torchcache(below, probe=probe)
    for _ in range(2):
        for x in (torch.cat([X[:2], X[:2]]), X, X, X + 1, X):
            assert torch.equal(cached(x), plain(x))
        for module, twin in zip((plain, below), twins, strict=True):
            edit(module, twin)
    assert torch.equal(cached(X), plain(X))


def check_random_code(load, seed):
    rng = random.Random(seed)
    text = HEAD + written(rng, "Child", False) + written(rng, "Parent", True)
    twins = [load(f"random_{seed}", text) for _ in range(2)]
    plain, below = (twin.Parent(twin.Child()) for twin in twins)
    cached = torchcache(below, probe=False) if rng.random() < 0.5 else torchcache(below)
    for turn in range(8):
        expected = plain(X)
        found = cached(X)
        assert torch.equal(found, expected), f"{text}\nseed {seed}, turn {turn}"
        if turn % 2:
            edit = rng.choice(EDITS).format(
                a=rng.choice("ab"), c=rng.choice("cd"), n=rng.choice("mn"), f=rng.choice("fg"),
                g=rng.choice("GH"), l=rng.choice("LM"), v=rng.choice("VW"), x=float(rng.randint(1, 9)),
            )  # fmt: skip
            whose = rng.choice(["parent", "child"])
            for module, twin in ((plain, twins[0]), (below, twins[1])):
                scope = {"m": module if whose == "parent" else module.child, "mod": twin, "types": types}
                exec(edit, scope)
    return stats(cached)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("part", range(4))
def test_whatever_random_code_reads_is_noticed(part, load):
    hits = bypassed = 0
    for seed in range(part, 100 if SOAK else 60, 4):
        found = check_random_code(load, seed)
        hits += found.hits
        bypassed += sum(found.bypasses.values())
    assert hits > 10 and bypassed > 10, "both what counts and what does not is tested"


# What is only written: the first thing that people try.

WRITER = """
import collections
SEEN, COUNTS, TOTAL = [], collections.Counter(), 0
def make():
    {held}
    def model(x):
        {write}
        return x * 2
    return model, lambda: {noted}
"""
WRITTEN = {  # what a closure holds, what the function writes, and what is noted by that
    "list": ("seen = []", "seen.append(len(x))", "seen"),
    "number": ("count = 0", "nonlocal count; count += 1", "count"),
    "dict": ("counter = {'n': 0}", "counter['n'] += 1", "counter"),
    "global list": ("", "SEEN.append(1)", "SEEN"),
    "global counter": ("", "if x.dim() == 2: COUNTS['x'] += 1", "COUNTS"),
    "global number": ("", "global TOTAL; TOTAL += 1", "TOTAL"),
    "module": None,
}


class Noting(nn.Module):
    FACTOR = 2

    def __init__(self):
        super().__init__()
        self.calls, self.kept = 0, None
        self.seen, self.last = [], collections.deque(maxlen=2)
        self.counts, self.by_size = collections.Counter(), collections.defaultdict(int)

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.last.append(1)
        self.kept = x * 3
        with torch.no_grad():
            self.counts["calls"] += 1
        for size in x.shape:
            self.by_size[size] += 1
        return self.scaled(x)

    def scaled(self, x):
        return x * self.FACTOR

    def report(self):
        return self.calls, self.seen, self.last, self.counts, self.by_size


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_only_written_is_no_obstacle(name, monkeypatch, load):
    # Beside other threads, such as a library's own, a probe puts back attributes of modules only.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    if name == "module":
        plain, model = Noting(), torchcache(Noting())
        wanted, noted = plain.report, model.report
    else:
        text = WRITER.format(**dict(zip(("held", "write", "noted"), WRITTEN[name], strict=True)))
        files = [load("writer", text) for _ in range(2)]
        (plain, wanted), (model, noted) = (file.make() for file in files)
        model = torchcache(model)
    for x in (X, X + 1):
        before = copy.deepcopy(noted())
        assert torch.equal(model(x), plain(x))
        assert before != noted()
        assert torch.equal(model(x), x * 2)
    assert (stats(model).hits, stats(model).bypasses) == (8, {})
    assert noted() == wanted(), "a probe leaves no trace"
    if name != "module":
        files[1].SEEN.append(1)
        files[1].COUNTS["x"] += 1
        model(X)
        assert stats(model).hits == 12


# The same if anything reads it, wherever that is.


def within(text, body):
    return text.replace("{body}", body.replace("\n", "\n        "))


READING = """
import operator
from torch import nn
class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.seen, self.counts = 1.0, [], {}
    def forward(self, x):
        self.scale = float(x.sum())
        self.seen.append(1.0)
        self.counts[len(x)] = 1
        return x * 2
def scale_of(module):
    return module.scale
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Child()
        {held}
    @property
    def known(self):
        return self.child.scale
    def match(self, x):
        match self.child:
            case Child(scale=factor):
                return factor
    def forward(self, x):
        return self.child(x * {read})
"""
READ_BY = {  # what the parent holds of the child, and what it reads
    "parent": ("", "self.child.scale"),
    "parent, in a block": ("", "(sum([self.child.scale for _ in range(1)]) if x.dim() else 1)"),
    "helper": ("", "scale_of(self.child)"),
    "getattr": ("", "getattr(self.child, 'scale')"),
    "computed name": ("", "getattr(self.child, 'sc' + 'ale')"),
    "vars": ("", "vars(self.child)['scale']"),
    "dict": ("", "self.child.__dict__['scale']"),
    "match": ("", "self.match(x)"),
    "length": ("", "len(self.child.seen)"),
    "alias": ("self.child.alias = self.child.seen", "len(self.child.alias)"),
    "truth": ("", "(3 if self.child.seen else 2)"),
    "keys": ("", "(3 if len(x) in self.child.counts else 2)"),
    "view": ("self.view = self.child.counts.keys()", "len(self.view)"),
    "bound method": ("self.length = self.child.seen.__len__", "self.length()"),
    "closure": ("seen = self.child.seen; self.function = lambda: len(seen)", "self.function()"),
    "property": ("", "self.known"),
    "operator": ("self.getter = operator.attrgetter('scale')", "self.getter(self.child)"),
}


@pytest.mark.parametrize("how", READ_BY)
def test_what_a_child_writes_and_another_reads_counts(how, load):
    def edit(module, twin):
        if how != "view":  # cannot be read at all
            module.child.scale = 7.0
            module.child.seen *= 2

    held, read = READ_BY[how]
    check(load, READING.replace("{held}", held).replace("{read}", read), edit)


RUNS_HEAD = """
import contextlib
import torch
from torch import nn
class Adder:
    \'\'\'What is added to it changes by how often that was done.\'\'\'
    count = 0
    def __iadd__(self, tensor):
        self.count += 1
        tensor.mul_(self.count)
        return self
class Adders(list):
    def append(self, tensor):
        tensor.mul_(len(self) + 2)
        super().append(1)
class Child(nn.Module):
    scale = 1.0
    def forward(self, x):
        self.scale = float(x.sum())
        return x * 2
def scale_of_child(module):
    module.scale = 1.0
    module = module.child
    return module.scale
def scaled_by(module, x):
    return x * module.calls
class Net(nn.Module):
    name = "scale"
    def __init__(self):
        super().__init__()
        self.child, self.total, self.adder, self.adders = Child(), {}, Adder(), Adders()
        self.calls, self.extra, self.norm = 0, lambda x: x * self.calls, nn.LayerNorm(2)
    def helper(self, x):
        return x * self.calls
    decorated = torch.no_grad()(helper)
    @staticmethod
    def static(module, x):
        return x * module.calls
    def forward(self, x):
        {body}
"""
RUNS = {
    "adding": "x = x * 2\nself.adder += x\nreturn x",
    "appending": "x = x * 2\nself.adders.append(x)\nreturn x",
    "renaming": "return self.child(x * scale_of_child(self))",
    "computing": "return self.child(x * getattr(self.child, self.name))",
    "counting": "self.n = getattr(self, 'n', 0)\nself.n += 1\nreturn self.child(x * self.n)",
    "unsure": "match x.dim():\n    case 3:\n        self.calls = 5\nold = self.calls\n"
    "self.calls = old + 1\nreturn x * old",
    "only declared": "self.calls: int\nself.calls = self.calls + 1\nreturn x * self.calls",
    "torch": "self.norm.eps *= 4\nreturn self.norm(x)",
}
RUNS |= {
    name: f"self.calls += 1\nreturn {read}"
    for name, read in {
        "a function": "scaled_by(self, x)",
        "a decorated method": "self.decorated(x)",
        "nested code": "sum(self.helper(part) for part in (x, x))",
        "a text": "x * getattr(self, 'cal' + 'ls')",
        "a name": "x * vars(self)['calls']",
        "a static method": "self.static(self, x)",
        "a lambda": "self.extra(x)",
    }.items()
}


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_what_runs_code_or_is_read_somewhere_counts(name, probe, load):
    check(load, within(RUNS_HEAD, RUNS[name]), probe=probe)


# Ways to read an attribute of a child that the code itself seems only to write.
INDIRECT = """
import dataclasses, functools, importlib, operator
import torch
from torch import nn
GET, CALL, FORMAT, fetch = operator.attrgetter("n"), operator.methodcaller("scale"), "{0.n}", getattr
@dataclasses.dataclass(eq=False)
class Child(nn.Module):
    n: float = 2.0
    def __post_init__(self):
        super().__init__()
        self.slots, self.keys = [0], {"a": 0}
    def scale(self):
        return self.n
    called = scale
    def put(self):
        self.slots[0] = 1
    def count(self):
        self.keys["a"] += 1
    def forward(self, x):
        if x.dim() == 3:
            self.n = 3.0
        return x
class Shown(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 2.0
    def extra_repr(self):
        return "a" * int(self.n)
    def forward(self, x):
        if x.dim() == 3:
            self.n = 3.0
        return x
class Swallowing:
    def __enter__(self): pass
    def __exit__(self, *error): return True
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.child, self.shown, self.n, self.none = Child(), Shown(), 2.0, ()
        self.get, self.name, self.format = getattr, "n", "{c.n}"
    def forward(self, x):
        return self.shown(self.child(x)) * self.factor(x)
    def factor(self, x):
        {body}
"""
BODIES = {
    "another name of a method": "return self.child.scale()",
    "object that gets": "return GET(self.child)",
    "object that calls": "return CALL(self.child)",
    "other name of getattr": "return fetch(self.child, self.name)",
    "getattr in an attribute": "return self.get(self.child, self.name)",
    "imported under another name": "from operator import attrgetter as g\nreturn g(self.name)(self.child)",
    "method by a computed name": "return operator.methodcaller('sc' + 'ale')(self.child)",
    "global format": "return float(FORMAT.format(self.child))",
    "format in an attribute": "return float(self.format.format(c=self.child))",
    "text of a module": "return len(repr(self.shown))",
    "generated text": "return len(repr(self.child))",
    "dir": "return 2 if any(len(name) == 1 for name in dir(self.shown)) else 3",
    "match as": "self.n = 3.0\nmatch self.child:\n    case Child() as self:\n        pass\nreturn self.n",
    "may not be assigned": "[0 for self.n in self.none]\nreturn self.n",
    "list that may be short": "try:\n    self.child.put()\nexcept IndexError:\n    return 2\nreturn 3",
    "dict that may lack it": "try:\n    self.child.count()\nexcept KeyError:\n    return 2\nreturn 3",
    "swallowed": "with Swallowing():\n    self.child.count()\n    return 2\nreturn 3",
}
FORWARD = "from torch import nn\nN = 2.0\nclass Net(nn.Module):\n    def forward(self, x):\n"
GLOBALS = {
    "or": "x.dim() == 2 or (N := 5.0)",
    "conditional": "y = 0 if x.dim() == 2 else (N := 5.0)",
    "lambda": "y = lambda: (N := 5.0)",
    "comprehension": "y = [(N := 5.0) for _ in range(x.dim() - 2)]",
}


@pytest.mark.parametrize("name", BODIES)
def test_what_is_read_in_another_way_counts(name, load):
    def edit(module, twin):
        module.n = module.child.n = module.shown.n = 13.0
        module.child.slots.clear()
        module.child.keys.clear()
        if name == "dir":
            del module.shown.n

    check(load, within(INDIRECT, BODIES[name]), edit)


@pytest.mark.parametrize("name", GLOBALS)
def test_what_an_expression_may_not_assign_counts(name, load):
    text = f"{FORWARD}        global N\n        {GLOBALS[name]}\n        return x * N\n"
    if name == "comprehension":  # there the name is that of the function
        text = text.replace("[(N", "[0 for N in ()] or [(N")
    check(load, text, lambda module, twin: setattr(twin, "N", twin.N + 1.0))


@pytest.mark.parametrize("how", ["deep(module)", "Reader().read(module)"])
def test_what_other_files_of_a_package_read_counts(how, load, tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "reads_deep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .api import read, Reader\n")
    (package / "api.py").write_text(
        "from .within import deep\ndef read(module):\n    return deep(module)\n"
        "class Reader:\n    def read(self, module):\n        return deep(module)\n"
    )
    (package / "within.py").write_text("def deep(module):\n    return module.n\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    pack = "from reads_deep import Reader, read as deep\n"
    body = f"module = self.child\nreturn {how}"

    def edit(module, twin):
        module.child.n += 5.0

    try:
        check(load, pack + within(INDIRECT, body), edit)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "reads_deep"]:
            del sys.modules[name]


@pytest.mark.parametrize("how", ["module.scale", "getattr(module, 'scale')"])
def test_what_installed_code_reads_counts(how, load, installed):
    installed("uses_reading", f"def read(module):\n    return {how}\n")
    text = READING.replace("{held}", "").replace("{read}", "read(self.child)")
    check(load, "from uses_reading import read\n" + text)


NESTED = {
    "if": "if x.dim() == 2:\n    x = x * self.scale",
    "else": "if x.dim() == 3:\n    pass\nelse:\n    x = x * self.scale",
    "for": "for _ in range(1):\n    x = x * self.scale",
    "while": "while x.dim() == 2 and float(x[0, 0]) == 1:\n    x = x * self.scale",
    "with": "with torch.no_grad():\n    x = x * self.scale",
    "try": "try:\n    x = x * self.scale\nfinally:\n    pass",
    "except": "try:\n    raise KeyError\nexcept KeyError:\n    x = x * self.scale",
    "caught": "try:\n    raise KeyError\nexcept KeyError if self.scale == 2 else ValueError:\n    x = x * 2\n"
    "except KeyError:\n    pass",
    "function": "def inner(x):\n    return x * self.scale\nx = inner(x)",
    "two blocks": "if x.dim():\n    if x.dim() == 2:\n        x = x * self.scale",
    "branch": "if x.dim() == 3:\n    self.scale = 4.0\nx = x * self.scale",
}
SCALED = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 2.0
    def forward(self, x):
        {body}
        self.scale = 3.0
        return x
"""


@pytest.mark.parametrize("name", NESTED)
def test_what_is_read_in_a_nested_block_counts(name, load):
    """The forward assigns it afterwards, as a counter is."""
    check(load, within(SCALED, NESTED[name]), lambda module, twin: setattr(module, "scale", 5.0))


# Of a configuration counts what is read.


@dataclasses.dataclass
class Settings:
    scale: float = 2.0
    lr: float = 0.1

    @property
    def doubled(self):
        return self.scale * 2

    def halved(self):
        return self.scale / 2


class Computed:
    def __init__(self, **fields):
        self.fields = fields

    def __getattr__(self, name):
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


class Logged:
    """What it returns of an attribute is computed."""

    def __init__(self, scale, lr):
        self.scale, self.lr = scale, lr

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        return found * object.__getattribute__(self, "lr") if name == "scale" else found


CONFIGS = {
    "Namespace": lambda: argparse.Namespace(scale=2.0, lr=0.1),
    "SimpleNamespace": lambda: types.SimpleNamespace(scale=2.0, lr=0.1),
    "dataclass": Settings,
    "class": lambda: type("CFG", (), {"scale": 2.0, "lr": 0.1}),
    "object": lambda: Noted(2.0, 0.1),
}


class Noted:
    def __init__(self, scale, lr):
        self.scale, self.lr = scale, lr


ARGS = None


def captured(args):
    return lambda x: x * args.scale


def of_global(args):
    global ARGS
    ARGS = args
    return lambda x: x * ARGS.scale


def by_getattr(args):
    def model(x):
        for _ in range(1):
            x = x * getattr(args, "scale")  # noqa: B009
        return x

    return model


def of_outer(args):
    outer = types.SimpleNamespace(model=args, path="a")

    def model(x):
        def inner(x):
            return x * outer.model.scale

        return inner(x)

    return model


class OfAttribute(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def forward(self, x):
        return x * self.args.scale

    def configure_optimizers(self):
        return self.args.lr


class OfChild(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.child = OfAttribute(args)

    def forward(self, x):
        return self.child(x) * (self.child.args.scale / self.child.args.scale)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("make", [captured, of_global, by_getattr, of_outer, OfAttribute, OfChild])
def test_only_what_is_read_of_a_configuration_counts(make, config):
    args = CONFIGS[config]()
    cached = torchcache(make(args))
    assert torch.equal(cached(X), X * 2)
    namespace = cached.cache_instance.module_hash
    args.lr, args.out = 5.0, "elsewhere"
    assert torch.equal(cached(X), X * 2)
    assert (cached.cache_instance.module_hash, stats(cached).hits) == (namespace, 4)
    assert stats(cached).bypasses == {}
    args.scale = 3.0
    assert torch.equal(cached(X), X * 3)
    assert cached.cache_instance.module_hash != namespace
    changed = [line for line in cached.cache_instance.explain().splitlines() if "2.0 → 3.0" in line]
    assert changed and all("scale" in line and "lr" not in line for line in changed)
    del args.lr
    args.scale = 2.0
    assert cached.cache_instance.module_hash == namespace


class OfComputedName(OfAttribute):
    def forward(self, x):
        return x * self.args.scale * getattr(self, "ar" + "gs").lr


def rates_of(args):
    return args.lr


USED_WHOLE = {
    "passed on": lambda args: lambda x: x * args.scale * rates_of(args),
    "stored": lambda args: lambda x: x * args.scale * (_one := args).lr,
    "iterated": lambda args: lambda x: x * args.scale * sum(vars(args).values()),
    "in a list": lambda args: lambda x: x * args.scale * [args][0].lr,
    "locals": lambda args: lambda x: x * args.scale * locals()["args"].lr,
    "eval": lambda args: lambda x: x * args.scale * eval("args.lr", {"args": args}),
    "attribute": lambda args: OfComputedName(args),
    "computed name": lambda args: lambda x: x * args.scale * getattr(args, "l" + "r"),
    "text": lambda args: lambda x: x * args.scale * len(repr(args)),
    "getattr of another": lambda args: lambda x: x * sum(map(getattr, [args] * 2, ["scale", "lr"])),
}


@pytest.mark.parametrize("name", USED_WHOLE)
def test_a_configuration_that_is_used_otherwise_counts_as_a_whole(name):
    args = types.SimpleNamespace(scale=2.0, lr=3.0)
    plain, cached = USED_WHOLE[name](args), torchcache(USED_WHOLE[name](args), probe=False)
    for lr in (3.0, 3.0, 5.0, 7.25, 3.0):
        args.lr = lr
        assert torch.equal(cached(X), plain(X))


READER = """
from torch import nn
def captured(args):
    return lambda x: x * ({read})
class OfAttribute(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
    def forward(self, x):
        return x * ({read_of_self})
"""
EDITED = {  # a configuration, what is read of it, and an edit
    "property": (Settings, "args.doubled", lambda args: setattr(args, "scale", 7.0)),
    "method": (Settings, "args.halved()", lambda args: setattr(args, "scale", 7.0)),
    "__getattr__": (lambda: Computed(scale=2.0), "args.scale", lambda args: args.fields.update(scale=7.0)),
    "__getattribute__": (lambda: Logged(2.0, 3.0), "args.scale", lambda args: setattr(args, "lr", 7.0)),
    "class": (lambda: Noted(2.0, 3.0), "args.scale", lambda args: setattr(args, "__class__", Doubling)),
    "dict": (lambda: Noted(2.0, 3.0), "args.scale", lambda args: setattr(args, "__dict__", {"scale": 9.0})),
    "dict of all": (
        lambda: Noted(2.0, 3.0),
        "len(f'{args.scale}{vars(args)}')",
        lambda args: setattr(args, "__dict__", {"scale": 2.0}),
    ),
    "content": (lambda: Noted([2.0], 3.0), "args.scale[0]", lambda args: args.scale.__setitem__(0, 7.0)),
}


@pytest.mark.parametrize("name", EDITED)
@pytest.mark.parametrize("place", ["captured", "OfAttribute"])
def test_an_edit_behind_a_configuration_is_noticed(name, place, load):
    make, read, edit = EDITED[name]
    text = READER.replace("{read}", read).replace("{read_of_self}", read.replace("args", "self.args"))
    reader, args = getattr(load("reader", text), place), make()
    plain, cached = reader(args), torchcache(reader(args))
    before = plain(X)
    assert torch.equal(cached(X), before) and torch.equal(cached(X), before)
    edit(args)
    assert torch.equal(cached(X), plain(X)) and not torch.equal(plain(X), before)


class Doubling(Noted):
    @property
    def scale(self):
        return 2 * self.__dict__["scale"]

    @scale.setter
    def scale(self, value):
        self.__dict__["scale"] = value
