"""What shares a namespace, and what does not."""

import copy
import functools
import io
import json
import os
import pathlib
import pickle
import re
from unittest import mock

import pytest
import torch
from torch import nn

from tests.helpers import warm, zoo
from tests.helpers.outputs import namespace as hash_of
from tests.helpers.outputs import warnings_in
from tests.helpers.pairs import CODE, MODULES, PRELUDE, VALUES, holder, layer, times
from torchcache2 import torchcache

pytestmark = pytest.mark.usefixtures("without_grad")


def seeded(build):
    torch.default_generator.manual_seed(0)
    return build()


def namespace_of(cached):
    """The namespace of something decorated, which lives at least until then."""
    return cached.cache_instance.module_hash


def in_one_budget(*things):
    """Each as the only submodule or attribute of an instance of one decorated class."""

    @torchcache(probe=False)  # some of them mix the items of a batch
    class Shared(nn.Module):
        def forward(self, x):
            return self.thing(x)

    instances = [Shared() for _ in things]
    for instance, thing in zip(instances, things, strict=True):
        instance.thing = thing
    return instances


def equal(first, second):
    return first.dtype == second.dtype and torch.equal(first, second)


def assert_apart(build_first, build_second, x):
    """Two things with different outputs have different namespaces, and one cache tells them apart."""
    things = [seeded(build_first), seeded(build_second)]
    expected = [thing(x) for thing in things]
    assert not equal(*expected), "the two compute the same, so that nothing is tested"
    cached = in_one_budget(*things)
    for hits in (0, len(x)):
        for module, output in zip(cached, expected, strict=True):
            assert equal(module(x), output)
            assert module.cache_instance.stats().hits == hits
    assert hash_of(seeded(build_first)) != hash_of(seeded(build_second))


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("first", "second"), VALUES.values(), ids=VALUES)
def test_modules_with_different_attributes_are_apart(first, second, log):
    assert_apart(lambda: holder(first), lambda: holder(second), torch.rand(3, 2))
    assert warnings_in(log) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("first", "second", "shape"), MODULES.values(), ids=MODULES)
def test_modules_that_differ_a_little_are_apart(first, second, shape, log):
    assert_apart(first, second, torch.rand(shape))
    assert warnings_in(log) == []


@pytest.mark.one_in(4)
@pytest.mark.parametrize("source", CODE.values(), ids=CODE)
def test_code_that_differs_a_little_is_apart(source, load, log):
    texts = [re.sub(r"«(.*?)\|(.*?)»", rf"\{side}", source) for side in (1, 2)]
    first, second = (load(f"written_{i}", PRELUDE + text) for i, text in enumerate(texts))
    assert_apart(first.build, second.build, torch.rand(5, 4))
    assert warnings_in(log) == []


@torchcache
class Built(nn.Module):
    """`scale` is not kept, and `bias` only in what is built."""

    def __init__(self, width, scale=1.0, *, bias=True, **options):
        super().__init__()
        self.layer = nn.Linear(4, width, bias=bias)

    def forward(self, x):
        return self.layer(x)


def built(*args, **kwargs):
    torch.default_generator.manual_seed(0)
    return Built(*args, **kwargs)


@pytest.mark.parametrize("scale", [2.0, torch.zeros(2), lambda x: x * 3], ids=["float", "tensor", "lambda"])
def test_constructor_arguments_that_are_not_kept_do_not_count(scale):
    assert namespace_of(built(3, scale)) == namespace_of(built(3))
    assert namespace_of(built(3, bias=False)) != namespace_of(built(3))


def test_the_stored_dtype_counts():
    hashes = {
        namespace_of(torchcache(cache_dtype=dtype)(nn.ReLU()))
        for dtype in (None, torch.float16, torch.bfloat16)
    }
    assert len(hashes) == 3


def test_a_given_name_replaces_the_fingerprint():
    named = [torchcache(persistent_module_hash=name)(layer()) for name in ("a", "a", "b")]
    hashes = [module.cache_instance.module_hash for module in named]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hash_of(layer()) not in hashes


MOVED = """
LIMIT = 5

def helper(x):
    return x.clamp(max=LIMIT)

{decorator}
class Net(nn.Module):
    factor = 2

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(4, width)

    @staticmethod
    def scaled(x):
        return x * 2

    def forward(self, x):
        return helper(self.scaled(self.layer(x))) * self.factor

{decorator}
def function(x, *, power=2):
    return helper(x) ** power
"""
HEADER = PRELUDE + "from torchcache2 import torchcache\n"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "decorator",
    [
        "@torchcache()",
        "@torchcache(max_memory_cache_size='1MB')",
        "@torchcache(policy='lru', max_memory_cache_size=0.5)",
        "@torchcache(memory_cache_device=None)",
        "@torchcache(subsample_count=10)",
        "@torchcache(\n    policy='keep',\n    # For the sake of a comment.\n    enabled=True,\n)",
        "import builtins, types as types_again  # more lines\nUNUSED = [1]\n\n@torchcache",
    ],
)
@pytest.mark.parametrize("name", ["Net", "function"])
def test_neither_file_nor_decorator_options_count(name, decorator, load):
    def module_hash(file, source):
        thing = getattr(load(file, source), name)
        thing = seeded(lambda: thing(3)) if name == "Net" else thing
        return thing.cache_instance.module_hash

    here = module_hash("written_here", HEADER + MOVED.format(decorator="@torchcache"))
    there = HEADER + "def shim():\n    pass\n" * 3 + MOVED.format(decorator=decorator)
    assert module_hash("written_there", there) == here


def make_project():
    return seeded(zoo.project).eval()


def make_instance():
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.GELU()))
    return torchcache(module.eval())


def restored(module):
    state = copy.deepcopy(module.state_dict())
    for parameter in module.parameters():
        parameter.mul_(2)
    assert module.cache_instance.module_hash
    module.load_state_dict(state)


def restrided(module):
    for parameter in module.parameters():
        wide = parameter.new_empty((*parameter.shape, 2))
        wide[..., 1] = parameter
        parameter.data = wide[..., 1]
        assert not parameter.is_contiguous()


def overridden(module):
    module.torchcache_max_memory_cache_size = "2MB"
    module.torchcache_policy = "lru"


def called(module):
    x = torch.rand(3, 4)
    assert equal(module(x), module(x))
    module(torch.rand(4, 4))


def hooked_and_unhooked(module):
    handle = next(module.children()).register_forward_hook(times(2))
    assert module.cache_instance.module_hash
    handle.remove()


HARMLESS = {
    "retrained": lambda module: module.train().eval(),
    "restored": restored,
    "restrided": restrided,
    "frozen": lambda module: module.requires_grad_(not next(module.parameters()).requires_grad),
    "overridden": overridden,
    "called": called,
    "hooked and unhooked": hooked_and_unhooked,
    "held by grad": lambda module: [setattr(p, "grad", torch.ones_like(p)) for p in module.parameters()],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("make", [make_project, make_instance])
@pytest.mark.parametrize("change", HARMLESS)
def test_what_does_not_change_the_outputs_does_not_count(change, make):
    module = make()
    HARMLESS[change](module)
    assert namespace_of(module) == namespace_of(make())


def pickled(module):
    return pickle.loads(pickle.dumps(module))


def torch_saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("make", [make_project, make_instance])
@pytest.mark.parametrize("twin", [copy.deepcopy, copy.copy, pickled, torch_saved])
@pytest.mark.parametrize("warm", [False, True])
def test_copies_are_the_same_thing(twin, make, warm):
    module = make()
    if make is make_project:  # a lambda cannot be pickled
        module.layer._forward_hooks.clear()
    if warm:
        module(torch.rand(3, 4))
    module_hash = module.cache_instance.module_hash
    copied = twin(module)
    assert copied.cache_instance.module_hash == module_hash
    called(copied)
    assert copied.cache_instance.module_hash == module_hash


def test_a_cached_property_costs_one_call_at_most():
    class Net(nn.Module):
        @functools.cached_property
        def scale(self):
            return 2

        def forward(self, x):
            return x * self.scale

    module, x = torchcache(Net()), torch.rand(3, 4)
    for _ in range(2):
        assert equal(module(x), x * 2)
    hits = module.cache_instance.stats().hits
    assert equal(module(x), x * 2)
    assert module.cache_instance.stats().hits == hits + 3


@pytest.fixture(scope="module")
def elsewhere():
    """What another process, with another hash seed, says of the zoo."""
    return json.loads(warm.run(pathlib.Path(zoo.__file__), cwd=warm.ROOT, seed="1").out)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", zoo.READABLE)
def test_another_process_agrees(name, elsewhere):
    torch.default_generator.manual_seed(0)
    module = zoo.decorated(name)
    assert elsewhere[name] == [module.cache_instance.module_hash, 0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", zoo.READABLE)
def test_a_fingerprint_is_stable_and_silent(name, log):
    x = torch.rand(zoo.READABLE[name][1])
    with mock.patch.dict(os.environ, TORCHCACHE_DISABLE="1"):
        expected = zoo.build(name)(x)
    module = zoo.decorated(name)
    cache = module.cache_instance
    before, hits = cache.module_hash, cache.stats().hits
    assert cache.module_hash == before
    first = module(x)
    assert cache.module_hash == before
    second = module(x)
    assert cache.module_hash == before
    assert equal(first, second)
    assert equal(first, expected)
    assert cache.stats().hits == hits + len(x)
    assert not cache.stats().bypasses
    cache.refresh()
    assert cache.module_hash == before
    assert warnings_in(log) == []


@pytest.mark.parametrize("name", zoo.UNREADABLE)
def test_what_cannot_be_read_is_named_once_and_cached_here(name, log, elsewhere):
    module, place = zoo.decorated(name), zoo.UNREADABLE[name][1]
    x = torch.rand(3, 4)
    plain = zoo.build(name)(x)
    assert equal(module(x), plain)
    assert equal(module(x), plain)
    assert module.cache_instance.stats().hits == 3
    module.cache_instance.refresh()
    assert equal(module(x), plain)
    assert module.cache_instance.stats().hits == 6
    warned = warnings_in(log)
    assert len(warned) == 1
    assert f"cannot read {place}" in warned[0]
    other, warnings = elsewhere[name]
    assert warnings == 1
    assert other != module.cache_instance.module_hash


@pytest.mark.slow
def test_a_model_of_transformers_is_read_and_cached(log):
    torch.default_generator.manual_seed(0)
    plain = zoo.bert()
    module = torchcache(copy.deepcopy(plain))
    before = module.cache_instance.module_hash
    ids = torch.randint(0, 11, (4, 6))
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[1, 4:] = 0
    expected = plain(input_ids=ids, attention_mask=mask)
    for hits in (0, 4):
        output = module(input_ids=ids, attention_mask=mask)
        assert type(output) is type(expected)
        assert list(output) == list(expected)
        assert equal(output.last_hidden_state, expected.last_hidden_state)
        assert equal(output.pooler_output, expected.pooler_output)
        assert module.cache_instance.stats().hits == hits
    assert module.cache_instance.module_hash == before
    assert not module.cache_instance.stats().bypasses
    assert warnings_in(log) == []
    module.config.hidden_act = "relu"
    assert module.cache_instance.module_hash != before
    module.config.hidden_act = "gelu"
    assert module.cache_instance.module_hash == before
    module.encoder.layer[1].attention.self.scaling = 2.0
    assert module.cache_instance.module_hash != before
