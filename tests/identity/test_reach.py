"""Only the parts that the cached methods use count: the rest may have any weights."""

import contextvars
import functools
import importlib
import inspect
import random
import types
import weakref

import pytest
import torch
from torch import nn

from tests.helpers import warm
from torchcache2 import cache_of, torchcache

X = torch.arange(1.0, 13.0).view(4, 3)
CASES = {}
REGISTRY = {}
NAME = "dec"  # no code below has this text


@pytest.fixture(autouse=True)
def _without_grad():
    with torch.no_grad():
        yield
    REGISTRY.clear()


class Coder(nn.Module):
    """The method of each case uses `enc`. Whether it may use `dec`, too, is its name in `CASES`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.dec = nn.Linear(3, 3), nn.Linear(3, 3)
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("_unused", torch.zeros(2))
        self.eval()

    def helper(self, x):
        return self.enc(x)

    def decode(self, x):
        return self.dec(x)


def case(*, counts):
    def add(kind):
        CASES[f"{kind.__name__} {'counts' if counts else 'need not count'}"] = kind, counts
        return kind

    return add


def passing(method):
    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        if hasattr(self, "_hook") and hasattr(self._hook, "before"):
            self._hook.before(self)
        return method(self, *args, **kwargs)

    return wrapper


def packed(method):
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


def counting(method):
    def wrapper(self, *args):
        return method(self, *args) + 0 * sum(map(torch.sum, self.parameters())).detach()

    return wrapper


def encoded(one, x):
    return one.helper(x) + one.enc.bias


def decoded(one, x):
    return one.decode(x)


def sums(one):
    return sum(map(torch.sum, one.parameters()))


# What need not count.


@case(counts=False)
class Plain(Coder):
    def encode(self, x):
        return self.enc(x).to(x.dtype)


@case(counts=False)
class Methods(Coder):
    def encode(self, x):
        later = [lambda: self.helper(x), functools.partial(self.helper, x)]
        return torch.stack([one() for one in later]).sum(0) + self._deeper(x)

    def _deeper(self, x):
        return super().helper(x)


@case(counts=False)
class Private(Coder):
    def __init__(self):
        super().__init__()
        self.__part = nn.Linear(3, 3)

    def encode(self, x):
        return self.__inner(x)

    def __inner(self, x):
        return self.__part(self.enc(x))


@case(counts=False)
class Properties(Coder):
    @property
    def first(self):
        return self.enc

    @functools.cached_property
    def second(self):
        return self.enc.weight.sum()

    @staticmethod
    def half(x):
        return x / 2

    @classmethod
    def twice(cls, x):
        return x * 2

    def encode(self, x):
        return self.first(x) * self.half(self.twice(x)) + type(self).twice(self.second.detach())


@case(counts=False)
class Wrapped(Coder):
    @torch.no_grad()
    @passing
    @packed
    def encode(self, x):
        return self.helper(x)


class Hidden(nn.Module):
    def __getattr__(self, name):
        if "config" in self.__dict__ and name in self.__dict__["config"]:
            return self.config[name]
        return super().__getattr__(name)


@case(counts=False)
class Fallback(Hidden, Coder):
    def encode(self, x):
        return self.enc(x)


@case(counts=False)
class Cached(Coder):
    def encode(self, x):
        return self.forward(x)

    @torchcache
    def forward(self, x):
        return self.enc(x)


@case(counts=False)
class AddedMethods(Coder):
    encode = lambda self, x: self.enc(x)  # noqa: E731


# What counts, as it is used, or may be.


@case(counts=True)
class Used(Coder):
    def encode(self, x):
        return self._inner(x)

    def _inner(self, x):
        return self.decode(self.enc(x))


@case(counts=True)
class ByProperty(Coder):
    @property
    def part(self):
        return self.dec

    def encode(self, x):
        return self.part(x)


@case(counts=True)
class PrivateMethod(Coder):
    def encode(self, x):
        return self.__inner(x)

    def __inner(self, x):
        return self.dec(x)


@case(counts=True)
class PassedSecond(Coder):
    def encode(self, x):
        return self.enc(x) + self._sum(1, self)

    @staticmethod
    def _sum(number, one):
        return 0 * sums(one) * number


class Around:
    def __init__(self, one):
        self.one = one


@case(counts=True)
class PassedToLocal(Coder):
    def encode(self, x):
        encoded = getattr(Coder, "decode")  # noqa: B009
        return encoded(self, x) if NAME else self.helper(x)

    def decode(self, x):
        return x


def chosen(*args):
    encoded = decoded
    return encoded(*args)


@case(counts=True)
class Stored(Coder):
    def encode(self, x):
        self.__dict__.setdefault("me", self)
        return self.enc(x)


@case(counts=True)
class Renamed(Coder):
    def encode(self, x):
        model = self
        return getattr(model, NAME)(x)


@case(counts=True)
class Returned(Coder):
    def _self(self):
        return self

    def encode(self, x):
        return getattr(self._self(), NAME)(x)


@case(counts=True)
class Applied(Coder):
    def encode(self, x):
        found = []
        self.apply(found.append)
        return found[1](x)


@case(counts=True)
class Called(Coder):
    def encode(self, x):
        return self(x)

    def forward(self, x):
        return self.dec(x)


class AnyName(nn.Module):
    def __getattr__(self, name):
        return super().__getattr__(NAME if name == "alias" else name)


@case(counts=True)
class Alias(AnyName, Coder):
    def encode(self, x):
        return self.alias(x)


@case(counts=True)
class AskedForAnyName(Hidden, Coder):
    def encode(self, x):
        return self.__getattr__(NAME)(x)


@case(counts=True)
class OtherNameOfFallback(Hidden, Coder):
    find = Hidden.__getattr__

    def encode(self, x):
        return self.find(NAME)(x)


find = Hidden.__getattr__


@case(counts=True)
class HelperOfFallback(Hidden, Coder):
    def encode(self, x):
        return find(self, NAME)(x)


@case(counts=True)
class Shadowing(Coder):
    def encode(self, x, type=lambda one: one):  # noqa: A002
        return getattr(type(self), NAME)(x)


@case(counts=True)
class _(Coder):  # noqa: N801
    def encode(self, x):
        self.__name = x
        return getattr(self, NAME)(x)


@case(counts=True)
class ByGlobals(Coder):
    def __init__(self):
        super().__init__()
        REGISTRY["model"] = weakref.ref(self)

    def encode(self, x):
        return found(x)


def found(x):
    return getattr(globals()["REGISTRY"]["model"](), NAME)(x)


def above(x):
    return getattr(inspect.currentframe().f_back.f_locals["self"], NAME)(x)


@case(counts=True)
class HookOfTheClass(Coder):
    def _begin(self):
        type(self)._hook = types.SimpleNamespace(before=sums)

    @passing
    def encode(self, x):
        self._begin()
        return self.enc(x)


@case(counts=True)
class OddlyPacked(Coder):
    def _first(*args):
        return getattr(args[0], NAME)(args[1])

    def encode(self, x):
        return self._first(x)


@case(counts=True)
class AllOfIt(Coder):
    me = lambda *args: args  # noqa: E731

    def encode(self, x):
        return getattr(self.me()[0], NAME)(x)


class Slotted:
    __slots__ = ("owner",)


@case(counts=True)
class InSlots(Coder):
    def __init__(self):
        super().__init__()
        self.slotted = Slotted()
        self.slotted.owner = self

    def encode(self, x):
        return getattr(self.slotted.owner, NAME)(x)


@case(counts=True)
class ByProxy(Coder):
    def __init__(self):
        super().__init__()
        self.child = Child(parent=weakref.proxy(self))

    def encode(self, x):
        return self.child(x)


@case(counts=True)
class AtTensor(Coder):
    def __init__(self):
        super().__init__()
        self.enc.weight.owner = self

    def encode(self, x):
        return getattr(self.enc.weight.owner, NAME)(x)


@case(counts=True)
class InEnvironment(Coder):
    def __init__(self):
        super().__init__()
        self.variable = contextvars.ContextVar("variable", default=self)

    def encode(self, x):
        return getattr(self.variable.get(), NAME)(x)


@case(counts=True)
class Everywhere(Coder):
    models = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.models[:] = [self]

    def encode(self, x):
        return getattr(self.models[0], NAME)(x)


@case(counts=True)
class Remembered(Coder):
    def __init__(self):
        super().__init__()
        self.me = functools.lru_cache(lambda: self)

    def encode(self, x):
        return getattr(self.me(), NAME)(x)


@case(counts=True)
class OwnCall(Coder):
    def encode(self, x):
        return self.enc(x)

    def __call__(self, x):
        return getattr(self, NAME)(x)


@case(counts=True)
class EveryAttribute(Coder):
    def __getattribute__(self, name):
        return super().__getattribute__(NAME if name == "alias" else name)

    def encode(self, x):
        return self.alias(x)


@case(counts=True)
class WhenSet(Coder):
    def __setattr__(self, name, value):
        if name == "last" and NAME in self._modules:
            value = self._modules[NAME](value)
        super().__setattr__(name, value)

    def encode(self, x):
        self.last = self.enc(x)
        return self.last


@case(counts=True)
class OddWrapper(Coder):
    @counting
    def encode(self, x):
        return self.enc(x)


@case(counts=True)
class PartialMethod(Coder):
    def _run(self, name, x):
        return getattr(self, name)(x)

    run = functools.partialmethod(_run, NAME)

    def encode(self, x):
        return self.run(x)


class Decoding:
    def __get__(self, obj, kind):
        return self if obj is None else getattr(obj, NAME)


@case(counts=True)
class Descriptor(Coder):
    part = Decoding()

    def encode(self, x):
        return self.part(x)


@case(counts=True)
class OwnMethod(Coder):
    def __init__(self):
        super().__init__()
        self.helper = functools.partial(Coder.decode, self)

    def encode(self, x):
        return self.helper(x)


@case(counts=True)
class OwnFunction(Coder):
    def __init__(self):
        super().__init__()
        self.run = lambda x: getattr(self, NAME)(x)

    def encode(self, x):
        return self.run(x)


class Child(nn.Module):
    def __init__(self, **links):
        super().__init__()
        for name, value in links.items():
            object.__setattr__(self, name, value)

    def forward(self, x):
        return getattr(self.parent, NAME)(x)


@case(counts=True)
class Parent(Coder):
    def __init__(self):
        super().__init__()
        self.child = Child(parent=self)

    def encode(self, x):
        return self.child(x)


class ByReference(Child):
    def forward(self, x):
        return getattr(self.parent(), NAME)(x)


@case(counts=True)
class WeakParent(Coder):
    def __init__(self):
        super().__init__()
        self.child = ByReference(parent=weakref.ref(self))

    def encode(self, x):
        return self.child(x)


class Sideways(Child):
    def forward(self, x):
        return self.parts["peer"](x)


@case(counts=True)
class Sibling(Coder):
    def __init__(self):
        super().__init__()
        self.child = Sideways(parts={"peer": self.dec})

    def encode(self, x):
        return self.child(x)


@case(counts=True)
class BoundToParent(Coder):
    def __init__(self):
        super().__init__()
        self.child = Sideways(parts={"peer": self.decode})

    def encode(self, x):
        return self.child(x)


@case(counts=True)
class InList(Coder):
    def __init__(self):
        super().__init__()
        self.parts = [self.enc, self.dec]

    def encode(self, x):
        return self.parts[1](x)


@case(counts=True)
class HookOfPart(Coder):
    def __init__(self):
        super().__init__()
        self.enc.register_forward_hook(lambda module, args, out: self.decode(out))

    def encode(self, x):
        return self.enc(x)


@case(counts=True)
class Hooked(Coder):
    def __init__(self):
        super().__init__()
        self.register_forward_pre_hook(lambda module, args: None)

    def encode(self, x):
        return self.enc(x)


@case(counts=True)
class Parametrized(Coder):
    def __init__(self):
        super().__init__()
        nn.utils.parametrize.register_parametrization(self, "unused", nn.Identity())

    def encode(self, x):
        return self.enc(x) + self.unused.sum()


@case(counts=True)
class Shared(Coder):
    def __init__(self):
        super().__init__()
        self.enc.weight = self.dec.weight

    def encode(self, x):
        return self.enc(x)


@case(counts=True)
class Global(Coder):
    def __init__(self):
        super().__init__()
        REGISTRY["model"] = self

    def encode(self, x):
        return getattr(REGISTRY["model"], NAME)(x)


@case(counts=True)
class WithBound(Coder):
    def encode(self, x):
        return unbound(self.helper)(x)


def unbound(method):
    return getattr(method.__self__, NAME)


@case(counts=True)
class Unreadable(Coder):
    def __init__(self):
        super().__init__()
        self.steps = iter([self])

    def encode(self, x):
        return self.enc(x)


@case(counts=True)
class Setter(Coder):
    @property
    def last(self):
        return 0

    @last.setter
    def last(self, value):
        value += self.dec(value)

    def encode(self, x):
        y = self.enc(x)
        self.last = y
        return y


@case(counts=True)
class HookThatIsThere(Coder):
    def __init__(self):
        super().__init__()
        self._hook = types.SimpleNamespace(before=sums)

    @passing
    def encode(self, x):
        return self.enc(x)


@case(counts=True)
class HookThatIsMade(Coder):
    def _begin(self):
        self._hook = types.SimpleNamespace(before=sums)

    @passing
    def encode(self, x):
        self._begin()
        return self.enc(x)


NAMESPACE = {"NAME": NAME}
exec("def encode(self, x):\n    return getattr(self, NAME)(x)", NAMESPACE)


@case(counts=True)
class WithoutSource(Coder):
    encode = NAMESPACE["encode"]


def namespace(module, **options):
    return cache_of(torchcache(methods=("encode",), probe=False, **options)(module)).module_hash


@pytest.mark.parametrize(("kind", "counts"), CASES.values(), ids=CASES)
def test_a_part_counts_unless_methods_provably_do_not_use_it(kind, counts):
    one, two = kind(), kind()
    before = namespace(one)
    two.dec.weight.mul_(2)
    assert (namespace(two) == before) == (not counts), "as in another process"
    one.dec.weight.mul_(2)
    assert (cache_of(one).module_hash == before) == (not counts), "in this process"
    one.enc.bias.mul_(2)
    assert cache_of(one).module_hash != before


def test_parts_that_share_memory_count():
    module = Plain()
    module.dec = nn.Linear(64, 64)
    module.enc.weight = nn.Parameter(module.dec.weight.detach())
    before = namespace(module)
    module.dec.weight[60, 60] = 9.0  # moves the counter of this weight alone
    assert cache_of(module).module_hash != before


# What a method may return that may use any part.
ESCAPES = (
    "self.enc(x) + 0 * sums(self)",
    "decoded(self, x)",
    "getattr(Around(self).one, NAME)(x)",
    "chosen(self, x)",
    "getattr(self, NAME)(x)",
    "operator.attrgetter(NAME)(self)(x)",
    "[*self.children()][1](x)",
    "self.enc(x) + 0 * sum(map(torch.sum, self.parameters()))",
    "[*self._modules.values()][1](x)",
    '[*self.__dict__["_modules"].values()][1](x)',
    '[*vars(self)["_modules"].values()][1](x)',
    'getattr(locals()["self"], NAME)(x)',
    'getattr(inspect.currentframe().f_locals["self"], NAME)(x)',
    'eval(f"self.{NAME}(x)")',
    "type(self).decode(self, x)",
    "super(Case, self).decode(x)",
    "super().decode(x)",
    "super().__getattr__(NAME)(x)",
    "above(x)",
    "getattr(super(), NAME)(x)",
    "[*self][1](x)",
    'self["dec"](x)',
    "(lambda one: getattr(one, NAME))(self)(x)",
    "next(getattr(one, NAME) for one in [self])(x)",
    "f'{self}' and self.enc(x)",
)
CASE = """
import operator

from tests.identity.test_reach import *

class Case(Coder):
    def encode(self, x):
        return {}
"""


@pytest.mark.parametrize("expression", ESCAPES)
def test_an_object_that_escapes(expression, tmp_path, monkeypatch):
    kind = imported(CASE.format(expression), tmp_path, monkeypatch).Case
    test_a_part_counts_unless_methods_provably_do_not_use_it(kind, True)


def imported(text, folder, monkeypatch):
    name = f"case_{abs(hash(text))}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(name)


def test_tensors_of_the_module_itself():
    module = Plain()
    before = namespace(module)
    module.unused.add_(1), module._unused.add_(1)
    assert cache_of(module).module_hash == before
    assert "\nleft out, as no cached method uses it: dec" in cache_of(module).explain()


def test_hooks_of_all_modules():
    before = namespace(Plain())
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    two = Plain()
    with_hook = namespace(two)
    two.dec.weight.mul_(2)
    assert len({before, with_hook, cache_of(two).module_hash}) == 3
    handle.remove()
    assert cache_of(two).module_hash == before


CHANGES = {
    "hook": lambda module: module.register_forward_hook(lambda *call: None),
    "method of the object": lambda module: setattr(module, "helper", types.MethodType(Coder.decode, module)),
    "method of the class": lambda module: setattr(Methods, "_deeper", lambda self, x: self.decode(x)),
    "class": lambda module: setattr(module, "__class__", Used),
    "link": lambda module: setattr(module.enc, "owner", weakref.ref(module)),
    "fallback": lambda module: setattr(
        Methods, "__getattr__", lambda self, name: nn.Module.__getattr__(self, name)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_makes_a_part_count_is_noticed(change):
    module, kind = Methods(), dict(vars(Methods))
    before = namespace(module)
    try:
        change(module)
        changed = cache_of(module).module_hash
        module.dec.weight.add_(1)
        assert len({before, changed, cache_of(module).module_hash}) == 3
    finally:
        for name in ("_deeper", "__getattr__"):
            if name in kind:
                setattr(Methods, name, kind[name])
            elif name in vars(Methods):
                delattr(Methods, name)


class Towers(Coder):
    def encode(self, x):
        return self.enc(x)


def test_each_method_has_the_parts_that_it_uses():
    module = torchcache(Towers(), methods=("encode", "decode"))
    cache = cache_of(module)

    def misses(method):
        before = cache.stats(method).misses
        getattr(module, method)(X)
        return cache.stats(method).misses - before

    both = ("encode", "decode")
    assert [misses(one) for one in both * 2] == [4, 4, 0, 0]
    module.dec.weight.mul_(2)
    assert [misses(one) for one in both] == [0, 4]
    module.enc.weight.mul_(2)
    assert "weights dec" not in cache.explain("encode") and "weights enc" not in cache.explain("decode")
    assert [misses(one) for one in both] == [4, 0]


class Table(Coder):
    def __init__(self):
        super().__init__()
        self.table = list(range(1000))

    def encode(self, x):
        self.table[500] += 1
        return self.enc(x)

    def decode(self, x):
        return self.dec(x) * self.table[500]


def test_a_method_that_changes_what_another_reads():
    module = torchcache(Table(), methods=("encode", "decode"))
    before = module.decode(X)
    module.encode(X)
    assert torch.equal(module.decode(X), before / 500 * 501)


class WithHead(Coder):
    def forward(self, x):
        return self.enc(x)


def test_a_head_that_forward_does_not_use_may_be_trained():
    module = torchcache(WithHead())
    module.enc.requires_grad_(False)
    with torch.enable_grad():
        for _ in range(3):
            module(X)
            module.dec.weight.sum().backward()
            torch.optim.SGD(module.dec.parameters(), 0.1).step()
    assert module.cache_instance.stats().bypasses == {} and module.cache_instance.stats().hits == 8


MODEL = Towers()


@torchcache
def features(x):
    return MODEL.encode(x) + MODEL.enc.bias


@torchcache
def all_features(x):
    return MODEL.encode(x) + sums(MODEL)


@torchcache
def through_another(x):
    return MODEL.encode(x) + another(x)


def another(x):
    return decoded(MODEL, x)


@torchcache
def renamed(x):
    model = MODEL
    return getattr(model, NAME)(MODEL.encode(x))


FUNCTIONS = [(features, False), (all_features, True), (through_another, True), (renamed, True)]


@pytest.mark.parametrize(("function", "counts"), FUNCTIONS)
def test_a_function_that_calls_methods_of_a_global_module(function, counts):
    before = function.cache_instance.module_hash
    MODEL.dec.weight.add_(1)
    assert (function.cache_instance.module_hash == before) == (not counts)
    before = function.cache_instance.module_hash
    MODEL.enc.weight.add_(1)
    assert function.cache_instance.module_hash != before


# Modules of random methods: each uses parts, or calls others, in one of these ways.
WAYS = (
    "self.p{0}(x)",
    "getattr(self, 'p{0}')(x)",
    "getattr(self, PART + '{0}')(x)",
    "self.m{1}(x)",
    "(lambda: self.m{1}(x))()",
    "type(self).m{1}(self, x)",
    "given(self, x)",
    "self.parts[{0}](x)",
    "self.links.p{0}(x)",
    "self.q{1}",
    "x",
)
HEAD = """
import torch
from torch import nn

PART = "p"

def given(one, x):
    return one.m0(x)

class Random(nn.Module):
    def __init__(self, links):
        super().__init__()
        torch.manual_seed(0)
        for number in range(4):
            setattr(self, f"p{number}", nn.Linear(3, 3))
        object.__setattr__(self, "parts", [getattr(self, f"p{number}") for number in range(links)])
        object.__setattr__(self, "links", self if links == 3 else nn.Module())
"""


@pytest.mark.parametrize("seed", range(12))
def test_an_edit_that_changes_an_output_changes_the_key(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    text = HEAD
    for number in range(4):
        later = max(number, 1)  # methods call earlier ones only
        body = " + ".join(
            draw.choice(WAYS if number else WAYS[:3]).format(draw.randrange(4), draw.randrange(later))
            for _ in range(draw.choice((1, 1, 2)))
        )
        text += f"    def m{number}(self, x):\n        return {body}\n"
        text += f"    @property\n    def q{number}(self):\n        return self.m{number}(torch.ones(4, 3))\n"
    kind = imported(text, tmp_path, monkeypatch).Random
    links = draw.randrange(4)
    for method in ("m1", "m2", "m3"):
        for part in range(4):
            one, two = kind(links).eval(), kind(links).eval()
            getattr(two, f"p{part}").weight.add_(1)
            try:
                is_same = torch.equal(getattr(one, method)(X), getattr(two, method)(X))
            except (AttributeError, IndexError):
                continue
            hashes = {cache_of(torchcache(methods=(method,))(each)).module_hash for each in (one, two)}
            assert is_same or len(hashes) == 2, text


VAE = """
import sys, torch
from diffusers import AutoencoderKL
from torchcache2 import cache_of, torchcache

torch.manual_seed(0)
vae = AutoencoderKL(
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=["DownEncoderBlock2D"] * 2,
    up_block_types=["UpDecoderBlock2D"] * 2,
)
vae.eval().requires_grad_(False)
torchcache(vae, methods=("encode",), persistent_cache_dir={folder!r}, probe=False)
images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))

def misses():
    before = cache_of(vae).stats().misses
    vae.encode(images)
    return cache_of(vae).stats().misses - before

vae.{first}.weight.add_(1)
found = [misses()]
for part in ("decoder.conv_in", "post_quant_conv", "quant_conv", "encoder.conv_in"):
    vae.get_submodule(part).weight.add_(1)
    found.append(misses())
cache_of(vae).close()
print(found)
"""


@pytest.mark.slow
def test_the_decoder_of_an_autoencoder(tmp_path):
    pytest.importorskip("diffusers")
    for run, first in enumerate(("decoder.conv_out", "decoder.conv_in", "encoder.conv_out")):
        file = tmp_path / "run.py"
        file.write_text(VAE.format(folder=str(tmp_path / "rows"), first=first))
        found = eval(warm.run(file).out.splitlines()[-1])
        again = 0 if run == 1 else 2
        assert found == [again, 0, 0, again, again]
