"""The user's code counts however it is reached, and what cannot be followed is said."""

# ruff: noqa: E501 (texts of small files, one a line)

import copy
import functools
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from torch import nn
from torch.nn import functional as F

from tests.helpers import warm
from tests.helpers.outputs import namespace, warnings_in
from torchcache2 import torchcache

X = torch.rand(4, 3, generator=torch.Generator().manual_seed(3))
HELPER = "def g(x):\n    return x * HERE\n"


pytestmark = pytest.mark.usefixtures("without_grad")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Makes a project of some files, and imports one; those of the project before are forgotten."""
    made = []

    def make(files, name="model"):
        for old in made:
            sys.modules.pop(old, None)
        made[:] = [path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in files]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        monkeypatch.syspath_prepend(folder)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for old in made:
        sys.modules.pop(old, None)


def namespaces_of(project, files, build=lambda module: module.model):
    """Namespaces with 2, 2 and 3 in the place of HERE, each with the output for X."""
    found = []
    for number in (2, 2, 3):
        made = build(project({path: text.replace("HERE", str(number)) for path, text in files.items()}))
        cached = torchcache(made)
        output = cached(X)
        found.append((cached.cache_instance.module_hash, output))
        assert torch.equal(cached(X), output) and cached.cache_instance.module_hash == found[-1][0]
    return found


def assert_counts(project, files, **options):
    (first, out), (again, _), (other, changed) = namespaces_of(project, files, **options)
    assert not torch.equal(out, changed), "the edit does nothing, so that nothing is tested"
    assert first == again, "the namespace does not depend on the folder"
    assert first != other


IN_MODULE = """
import torch
from torch import nn
import helper
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = helper
    def forward(self, x):
        return self.h.g(x)
model = Net()
"""
DIRECT = "import helper\ndef model(x):\n    return helper.g(x)\n"
WITHIN = "def model(x):\n    import helper\n    return helper.g(x)\n"
PASSING_ON = "import deeper\ndef g(x):\n    return deeper.f(x)\n"
DEEPER = "def f(x):\n    return x * HERE\n"
# The texts of model.py, of helper.py, if it is not HELPER, and of deeper.py, if it is not DEEPER.
FOLLOWED = {
    "module": [DIRECT],
    "number": ["import helper\ndef model(x):\n    return x * helper.SCALE\n", "SCALE = HERE\n"],
    "name of a number": ["from helper import SCALE\ndef model(x):\n    return x * SCALE\n", "SCALE = HERE\n"],
    "what a function names": [
        "from helper import g\ndef model(x):\n    return g(x)\n",
        "SCALE = HERE\ndef g(x):\n    return x * SCALE\n",
    ],
    "class in a class": [
        "import helper\ndef model(x):\n    return x * helper.C.inner.SCALE\n",
        "class I: SCALE = HERE\nclass C: inner = I\n",
    ],
    "module in a class": ["import helper\nclass C:\n    h = helper\ndef model(x):\n    return C.h.g(x)\n"],
    "module as attribute": [IN_MODULE],
    "module as local": ["import helper\ndef model(x):\n    h = helper\n    return h.g(x)\n"],
    "module as default": ["import helper\ndef model(x, h=helper):\n    return h.g(x)\n"],
    "module in a closure": [
        "import helper\ndef make(h):\n    def model(x):\n        return h.g(x)\n    return model\n"
        "model = make(helper)\n",
    ],
    "module in a list": ["import helper\nALL = [helper]\ndef model(x):\n    return ALL[0].g(x)\n"],
    "what such a module imports": [IN_MODULE, PASSING_ON],
    "import within": [WITHIN],
    "what an import within imports": [WITHIN, PASSING_ON],
    "what it imports within": [
        "def model(x):\n    from helper import g\n    return g(x)\n",
        "def g(x):\n    if True: from deeper import f\n    return f(x)\n",
    ],
    "an import over two lines": [
        WITHIN,
        "from deeper import (  # two\n    a,\n    f as g,\n)\n",
        "a = 1\ndef f(x):\n    return x * HERE\n",
    ],
    "an import behind a semicolon": [
        "def model(x):\n    import helper\n    return helper.deeper.f(x)\n",
        "a = 1; import os, \\\n    deeper\n",
    ],
    "modules that import each other": [WITHIN, PASSING_ON, "import helper\ndef f(x):\n    return x * HERE\n"],
    "a missing file": [
        WITHIN,
        "try:\n    import not_there\nexcept ImportError:\n    pass\ndef g(x):\n    return x * HERE\n",
    ],
    "getattr with a constant": ["import helper\ndef model(x):\n    return getattr(helper, 'g')(x)\n"],
    "getattr of a module as local": [
        "import helper\ndef model(x):\n    h = helper\n    return getattr(h, 'g')(x)\n",
    ],
    "default_factory": [
        "import dataclasses\ndef scale():\n    return HERE\n@dataclasses.dataclass\nclass C:\n"
        "    scale: int = dataclasses.field(default_factory=scale)\ndef model(x):\n"
        "    return x * C().scale\n",
    ],
    "default_factory that is a lambda": [
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n"
        "    scale: int = dataclasses.field(default_factory=lambda: HERE)\ndef model(x):\n"
        "    return x * C().scale\n",
    ],
    "what a dataclass compares": [
        "import dataclasses\n@dataclasses.dataclass(order=True)\nclass C:\n"
        "    a: int = dataclasses.field(compare=HERE == 2)\n    b: int = 0\nALL = [C(3, 1), C(1, 5)]\n"
        "def model(x):\n    return x * sorted(ALL)[0].a\n",
    ],
    "arguments of a dataclass": [
        "import dataclasses\n@dataclasses.dataclass\nclass C:\n"
        "    a: int = dataclasses.field(default=5, init=HERE == 2)\n    b: int = 6\n"
        "def model(x):\n    return x * C(7).b\n",
    ],
    "what a pattern matches": [
        "class C:\n    a, b = 2, 3\n    __match_args__ = ('a', 'b')[HERE == 2 :]\n"
        "def model(x):\n    match C():\n        case C(k):\n            return x * k\n",
    ],
    "default of a dataclass with slots": [
        "import dataclasses\n@dataclasses.dataclass(slots=True)\nclass C:\n    scale: int = HERE\n"
        "def model(x):\n    return x * C().scale\n",
    ],
    "singledispatch": [
        "import functools\n@functools.singledispatch\ndef f(x):\n    return x\n@f.register\n"
        "def _(x: object):\n    return x * HERE\ndef model(x):\n    return f(x)\n",
    ],
    "lru_cache": [
        "import functools\n@functools.lru_cache\ndef f():\n    return HERE\ndef model(x):\n"
        "    return x * f()\n",
    ],
    "partial": [
        "import functools\ndef f(n, x):\n    return x * n\nmodel_ = functools.partial(f, HERE)\n"
        "def model(x):\n    return model_(x)\n",
    ],
    "chain of wrappers": [
        "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(*a):\n"
        "        return f(*a) * HERE\n    return g\n@twice\n@twice\ndef f(x):\n    return x\n"
        "def model(x):\n    return f(x)\n",
    ],
    "property, static and class method": [
        "class A:\n    @property\n    def p(self):\n        return self.s() + self.c()\n"
        "    @staticmethod\n    def s():\n        return HERE\n    @classmethod\n    def c(cls):\n"
        "        return HERE\ndef model(x):\n    return x * A().p\n",
    ],
    "object that is called": [
        "class A:\n    def __call__(self, x):\n        return (lambda y: y * HERE)(x)\na = A()\n"
        "def model(x):\n    return a(x)\n",
    ],
    "metaclass": [
        "class M(type):\n    def f(cls, x):\n        return x * HERE\nclass A(metaclass=M):\n"
        "    pass\ndef model(x):\n    return A.f(x)\n",
    ],
    "descriptor": [
        "class D:\n    def __get__(self, one, kind):\n        return HERE\nclass A:\n    d = D()\n"
        "def model(x):\n    return x * A().d\n",
    ],
}
PACKAGES = {
    "relative import": ("from . import helper\n    return helper.g(x)", {"helper.py": HELPER}),
    "absolute import": ("from pack import helper\n    return helper.g(x)", {"helper.py": HELPER}),
    "absolute name": ("from pack.helper import g\n    return g(x)", {"helper.py": HELPER}),
    "relative name": ("from .helper import g\n    return g(x)", {"helper.py": HELPER}),
    "relative import of what imports": (
        "from .helper import g\n    return g(x)",
        {"helper.py": "from . import deeper\ndef g(x):\n    return deeper.f(x)\n", "deeper.py": DEEPER},
    ),
    "two levels": (
        "from .inner.helper import g\n    return g(x)",
        {
            "inner/__init__.py": "",
            "inner/helper.py": "from ..deeper import f as g\n",
            "deeper.py": DEEPER,
        },
    ),
    "package's own file": ("from . import inner\n    return inner.g(x)", {"inner/__init__.py": HELPER}),
    "file of a package on the way": (
        "import pack.inner.helper as h\n    return x * h.n",
        {"inner/__init__.py": "n = HERE\n", "inner/helper.py": "from pack.inner import n\n"},
    ),
    "namespace package": ("from pack.inner import helper\n    return helper.g(x)", {"inner/helper.py": HELPER}),
    "for the type checker": (
        "from .helper import g\n    return g(x)",
        {
            "helper.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .nowhere import z\n" + HELPER,
        },
    ),
}  # fmt: skip


def files_of(model, helper=HELPER, deeper=DEEPER):
    return {"model.py": model, "helper.py": helper, "deeper.py": deeper}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FOLLOWED)
def test_code_counts_however_it_is_reached(name, project, log):
    assert_counts(project, files_of(*FOLLOWED[name]))
    assert not [text for text in warnings_in(log) if "for the first time" not in text]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PACKAGES)
def test_code_of_a_package_that_is_imported_within_counts(name, project):
    text, files = PACKAGES[name]
    files = {f"pack/{path}": content for path, content in files.items()}
    files |= {"pack/__init__.py": "", "pack/model.py": f"def model(x):\n    {text}\n"}
    (first, _), (_, _), (other, _) = namespaces_of(lambda files: project(files, "pack.model"), files)
    assert first != other


@pytest.mark.parametrize("text", [DIRECT, IN_MODULE, WITHIN], ids=["direct", "as a whole", "within"])
def test_what_is_put_into_a_module_counts(text, project):
    model = project(files_of(text, "SCALE = 2\ndef g(x):\n    return x * SCALE\n")).model
    assert torch.equal(model(X), X * 2)
    helper, cached, hashes = sys.modules["helper"], torchcache(model), []
    for scale in (2, 3, 2):
        helper.SCALE = scale
        assert torch.equal(cached(X), X * scale)
        hashes.append(cached.cache_instance.module_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    helper.g = lambda x: x * 7
    assert torch.equal(cached(X), X * 7)


PUT = {  # where the user puts a value or function, and what his code takes
    "torch": ("torch", "torch.put_there"),
    "the standard library": ("math", "math.put_there"),
    "a package": ("others", "others.put_there"),
}
PUT_HEAD = """
import math, torch, others
layer = torch.nn.Tanh()
layer.scale = torch.nn.Parameter(torch.ones(()))
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["number", "dict", "function"])
@pytest.mark.parametrize("name", PUT)
def test_what_the_user_puts_into_modules_and_classes_of_others_counts(
    name, kind, project, installed, monkeypatch
):
    if (name, kind) == ("the standard library", "dict"):
        pytest.skip("containers such as sys.path do not count")
    installed("others", "class P:\n    pass\n")
    (place, taken), hashes = PUT[name], []
    taken += {"number": "", "dict": "['n']", "function": "(0)"}[kind]
    cached = torchcache(project({"model.py": f"{PUT_HEAD}def model(x):\n    return x * {taken}\n"}).model)
    for number in (2, 3, 2):
        put = {"number": number, "dict": {"n": number}, "function": staticmethod(lambda _, n=number: n)}[kind]
        owner = pkgutil.resolve_name(place)
        put = put if isinstance(owner, type) or kind != "function" else put.__func__
        monkeypatch.setattr(owner, "put_there", put, raising=False)
        assert torch.equal(cached(X), X * number)
        hashes.append(cached.cache_instance.module_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert cached.cache_instance.stats().hits == 4


OPERATOR = """
import torch
@torch.library.custom_op("{space}::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * {scale}
{more}
def model(x):
    return {call}
"""
KERNEL = "@scaled.register_kernel('cpu')\ndef _(x):\n    return x * (5 + {scale})"
CALLS = ["scaled(x)", "torch.ops.{space}.scaled(x)", "torch.ops.{space}.scaled.default(x)"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("more", ["", KERNEL], ids=["function", "kernel"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.cpu_only
def test_the_functions_of_a_custom_operator_count(call, more, project, log):
    space = f"written_{CALLS.index(call)}_{bool(more)}".lower()
    found = []
    for scale in (2, 2, 3):
        text = OPERATOR.replace("{more}", more).replace("{call}", call)
        module = project({"model.py": text.format(space=space, scale=scale)})
        cached = torchcache(module.model)
        assert torch.equal(cached(X), X * (scale + (5 if more else 0)))
        assert torch.equal(cached(X), X * (scale + (5 if more else 0)))
        assert cached.cache_instance.stats().hits == 4
        found.append(cached.cache_instance.module_hash)
    assert found[0] == found[1] != found[2]
    assert warnings_in(log) == []


# What the key does not cover is noticed when its rows are first found in a later run.

HEAD = "import helper, importlib, types, typing, torch\nfrom helper import g\nNAME = 'helper'\n"
FOUND_LATE = {
    "eval": "def model(x):\n    return eval('g(x)')\n",
    "globals": "def model(x):\n    return globals()['g'](x)\n",
    "import_module": "def model(x):\n    return importlib.import_module(NAME).g(x)\n",
    "getattr of a module": "def model(x):\n    return getattr(helper, chr(103))(x)\n",
    "annotation": "class C:\n    a: (int, float)[HERE == 2]\n"
    "def model(x):\n    return x * typing.get_type_hints(C)['a'](2.5)\n",
    "order": "c = types.SimpleNamespace(**dict(sorted({'a': 2, 'b': 3}.items(), reverse=HERE == 3)))\n"
    "def model(x):\n    return x * list(c.__dict__.values())[0]\n",
    "attribute of torch's class": "torch.nn.Tanh.scale, layer = HERE, torch.nn.Tanh()\n"
    "def model(x):\n    return x * layer.scale\n",
}


@pytest.mark.parametrize("name", FOUND_LATE)
def test_what_code_finds_at_run_time_is_wrong_in_no_run(name, project, tmp_path, log):
    for number in (2, 2, 3, 3, 2):
        files = {
            path: text.replace("HERE", str(number))
            for path, text in files_of(HEAD + FOUND_LATE[name]).items()
        }
        model = project(files).model
        cached = torchcache(persistent_cache_dir=tmp_path / "rows")(model)
        with cached.cache_instance:
            for x in (X, X + 1, X, X + 1):
                assert torch.equal(cached(x), model(x))
    assert sum("rows that were found differ" in text for text in warnings_in(log)) == 2


HARMLESS = {
    "method called eval": "def model(x):\n    return layer.eval()(x)",
    "getattr of an object": "def model(x):\n    return x * getattr(layer, 'n', 1) * getattr(layer, NAME, 1)",
    "getattr of torch": "def model(x):\n    return getattr(torch, NAME)(x)",
    "vars of an object": "def model(x):\n    return x * len(vars(layer))",
    "getattr of a module with a default": "def model(x):\n    return getattr(nn, 'Tanh', layer.n)()(x)",
    "own variables": "def model(x):\n    return x * len(locals())",
    "eval in a constructor": "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.act = eval('nn.Tanh')()\n    def forward(self, x):\n        return self.act(x)\nmodel = Net()",
    "a global called eval": "def eval(x):\n    return x * 2\ndef model(x):\n    return eval(x)",
    "import of a package": "import importlib\ndef model(x):\n    return importlib.import_module('torch').tanh(x)",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_usual_code_gives_no_warning(name, project, log):
    head = "import torch\nfrom torch import nn\nlayer = nn.Tanh()\nNAME = 'tanh'\n"
    files = {"model.py": head + HARMLESS[name]}
    hashes = {namespace(project(files).model) for _ in range(2)}
    assert warnings_in(log) == [] and len(hashes) == 1


# Installed code, and what others have put into it.

MODELING = """
import functools
import torch
from torch import nn
from torch.nn import functional as F

TABLE = {}
FACTOR = 2

def attend(x):
    return inner(x)

def inner(x):
    return x * 2

class Registry(dict):
    pass

def wrapping(function):
    return lambda self, x: function(self, x)

def widen(x):
    return x

class Layer(nn.Module):
    rate = 2
    def forward(self, x):
        for extra in TABLE.values():
            x = extra(x)
        return F.relu(self.scaled(attend(x))) * self.rate
    @wrapping
    def scaled(self, x):
        return widen(x)

def make(scale):
    def function(x):
        return x * scale
    return function

def make_default(scale):
    def function(x, by=scale):
        return x * by
    return function

def make_class(scale):
    class Made(nn.Module):
        factor = scale
        def forward(self, x):
            return x * self.factor
    return Made

def make_closure(scale):
    class Made(nn.Module):
        def forward(self, x):
            return x * scale
    return Made
"""


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """An installed package."""
    folder = tmp_path / "site-packages"
    (folder / "written_zoo").mkdir(parents=True)
    (folder / "written_zoo" / "__init__.py").write_text("__version__ = '1.0'\nfrom . import modeling\n")
    (folder / "written_zoo" / "modeling.py").write_text(MODELING)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    yield importlib.import_module("written_zoo.modeling")
    for name in ("written_zoo", "written_zoo.modeling"):
        sys.modules.pop(name, None)


def mine(x):
    return x * 3


def own_forward(self, x):
    return x * 13


PATCHES = {
    "forward of the class": lambda m, patch: patch(m.Layer, "forward", own_forward),
    "method that forward calls": lambda m, patch: patch(m.Layer, "scaled", lambda self, x: x * 5),
    "static method": lambda m, patch: patch(m.Layer, "scaled", staticmethod(mine)),
    "function of torch": lambda m, patch: patch(torch.nn.functional, "relu", mine),
}


@pytest.mark.parametrize("name", PATCHES)
def test_installed_code_that_is_patched_counts_and_is_noticed(name, zoo, monkeypatch, log):
    cached = torchcache(nn.Sequential(zoo.Layer()))
    before, first = cached(X), cached.cache_instance.module_hash
    with monkeypatch.context() as context:
        PATCHES[name](zoo, context.setattr)
        expected = nn.Sequential(zoo.Layer())(X)
        assert not torch.equal(expected, before)
        assert torch.equal(cached(X), expected)
        assert cached.cache_instance.module_hash != first
        assert namespace(nn.Sequential(zoo.Layer())) == cached.cache_instance.module_hash
    zoo.TABLE.clear()
    assert torch.equal(cached(X), before)
    assert cached.cache_instance.module_hash == first
    assert warnings_in(log) == []


@pytest.mark.parametrize("factory", ["make", "make_default", "make_class", "make_closure"])
def test_what_an_installed_factory_was_given_counts(factory, zoo):
    def build(scale):
        made = getattr(zoo, factory)(scale)
        return made() if isinstance(made, type) else made

    two, again, three = (build(scale) for scale in (2.0, 2.0, 3.0))
    assert not torch.equal(two(X), three(X))
    assert namespace(two) == namespace(again) != namespace(three)


def test_functions_of_an_installed_package_count_by_its_version_and_globals(zoo, monkeypatch, project):
    text = "import written_zoo\ndef model(x):\n    return written_zoo.modeling.attend(x)\n"
    first = namespace(project({"model.py": text}).model)
    monkeypatch.setattr(sys.modules["written_zoo"], "__version__", "2.0")
    assert namespace(project({"model.py": text}).model) != first
    text = "import written_zoo\ndef model(x):\n    return x * written_zoo.modeling.FACTOR\n"
    cached = torchcache(project({"model.py": text}).model)
    assert torch.equal(cached(X), X * 2)
    monkeypatch.setattr(zoo, "FACTOR", 5)
    assert torch.equal(cached(X), X * 5)


def test_a_function_put_into_torchs_functional_counts_for_whoever_calls_it(installed, project, monkeypatch):
    text = "from torch.nn import functional as F\ndef attend(x):\n    return F.scaled_dot_product_attention(x, x, x)\n"
    installed("written_model", text)
    text = "import written_model\ndef model(x):\n    return written_model.attend(x)\n"
    layer = nn.TransformerDecoderLayer(2, 1, 3, batch_first=True).eval().requires_grad_(False)
    text += "def doubled(x, y, *z, **options):\n    return 2 * y\n"
    made, x = project({"model.py": text}), torch.rand(4, 3, 2)
    models = [(torchcache(made.model), made.model, (x,)), (torchcache(copy.deepcopy(layer)), layer, (x, x))]
    for cached, plain, arguments in models:
        hashes = []
        for function in (F.scaled_dot_product_attention, made.doubled):
            for put in (function, functools.partial(function)):
                with monkeypatch.context() as patch:
                    patch.setattr(F, "scaled_dot_product_attention", put)
                    for _ in range(2):
                        assert torch.equal(cached(*arguments), plain(*arguments))
                    hashes.append(cached.cache_instance.module_hash)
        assert len(set(hashes)) == 4
        cached(*arguments)
        assert cached.cache_instance.module_hash == hashes[0]
        assert cached.cache_instance.stats().hits == 5 * len(x)


def test_a_forward_that_a_package_puts_on_a_class_of_torch_counts(installed, monkeypatch):
    package = installed("written_fast", "def forward(self, x):\n    return x * 2\n")
    plain, hashes = nn.Tanh(), []
    cached = torchcache(nn.Tanh())
    for function in (nn.Tanh.forward, package.forward, nn.Tanh.forward):
        monkeypatch.setattr(nn.Tanh, "forward", function)
        assert torch.equal(cached(X), plain(X))
        hashes.append(cached.cache_instance.module_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert cached.cache_instance.stats().hits == len(X)


SETTINGS = """
class Settings:
    def __init__(self):
        self.kept = {"scale": 2}
    def __getattr__(self, name):
        try:
            return vars(self)["kept"][name]
        except KeyError:
            raise AttributeError(name)
class Plain:
    pass
SETTINGS, PLAIN = Settings(), Plain()
PLAIN.scale = 2
"""


@pytest.mark.parametrize("taken", ["SETTINGS.scale", "PLAIN.scale", "SETTINGS.kept['scale']"])
def test_an_object_in_an_installed_module_counts_by_what_it_holds(taken, installed, project):
    settings = installed("written_settings", SETTINGS)
    text = f"import written_settings\ndef model(x):\n    return x * written_settings.{taken}\n"
    cached, hashes = torchcache(project({"model.py": text}).model), []
    for scale in (2, 3, 2):
        settings.SETTINGS.kept["scale"] = settings.PLAIN.scale = scale
        assert torch.equal(cached(X), X * scale)
        hashes.append(cached.cache_instance.module_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert cached.cache_instance.stats().hits == len(X)


LOADS = """
def __getattr__(name):
    if name != "late":
        raise AttributeError(name)
    return globals().setdefault("late", Late(scale=2))
"""
HIDING = """
class Late(dict):
    def __iter__(self):
        raise ValueError("nothing is here")
    keys = __iter__
"""
RAISING = """
class Late:
    def __init__(self, scale):
        pass
    @property
    def __class__(self):
        raise ValueError("not now")
"""


def test_what_a_forward_loads_is_read_as_it_is_stored(installed, project, log):
    installed("written_lazy", LOADS + HIDING)
    text = "import written_lazy\ndef model(x):\n    return x * dict.get(written_lazy.late, 'scale')\n"
    cached = torchcache(project({"model.py": text}).model)
    for _ in range(3):
        assert torch.equal(cached(X), X * 2)
    assert cached.cache_instance.stats().hits == len(X)


def test_what_a_forward_loads_may_raise_when_it_is_read(installed, project, log):
    installed("written_lazy", LOADS + RAISING)
    text = "import written_lazy\ndef model(x):\n    return x * len([written_lazy.late])\n"
    cached = torchcache(project({"model.py": text}).model)
    for _ in range(3):
        assert torch.equal(cached(X), X)
    assert cached.cache_instance.stats().bypasses["unreadable"] == 2 * len(X)
    assert "reading written_lazy.late raised ValueError('not now')" in warnings_in(log)[0]


EVERYTHING = """
import sys
sys.path.append(sys.argv[1])
import dataclasses, torch, helper
from written_zoo import modeling
from torchcache2 import torchcache

@torch.library.custom_op("written_everywhere::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@dataclasses.dataclass
class C:
    names: dict = dataclasses.field(default_factory=lambda: {"a": 1})

modeling.TABLE.update({name: lambda x: x for name in sorted({"a", "b", "c"})})
modeling.attend = lambda x: x * 3
layer = modeling.Layer()
made = modeling.make_class(3.0)()

def model(x, h=helper):
    from pack import late
    return h.g(late.f(made(layer(scaled(x))))) * len(C().names)

print(torchcache(model).cache_instance.module_hash)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("zoo")
def test_another_process_and_folder_agree(tmp_path):
    found = []
    for seed, name in (("1", "one"), ("random", "two")):
        folder = tmp_path / name
        (folder / "pack").mkdir(parents=True)
        (folder / "helper.py").write_text(
            "import os, pack.late\nSIZES = {'a', 'b'}\ndef g(x):\n    return x\n"
        )
        (folder / "pack" / "late.py").write_text("from . import more\ndef f(x):\n    return x\n")
        (folder / "pack" / "more.py").write_text("import helper\n")
        (folder / "script.py").write_text(EVERYTHING)
        found.append(warm.start(folder / "script.py", tmp_path / "site-packages", seed=seed))
    first, second = (process.done().out for process in found)
    assert first == second != ""


# What code imports as it runs is a module like any other once it is there.


def assign(name, value):
    return lambda helper: setattr(helper, name, value)


def in_deeper(helper):
    sys.modules["deeper"].HERE = 3.0


LATE = {  # file of the helper, and the edit
    "constant": ("SCALE = 2.0\ndef g(x):\n    return x * SCALE\n", assign("SCALE", 3.0)),
    "computed": (
        "import os\nSCALE = float(os.environ.get('N', '2'))\ndef g(x):\n    return x * SCALE\n",
        assign("SCALE", 3.0),
    ),
    "function": ("def g(x):\n    return x * 2\n", assign("g", lambda x: x * 3)),
    "default": (
        "def g(x, by=2.0):\n    return x * by\n",
        lambda helper: setattr(helper.g, "__defaults__", (3.0,)),
    ),
    "made": (
        "def make(n):\n    def g(x):\n        return x * n\n    return g\ng = make(2)\n",
        lambda helper: setattr(helper, "g", helper.make(3)),
    ),
    "base": (
        "class A:\n    by = 2.0\nclass C(A):\n    def f(self, x):\n        return x * self.by\n"
        "def g(x):\n    return C().f(x)\n",
        lambda helper: setattr(helper.A, "by", 3.0),
    ),
    "nested": (
        "HELD = {'a': [2.0]}\ndef g(x):\n    return x * HELD['a'][0]\n",
        lambda helper: helper.HELD["a"].__setitem__(0, 3.0),
    ),
    "object": (
        "import types\nHELD = types.SimpleNamespace(by=2.0)\ndef g(x):\n    return x * HELD.by\n",
        lambda helper: setattr(helper.HELD, "by", 3.0),
    ),
    "tensor": (
        "import torch\nHELD = torch.ones(3)\ndef g(x):\n    return x * HELD\n",
        lambda helper: helper.HELD.add_(1),
    ),
    "deeper": (PASSING_ON, in_deeper),
    "within within": ("def g(x):\n    from deeper import f\n    return f(x)\n", in_deeper),
    "taken from": ("from deeper import f\ndef g(x):\n    return f(x)\n", in_deeper),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LATE)
def test_an_edit_of_a_module_that_was_imported_by_the_forward_is_noticed(project, name):
    text, edit = LATE[name]
    module = project(files_of(WITHIN, text, "HERE = 2.0\ndef f(x):\n    return x * HERE\n"))
    cached = torchcache(module.model)
    assert "helper" not in sys.modules
    expected = cached(X)
    for _ in range(2):
        assert torch.equal(cached(X), expected)
    after = cached.cache_instance.module_hash
    assert cached.cache_instance.stats().bypasses == {"state": 4}
    assert cached.cache_instance.stats().hits == 4
    edit(sys.modules["helper"])
    assert cached.cache_instance.module_hash != after
    assert torch.equal(cached(X), module.model(X))
    assert not torch.equal(cached(X), expected)


def test_what_a_module_computes_as_it_is_imported_counts(project, monkeypatch):
    files = {
        "model.py": WITHIN,
        "helper.py": "import os\nSCALE = float(os.environ['SCALE_OF_TEST'])\ndef g(x):\n    return x * SCALE\n",
    }
    found = []
    for scale in "223":
        monkeypatch.setenv("SCALE_OF_TEST", scale)
        cached = torchcache(project(files).model)
        cached(X)
        found.append(cached.cache_instance.module_hash)
    assert found[0] == found[1] != found[2]


OTHERS = "S = 2.0\ndef f(x):\n    return x * 2\nclass P:\n    def scale(self, x):\n        return x * 2\n"
TRIPLED = assign("f", lambda x: x * 3)
PATCHED = {  # the user's model, and the edit of what it or a helper of it uses
    "imported within": ("def model(x):\n    import others\n    return others.f(x)\n", TRIPLED),
    "taken within": ("def model(x):\n    from others import f\n    return f(x)\n", TRIPLED),
    "number within": ("def model(x):\n    from others import S\n    return x * S\n", assign("S", 3.0)),
    "by a helper": (WITHIN, TRIPLED),
    "method": (
        "import others\nP = others.P()\ndef model(x):\n    return P.scale(x)\n",
        lambda others: setattr(others.P, "scale", lambda self, x: x * 3),
    ),
}


@pytest.mark.parametrize("name", PATCHED)
def test_installed_code_that_is_patched_after_the_first_call(project, installed, name):
    text, edit = PATCHED[name]
    installed("others", OTHERS, is_imported=False)
    model = project(
        {"model.py": text, "helper.py": "import others\ndef g(x):\n    return others.f(x)\n"}
    ).model
    cached = torchcache(model)
    for _ in range(4):  # at the first call of each, `helper` and `others` are not imported yet
        assert torch.equal(cached(X), X * 2)
    assert cached.cache_instance.stats().hits >= 4
    edit(sys.modules["others"])
    assert torch.equal(cached(X), X * 3)


class Doubling:
    def scale(self, x):
        return x * 2


class Tripling:
    def scale(self, x):
        return x * 3


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = Doubling()

    def forward(self, x):
        return self.by.scale(x)


def test_another_class_of_an_object_is_noticed():
    module = torchcache(Scaling())
    assert torch.equal(module(X), X * 2)
    module.by.__class__ = Tripling
    assert torch.equal(module(X), X * 3)


USING_C = {
    "module": "from ext import _xxhash\ndef model(x):\n    return x * _xxhash.xxh32_intdigest(b'')\n",
    "name": "from ext._xxhash import xxh32_intdigest\ndef model(x):\n    return x * xxh32_intdigest(b'')\n",
    "package": "import ext._xxhash\ndef model(x):\n    return x * ext._xxhash.xxh32_intdigest(b'')\n",
    "within": "def model(x):\n    from ext._xxhash import xxh32\n    return x * xxh32(b'').intdigest()\n",
    "class": "from ext._xxhash import xxh32_intdigest as f\nclass C:\n    __module__ = 'ext._xxhash'\n"
    "    SCALE = f(b'')\ndef model(x):\n    return x * C().SCALE\n",
    "attribute": "from torch import nn\nfrom ext import _xxhash\nclass Net(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.f = _xxhash.xxh32_intdigest\n"
    "    def forward(self, x):\n        return x * self.f(b'')\nmodel = Net()\n",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", USING_C)
def test_an_extension_module_of_the_project_counts_by_its_file(name, project, monkeypatch):
    source = Path(importlib.import_module("xxhash._xxhash").__file__)
    found = []
    for version in (b"1", b"1", b"2"):  # bytes after the end of the program change nothing
        files = {"model.py": USING_C[name], "ext/__init__.py": "", "first.py": ""}
        folder = Path(project(files, name="first").__file__).parent
        (folder / "ext" / source.name).write_bytes(source.read_bytes() + version)
        monkeypatch.delitem(sys.modules, "ext._xxhash", raising=False)
        cached = torchcache(importlib.import_module("model").model)
        assert torch.equal(cached(X), X * xxhash.xxh32_intdigest(b""))
        found.append(namespace(cached))
    assert found[0] == found[1] != found[2]


NUMBA = """
class Dispatcher:
    def __init__(self, py_func, **options):
        self.py_func, self.targetoptions = py_func, options
        self.compiler = {number: object() for number in range(1000)}  # of no canonical bytes
    def __call__(self, *args):
        return self.py_func(*args)
class DUFunc:
    def __init__(self, py_func, **options):
        self.__wrapped__, self.targetoptions = py_func, options
        self.compiler = {number: object() for number in range(1000)}
    def __call__(self, *args):
        return self.__wrapped__(*args)
def njit(**options):
    return lambda f: Dispatcher(f, **options)
def vectorize(**options):
    return lambda f: DUFunc(f, **options)
"""
COMPILED = "import numba\n@numba.njit(fastmath=FAST)\ndef g(x):\n    return x * HERE\ndef model(x):\n    return g(x)\n"


@pytest.mark.parametrize("name", ["njit", "vectorize"])
def test_a_function_that_numba_compiles_counts_by_its_source_and_options(name, installed, project, log):
    installed("numba", NUMBA)
    text = COMPILED.replace("njit", name)
    assert_counts(project, {"model.py": text.replace("FAST", "False")})
    first, second = (
        torchcache(project({"model.py": text.replace("FAST", fast)}).model) for fast in ("False", "True")
    )
    assert namespace(first) != namespace(second)
    assert not warnings_in(log)


ODD = """
class Odd:
    scale = HERE
    def __getattr__(self, name):
        MADE_UP
odd = Odd()
def model(x):
    return x * odd.scale
"""


@pytest.mark.parametrize(
    "made_up", ["return Odd()", "return print", "raise KeyError(name)", "return {name: 1}"]
)
def test_an_object_that_makes_up_attributes_never_breaks_a_call(made_up, project):
    for slots in ("", "    __slots__ = ()\n"):
        text = ODD.replace("MADE_UP", made_up).replace("    scale", f"{slots}    scale")
        cached = torchcache(project({"model.py": text.replace("HERE", "2")}).model)
        assert torch.equal(cached(X), X * 2) and torch.equal(cached(X), X * 2)


READING = {
    "item": "import os\ndef model(x):\n    return x * float(os.environ['SCALE'])\n",
    "method": "from os import environ\ndef model(x):\n    return x * float(environ.get('SCALE', 1))\n",
    "function": "from os import getenv as get\ndef model(x):\n    return x * float(get('SCALE', 1))\n",
    "within": "def model(x):\n    import os\n    return x * float(os.environ['SCALE'])\n",
    "helper": "import os\ndef read(name):\n    return float(os.environ.get(name) or 1)\n"
    "def model(x):\n    return x * read('SCALE')\n",
    "constant": "import os\nNAME = 'SCALE'\ndef read():\n    return os.environ.get(NAME) or 1\n"
    "def model(x):\n    return x * float(read())\n",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", READING)
def test_environment_variables_that_code_reads_count_and_are_noticed(name, project, monkeypatch):
    for number in range(300):  # of many, each call compares those alone
        monkeypatch.setenv(f"OTHER_{number}", "1")
    monkeypatch.setenv("SCALE", "2")
    cached = torchcache(project({"model.py": READING[name]}).model)
    assert torch.equal(cached(X), X * 2)
    first, walks = namespace(cached), cached.cache_instance.keeper.walks
    assert torch.equal(cached(X), X * 2) and cached.cache_instance.keeper.walks == walks
    monkeypatch.setenv("SCALE", "3")
    assert torch.equal(cached(X), X * 3) and namespace(cached) != first
    assert "environment SCALE" in cached.cache_instance.explain()
    if name not in ("item", "within"):
        monkeypatch.delenv("SCALE")
        assert torch.equal(cached(X), X)
    monkeypatch.setenv("SCALE", "2")
    assert torch.equal(cached(X), X * 2) and namespace(cached) == first
    monkeypatch.setenv("RANK", "7")  # no code names it
    assert torch.equal(cached(X), X * 2) and namespace(cached) == first


def test_environment_variables_may_be_left_out(project, monkeypatch):
    monkeypatch.setenv("SCALE", "2")
    cached = torchcache(project({"model.py": READING["item"]}).model, ignore="os.environ.*", probe=False)
    before = cached(X)
    monkeypatch.setenv("SCALE", "3")
    assert torch.equal(cached(X), before)


def test_what_a_constructor_reads_counts_by_its_result(project, monkeypatch):
    text = """
import os
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = float(os.environ["SCALE"])
    def forward(self, x):
        return x * self.scale
"""
    kind, found = project({"model.py": text}).Model, []
    for value in ("2", "3", "2.0"):
        monkeypatch.setenv("SCALE", value)
        cached = torchcache(kind())
        assert torch.equal(cached(X), X * float(value))
        found.append(namespace(cached))
    assert found[0] == found[2] != found[1]


def test_the_number_of_a_rank_does_not_count(project, monkeypatch):
    text = "import os\ndef model(x):\n    return x + int(os.environ.get('RANK', 0)) * 0\n"
    monkeypatch.setenv("RANK", "0")
    cached = torchcache(project({"model.py": text}).model)
    cached(X)
    first = namespace(cached)
    monkeypatch.setenv("RANK", "1")
    cached(X)
    assert namespace(cached) == first
