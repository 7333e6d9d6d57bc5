"""What `@torchcache` decorates, and that the decorated thing stays what it was."""

import copy
import functools
import inspect
import io
import pickle
import types
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.outputs import frozen
from torchcache2 import Cache, DecorationError, OptionError, torchcache


@torchcache
class Bare(nn.Module):
    """Documented."""

    def __init__(self, width: int = 4, *, scale: float = 2.0) -> None:
        super(Bare, self).__init__()  # noqa: UP008  two-argument super has to work
        self.fc = nn.Linear(width, 3)
        self.scale = scale
        self.register_buffer("offset", torch.ones(3))
        self.calls = 0

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """The forward's own words."""
        self.calls += 1
        return self.fc(x) * self.scale * factor + self.offset


@torchcache(policy="lru")
class Called(Bare):
    """Decorated again, with options of its own."""


class Child(Bare):
    def forward(self, x, factor=1.0):
        return super().forward(x, factor) + 1


class Grandchild(Child):
    def __init__(self):
        super().__init__(4, scale=3.0)


class Quiet(Bare):
    """Inherits everything."""


MODULES = [Bare, Called, Child, Grandchild, Quiet]


GENERATOR = torch.Generator().manual_seed(1)
DATASET = TensorDataset(torch.zeros(3, 2))


def items(count):
    """Items that no other test has, since all tests share the budgets of these classes."""
    return torch.randn(count, 4, generator=GENERATOR)


@pytest.mark.parametrize("kind", MODULES)
def test_a_class_and_its_subclasses_are_cached_once(kind):
    module = frozen(kind())
    x = items(5)
    first = module(x)
    assert torch.equal(module(x), first)
    assert module.calls == 1  # a check leaves no trace
    stats = module.cache_instance.stats()
    assert (stats.hits, stats.misses, stats.memory_rows >= 5) == (5, 5, True)


@pytest.mark.parametrize("kind", MODULES)
def test_a_class_keeps_its_identity(kind):
    module = kind()
    assert isinstance(module, Bare) and isinstance(module, kind) and type(module) is kind
    assert kind.__name__ in ("Bare", "Called", "Child", "Grandchild", "Quiet")
    assert kind.__module__ == __name__ and pickle.loads(pickle.dumps(kind)) is kind
    assert Bare.__doc__ == "Documented."
    assert Bare.forward.__doc__ == "The forward's own words."
    assert list(inspect.signature(Bare).parameters) == ["width", "scale"]
    assert list(inspect.signature(module.forward).parameters) == ["x", "factor"]
    plain = {"offset", "fc.weight", "fc.bias"}
    assert set(module.state_dict()) == plain
    assert {name for name, _ in module.named_modules()} == {"", "fc"}
    frozen(module)(items(2))
    assert set(module.state_dict()) == plain
    assert repr(module).startswith(kind.__name__ + "(")


def copies(module):
    yield copy.copy(module)
    yield copy.deepcopy(module)
    yield pickle.loads(pickle.dumps(module))
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def instance(own=None):
    module = nn.Sequential(nn.Linear(4, 3), nn.GELU())
    return torchcache(policy="lru")(frozen(module))


@pytest.mark.parametrize("make", [lambda: frozen(Bare()), lambda: frozen(Grandchild()), instance])
@pytest.mark.parametrize("called", [False, True])
def test_copies_and_pickles_have_a_cache_of_their_own(make, called):
    module = make()
    x = items(6)
    if called:
        module(x)
    for twin in copies(module):
        expected = type(module)._call_impl(twin, x)
        assert torch.equal(twin(x), expected)
        assert twin.cache_instance.root is twin
        assert twin.cache_instance is not module.cache_instance
        assert twin.cache_instance.settings == module.cache_instance.settings
        assert twin.cache_instance.module_hash == module.cache_instance.module_hash


def test_a_cache_copies_to_itself_and_pickles_as_its_settings():
    cache = Cache(b"a namespace of16")
    assert copy.deepcopy(cache) is cache
    twin = pickle.loads(pickle.dumps(cache))
    assert twin.settings == cache.settings and twin.namespace == cache.namespace


def test_instances_of_one_class_share_a_budget_and_not_their_rows():
    first, second = frozen(Bare()), frozen(Bare())
    x = items(5)
    outputs = [first(x), second(x), first(x), second(x)]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])
    stats = [module.cache_instance.stats() for module in (first, second)]
    assert stats[0].memory_rows == stats[1].memory_rows >= 10
    assert [s.misses for s in stats] == [5, 5]


def test_an_instance_that_somebody_else_built():
    plain = nn.Sequential(nn.Linear(4, 3), nn.GELU()).eval()
    x = items(5)
    expected = plain(x).detach()
    module = torchcache(max_memory_cache_size="1MB")(plain)
    assert module is plain
    with torch.no_grad():
        assert torch.equal(module(x), expected)
        assert torch.equal(module(x), expected)
    assert module.cache_instance.stats().hits == 5
    assert list(module.state_dict()) == ["0.weight", "0.bias"]
    # Other instances of the class are left alone.
    assert not hasattr(nn.Sequential(nn.Linear(4, 3)), "cache_instance")


def test_an_instance_whose_forward_somebody_has_replaced():
    plain = frozen(nn.Linear(4, 3))
    original = plain.forward
    plain.forward = lambda x: original(x) * 10
    x = items(5)
    expected = plain(x)
    module = torchcache(plain)
    assert torch.equal(module(x), expected)
    assert torch.equal(module(x), expected)
    assert module.cache_instance.stats().hits == 5


def test_a_function():
    @torchcache
    def embed(x, power=2):
        """Documented."""
        return x**power

    x = items(5)
    assert torch.equal(embed(x), x**2) and torch.equal(embed(x, 2), x**2)
    assert torch.equal(embed(x, power=3), x**3)
    stats = embed.cache_instance.stats()
    assert (stats.hits, stats.misses) == (5, 10)
    assert embed.__name__ == "embed" and embed.__doc__ == "Documented."
    assert list(inspect.signature(embed).parameters) == ["x", "power"]


def test_with_parentheses_and_options():
    @torchcache(max_memory_cache_size=0)
    def nothing_kept(x):
        return x + 1

    x = items(5)
    for _ in range(2):
        assert torch.equal(nothing_kept(x), x + 1)
    assert nothing_kept.cache_instance.stats().misses == 10

    @torchcache(enabled=False)
    def off(x):
        return x + 1

    assert torch.equal(off(x), x + 1)
    assert off.cache_instance.stats().misses == 0


def test_attributes_override_options():
    @torchcache(policy="keep")
    class Overridden(nn.Module):
        def __init__(self, policy, size):
            super().__init__()
            self.torchcache_policy = policy
            self.torchcache_max_memory_cache_size = size

        def forward(self, x):
            return x * 2

    small, large = Overridden("lru", "10KB"), Overridden("keep", 10**6)
    for module in (small, large):
        for _ in range(2):
            module(torch.arange(3000.0))
    assert small.cache_instance.settings.policy == "lru"
    assert small.cache_instance.stats().memory_bytes <= 10_000
    assert large.cache_instance.settings.memory_budget() == 10**6
    assert large.cache_instance.stats().hits == 3000
    wrong = Overridden("keep", 10)
    wrong.torchcache_polcy = "lru"
    with pytest.raises(OptionError, match="polcy"):
        wrong(torch.zeros(2))


def generator(x):
    yield x


async def coroutine(x):
    return x


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))


@pytest.mark.parametrize(
    "target, words",
    [
        (3, "an int: expected a module"),
        ("net", r"a str: .*torchcache\(persistent_cache_dir=folder\)\(model\)"),
        (object, r"a type: name the methods"),
        (len, "a builtin_function_or_method: write a function that calls it"),
        ([nn.Linear(2, 2)], "a list: decorate each by itself"),
        (DATASET, r"a TensorDataset: CachedDataset\(dataset\)"),
        (range(3), r"a range: CachedDataset\(dataset\)"),
        (DataLoader(DATASET), r"a DataLoader: cache its dataset"),
        (scripted, "Decorate the module before it is scripted"),
        (staticmethod(items), "a staticmethod: put @torchcache above a function outside"),
        (classmethod(items), "a classmethod: put @torchcache above a function outside"),
        (property(items), "a property: .*above a method that computes it"),
        (functools.partial(items, 3), "a partial: write a function that calls it"),
        (
            types.SimpleNamespace(),
            r"a SimpleNamespace: name its methods, .* or one: torchcache\(object.encode\)",
        ),
        (Bare.mro, "write a function that calls it"),
        (nn.Linear(2, 2).__call__, "of a module, decorate the module"),
        (generator, "generator"),
        (coroutine, "coroutine"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_things_cannot_be_decorated(target, words):
    target = target() if target is scripted else target  # it takes a second to import what this needs
    for decorate in (torchcache, torchcache(policy="lru")):
        with pytest.raises(DecorationError, match=words) as caught:
            decorate(target)
        assert "\n" not in str(caught.value)


def test_shared_arguments_that_a_function_lacks_are_named():
    with pytest.raises(OptionError, match=r"shared_args.*'mask'.*x"):

        @torchcache(shared_args=("mask",))
        def forward(x):
            return x


def test_another_forward_of_the_same_instance_is_not_mistaken_for_its_own():
    # Called from outside, a base class's forward computes something else than the class's own.
    module = frozen(Child())
    x = items(3)
    own = module(x)
    assert torch.equal(Bare.forward(module, x) + 1, own)
    assert torch.equal(super(Child, module).forward(x) + 1, own)
    assert torch.equal(module(x), own)


def test_init_subclass_of_the_user_still_runs():
    seen = []

    class Base(nn.Module):
        def __init_subclass__(cls, *, tag="", **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append((cls.__name__, tag))

    @torchcache
    class Middle(Base, tag="m"):
        def forward(self, x):
            return x

    @torchcache
    class Own(nn.Module):
        def __init_subclass__(cls, *, tag="", **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append((cls.__name__, tag))

        def forward(self, x):
            return x

    class Leaf(Middle, tag="l"):
        pass

    class Other(Own, tag="o"):
        pass

    assert seen == [("Middle", "m"), ("Leaf", "l"), ("Other", "o")]
    assert Leaf()(torch.ones(2)).tolist() == [1, 1] and Other()(torch.ones(2)).tolist() == [1, 1]


def test_the_cache_is_a_context_manager_and_can_be_cleared():
    module = frozen(Bare())
    x = items(5)
    module(x)
    with module.cache_instance as cache:
        module(x)
        cache.clear()
        module(x)
        assert (cache.stats().hits, cache.stats().misses) == (5, 10)
        rows = cache.stats().memory_rows
        cache.free_memory()
        assert cache.stats().memory_rows == rows - 5
    assert torch.equal(module(x), module(x))
    assert cache.stats().hits == 5
