"""Methods other than forward: of modules and plain objects, by name, by the bound method, in a class body."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.outputs import frozen
from torchcache2 import (
    DecorationError,
    ModuleCache,
    OptionError,
    cache_of,
    torchcache,
    uncache,
)


class Clip(nn.Module):
    def __init__(self, scale=2.0):
        super().__init__()
        self.image = nn.Linear(4, 3)
        self.text = nn.Linear(4, 2)
        self.scale = scale

    def forward(self, x):
        return self.encode_image(x).sum(1), self.encode_text(x).sum(1)

    def encode_image(self, x, factor=1.0):
        return self.image(x) * self.scale * factor

    def encode_text(self, x):
        return self.text(x)


class Pipeline:
    """A plain object with a module inside."""

    def __init__(self, shift=1.0):
        self.encoder = nn.Linear(4, 3).eval().requires_grad_(False)
        self.shift = shift
        self.words = ["a"]

    def encode(self, x):
        return self.encoder(x) + self.shift + len(self.words)

    def decode(self, x):
        return self.encoder(x) - self.shift


class Embedder:
    """A plain class with cached methods."""

    def __init__(self, shift=1.0):
        self.encoder = nn.Linear(4, 3).eval().requires_grad_(False)
        self.shift = shift

    @torchcache
    def encode(self, x):
        return self.encoder(x) + self.shift

    @torch.no_grad()
    @torchcache(max_memory_cache_size=1_000_000_000)
    def decode(self, x):
        """Decodes."""
        return self.encoder(x) - self.shift

    @torchcache
    @torch.no_grad()
    def describe(self, x):
        return self.encoder(x).sum(1)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    @torchcache
    def encode(self, x):
        return self.fc(x)

    def forward(self, x):
        return self.encode(x) + 1


class Loud(Body):
    def encode(self, x):
        return super().encode(x) * 10


class Louder(Body):
    @torchcache
    def encode(self, x):
        return super().encode(x) * 100


class Same(Body):
    """Inherits everything."""


@pytest.fixture
def x():
    return torch.randn(5, 4)


def texts(log):
    return [record.getMessage() for record in log]


def clip():
    return frozen(Clip())


def calls(obj):
    stats = cache_of(obj).stats()
    return stats.hits, stats.misses


# Names of methods


def test_the_named_methods_are_cached_and_no_others(x):
    model = clip()
    plain = model.encode_image(x), model.encode_text(x), model(x)
    assert torchcache(model, methods=("encode_image", "encode_text")) is model
    for _ in range(2):
        assert torch.equal(model.encode_image(x), plain[0])
        assert torch.equal(model.encode_text(x), plain[1])
    stats = model.cache_instance.stats
    assert (stats().hits, stats().misses) == (10, 10)
    assert (stats(method="encode_text").hits, stats("encode_text").misses) == (5, 5)
    assert stats().memory_rows == 10  # one budget
    with pytest.raises(
        OptionError, match="'forward': the method is not cached; cached are encode_image, encode_text"
    ):
        stats(method="forward")
    model(x)
    assert calls(model) == (20, 10)  # forward runs, and finds what it calls
    model = torchcache(clip(), methods=("forward", "encode_image"))
    assert torch.equal(model(x)[0], model(x)[0])
    assert cache_of(model).stats(method="forward").hits == 5
    model.encode_image(x)
    assert cache_of(model).stats("encode_image").misses == 5  # inside of forward it was not cached by itself


def test_a_method_that_mixes_items_does_not_stop_another(x, log):
    class Mixed(nn.Module):
        def mixing(self, x):
            return x - x.mean(0)

        def single(self, x):
            return x * 2

    model = torchcache(Mixed().eval(), methods=("mixing", "single"))
    for _ in range(3):
        assert torch.equal(model.mixing(x), x - x.mean(0))
        assert torch.equal(model.single(x), x * 2)
    assert cache_of(model).stats("mixing").bypasses == {"batch": 15}
    assert cache_of(model).stats("single").hits >= 5
    assert sum("Mixed.mixing: not cached" in text for text in texts(log)) == 1


class Named:
    @property
    def prop(self):
        return lambda x: x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def made(cls, x):
        return x

    def __call__(self, x):
        return x

    async def later(self, x):
        return x

    def __getattr__(self, name):
        if name == "passed_on":
            return abs
        raise AttributeError(name)


UNNAMED = [
    ("encode", "'encode': Named has no method"),
    ("passed_on", "'passed_on': Named has no method"),
    ("prop", "'prop': it is a property. Name the method that it calls"),
    ("static", "'static': it is a staticmethod"),
    ("made", "'made': it is a classmethod"),
    ("__call__", "in the body of Named"),
    ("later", "coroutine"),
]


@pytest.mark.parametrize("name, words", UNNAMED)
def test_what_cannot_be_named(name, words):
    named = Named()
    with pytest.raises(DecorationError, match=words):
        torchcache(named, methods=name)
    assert vars(named) == {}
    for wrong in ((), 3, (3,)):
        with pytest.raises(OptionError, match="methods="):
            torchcache(named, methods=wrong)
    with pytest.raises(DecorationError, match=r"it is a module. Decorate that: torchcache\(model.body\)"):
        torchcache(nn.ModuleDict({"body": nn.Linear(2, 2)}), methods="body")


def test_an_option_names_arguments_of_some_of_the_methods():
    class Texts:
        def lengths(self, texts):
            return torch.tensor([[float(len(text))] for text in texts])

        def shifted(self, x, shift):
            return x + shift

    obj = torchcache(Texts(), methods=("lengths", "shifted"), item_args=("texts",), shared_args=("shift",))
    for _ in range(2):
        assert obj.lengths(["a", "bb"]).tolist() == [[1], [2]]
        assert obj.shifted(torch.ones(3, 2), torch.ones(2)).tolist() == [[2, 2]] * 3
    assert calls(obj) == (7, 3)
    with pytest.raises(OptionError, match=r"item_args: .* has no parameter 'text'"):
        torchcache(Texts(), methods=("lengths", "shifted"), item_args=("text",))


# The bound method


def test_a_bound_method_is_cached_in_place(x):
    model = clip()
    plain = model.encode_image(x)
    encode = torchcache(model.encode_image)
    assert torch.equal(encode(x), plain) and torch.equal(model.encode_image(x), plain)
    assert calls(model) == (5, 5) == calls(encode)
    assert encode.__name__ == "encode_image" and encode.__self__ is model
    torchcache(model.encode_text)  # besides, with the same budget and one watch
    model.encode_text(x)
    assert calls(model) == (5, 10)
    assert cache_of(model).stats().memory_rows == 10


def test_what_is_returned_keeps_the_object_alive_and_the_object_itself_does_not(x):
    model = clip()
    reference, encode = weakref.ref(model), torchcache(model.encode_image)
    gc.disable()
    try:
        del model
        assert encode(x).shape == (5, 3)
        del encode
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("make", [Pipeline, Embedder])
def test_a_plain_object_and_its_rows_are_freed_at_once(make, x):
    obj = torchcache(make(), methods=("encode", "decode"))
    obj.encode(x), obj.decode(x)
    references = [weakref.ref(obj), *map(weakref.ref, obj.cache_instance.methods.values())]
    gc.disable()
    try:
        del obj
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


# State


EDITS = {
    "an attribute": lambda one: setattr(one, "shift", 7.0),
    "a list": lambda one: one.words.append("b"),
    "a weight": lambda one: one.encoder.weight.data.add_(1),
    "a weight in place": lambda one: one.encoder.bias.add_(1),
    "another module": lambda one: setattr(one, "encoder", nn.Linear(4, 3).requires_grad_(False)),
    "a new attribute": lambda one: setattr(one.encoder, "forward", lambda x: x[:, :3]),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("is_bound", [False, True])
def test_edits_of_a_plain_object_are_noticed(name, is_bound, x):
    pipeline = Pipeline()
    torchcache(pipeline.encode) if is_bound else torchcache(pipeline, methods="encode")
    pipeline.encode(x)
    EDITS[name](pipeline)
    plain = pipeline.encoder(x) + pipeline.shift + len(pipeline.words)
    assert torch.equal(pipeline.encode(x), plain)
    assert torch.equal(pipeline.encode(x), plain)


def test_what_forward_only_writes_counts_if_a_cached_method_reads_it(x):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = 1.0

        def forward(self, x):
            self.last = float(x.sum())
            return x

        def scaled(self, x):
            return x * self.last

    model = torchcache(Remembers().eval(), methods="scaled")
    for value in (2.0, 3.0):
        model(torch.full((1,), value))
        assert torch.equal(model.scaled(x), x * value)


def test_warmup_of_one_method(x):
    pipeline = torchcache(Pipeline(), methods=("encode", "decode"))
    with pytest.raises(
        OptionError, match="method=None: the method has to be named; cached are encode, decode"
    ):
        cache_of(pipeline).warmup(iter([x]))
    assert cache_of(pipeline).warmup(iter([x]), method="encode").computed == 5
    pipeline.encode(x)
    assert cache_of(pipeline).stats("encode").hits == 5
    model = torchcache(clip(), methods="encode_image")
    assert cache_of(model).warmup(iter([x])).computed == 5


class Parts:
    """One cached method calls another; so does that of an object around it."""

    def __init__(self):
        self.shift = 1.0

    def first(self, x):
        return x + self.shift

    def second(self, x):
        return self.first(x) * 2


class Around:
    def __init__(self, parts):
        self.parts = parts

    def third(self, x):
        return self.parts.second(x)


class ModuleParts(nn.Module):
    first, second, shift = Parts.first, Parts.second, 1.0

    def forward(self, x):
        return self.second(x)


@pytest.mark.parametrize("kind", [Parts, ModuleParts])
@pytest.mark.parametrize("is_inside", [False, True])
def test_a_method_that_is_replaced_is_noticed(kind, is_inside, x):
    parts = torchcache(kind(), methods=("first", "second"))
    call = torchcache(Around(parts).third) if is_inside else parts.second
    for _ in range(2):
        assert torch.equal(call(x), (x + 1) * 2)
    parts.first = lambda x: x - 5.0
    assert torch.equal(call(x), (x - 5) * 2)
    parts.first = lambda x: x - 6.0
    assert torch.equal(call(x), (x - 6) * 2)


@pytest.mark.parametrize("kind", [Parts, ModuleParts])
def test_what_is_put_in_an_object_changes_no_key(kind, x):
    hashes = set()
    for decorate in (
        lambda one: one,
        lambda one: torchcache(one, methods="first"),
        lambda one: torchcache(one, methods=("second", "first")),
        lambda one: uncache(torchcache(one, methods="first")),
    ):
        around = torchcache(Around(decorate(kind())), methods="third")
        around.third(x)
        hashes.add(cache_of(around).module_hash)
    assert len(hashes) == 1
    for method in ("first", "second"):  # each option but the usual one, of each method
        rounded = torchcache(kind(), methods=method, cache_dtype=torch.bfloat16)
        other = torchcache(Around(rounded), methods="third")
        hashes.add(cache_of(other).module_hash)
    assert len(hashes) == 3


# Rows


WAYS = {
    "methods": lambda obj, options: torchcache(obj, methods=("encode_image", "encode_text"), **options),
    "one method": lambda obj, options: torchcache(obj, methods="encode_image", **options),
    "another order": lambda obj, options: torchcache(obj, methods=("encode_text", "encode_image"), **options),
    "bound": lambda obj, options: [
        torchcache(method, **options) for method in (obj.encode_image, obj.encode_text)
    ],
}


def test_each_way_to_decorate_finds_the_same_rows(tmp_path, x):
    folders, options, before = set(), {"persistent_cache_dir": tmp_path}, dict(vars(Clip))
    for number, way in enumerate([*WAYS, "class"]):
        torch.manual_seed(1)
        if way == "class":
            obj = frozen(torchcache(methods=("encode_image", "encode_text"), **options)(Clip)())
        else:
            obj = clip()
            WAYS[way](obj, options)
        with torch.no_grad():
            obj.encode_image(x), "encode_text" in cache_of(obj).methods and obj.encode_text(x)
        folders.add(cache_of(obj).module_hash)
        assert (cache_of(obj).stats().misses == 0) == (number > 0), way
        cache_of(obj).close()
    for name, value in dict(vars(Clip)).items():
        if name not in before:
            delattr(Clip, name)
        elif value is not before[name]:
            setattr(Clip, name, before[name])
    assert len(folders) == 1


# In the body of a class


def test_methods_in_a_class_body(x):
    first, second = Embedder(), Embedder()
    for embedder in (first, second, first):
        assert torch.equal(embedder.encode(x), embedder.encoder(x) + 1)
        assert torch.equal(embedder.decode(x), embedder.encoder(x) - 1)
        assert torch.equal(embedder.describe(x), embedder.encoder(x).sum(1))
    assert calls(first) == (15, 15) and calls(second) == (0, 15)
    stats = [cache_of(one).stats().memory_rows for one in (first, second)]
    assert stats[0] == stats[1] >= 30  # all methods of all instances share one budget
    assert Embedder.decode.__doc__ == "Decodes."
    first.shift = 9.0
    assert torch.equal(first.encode(x), first.encoder(x) + 9)
    assert isinstance(cache_of(Embedder()), ModuleCache)  # before the first call too


@pytest.mark.parametrize("kind, factor", [(Body, 1), (Same, 1), (Louder, 100)])
def test_a_method_of_a_module_in_its_class_body(kind, factor, x):
    module = frozen(kind())
    for _ in range(2):
        assert torch.equal(module.encode(x), module.fc(x) * factor)
    assert calls(module) == (5, 5)
    module(x)
    assert calls(module) == (10, 5)
    with torch.no_grad():
        module.fc.weight.add_(1)
    assert torch.equal(module.encode(x), module.fc(x) * factor)


def test_a_subclass_that_overrides_is_not_mistaken(x):
    loud = frozen(Loud())
    for _ in range(2):
        assert torch.equal(loud.encode(x), loud.fc(x) * 10)
        assert torch.equal(super(Loud, loud).encode(x), loud.fc(x))
    with pytest.raises(DecorationError, match="is not cached"):
        cache_of(loud)
    louder = frozen(Louder())
    louder.encode(x)
    assert torch.equal(super(Louder, louder).encode(x), louder.fc(x))


def test_what_is_no_method_is_an_error(x):
    class Wrong:
        @staticmethod
        @torchcache
        def static(x):
            return x

        @classmethod
        @torchcache
        def made(cls, x):
            return x

        @property
        @torchcache
        def prop(self):
            return torch.ones(3)

    for call in (lambda: Wrong.static(x), lambda: Wrong.made(x), lambda: Wrong().prop):
        with pytest.raises(DecorationError, match="as a function outside of the class"):
            call()
    for kind in (staticmethod, property):
        with pytest.raises(DecorationError, match=f"a {kind.__name__}"):
            torchcache(kind(Pipeline.encode))


# Copies


COPIED = {
    "object": (lambda: torchcache(Pipeline(), methods=("encode", "decode")), "encode", "encoder"),
    "module": (lambda: torchcache(clip(), methods=("encode_image", "encode_text")), "encode_image", "image"),
    "class body": (Embedder, "encode", "encoder"),
    "class body of a module": (lambda: frozen(Body()), "encode", "fc"),
}


@pytest.mark.parametrize("made", COPIED)
@pytest.mark.parametrize("called", [False, True])
def test_copies_and_pickles(made, called, x):
    make, name, module = COPIED[made]
    obj = make()
    if called:
        getattr(obj, name)(x)
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    twins = [copy.deepcopy(obj), pickle.loads(pickle.dumps(obj)), torch.load(file, weights_only=False)]
    expected = getattr(obj, name)(x)
    for twin in twins:
        assert torch.equal(getattr(twin, name)(x), expected)
        assert cache_of(twin) is not cache_of(obj) and cache_of(twin).root is twin
        assert cache_of(twin).module_hash == cache_of(obj).module_hash
        assert list(cache_of(twin).methods) == list(cache_of(obj).methods)
        with torch.no_grad():
            getattr(twin, module).weight.mul_(2)
        assert not torch.equal(getattr(twin, name)(x), expected)
        assert torch.equal(getattr(obj, name)(x), expected)
        caches = cache_of(twin).methods.values()
        assert len({id(cache.keeper) for cache in caches}) == 1


# Again, and not any more


def test_a_cell_that_runs_twice(x):
    model = clip()
    torchcache(model, methods=("encode_image",))
    cache, method = cache_of(model), model.encode_image
    assert torchcache(model, methods=("encode_image",)) is model
    torchcache(model.encode_image)
    assert cache_of(model) is cache and model.encode_image is method
    torchcache(model, methods=("encode_text",))  # exactly these
    model.encode_image(x), model.encode_text(x)
    assert list(cache_of(model).methods) == ["encode_text"] and calls(model) == (0, 5)


def test_other_options_replace_the_cache_and_find_its_rows(tmp_path, x):
    model, pipeline = clip(), Pipeline()
    for policy in ("keep", "lru"):
        torchcache(persistent_cache_dir=tmp_path, policy=policy)(model)
        torchcache(pipeline.encode, persistent_cache_dir=tmp_path, policy=policy)
        model(x), pipeline.encode(x)
        for one in (model, pipeline):
            assert cache_of(one).settings.policy == policy
            assert calls(one) == ((0, 5) if policy == "keep" else (5, 0))


def test_another_method_stays_when_one_is_decorated_again(x):
    model = clip()
    torchcache(model.encode_image)
    torchcache(model.encode_text)
    model.encode_image(x), model.encode_text(x)
    torchcache(model.encode_text, policy="lru")
    model.encode_image(x), model.encode_text(x)
    assert cache_of(model).methods["encode_text"].settings.policy == "lru"
    assert cache_of(model).stats("encode_image").hits == 5


def test_a_function_is_decorated_again(x):
    def double(x):
        return x * 2

    cached = torchcache(double)
    assert torchcache(cached) is cached and cache_of(cached) is cached.cache_instance
    other = torchcache(policy="lru")(cached)
    assert other is not cached and cache_of(other).settings.policy == "lru"
    other(x), other(x)
    assert calls(other) == (5, 5)
    assert uncache(other) is double


def test_a_class_is_decorated_again():
    @torchcache
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    assert torchcache(Net) is Net
    assert torchcache(policy="lru")(Net) is Net
    assert cache_of(Net()).settings.policy == "lru"


def test_uncache_restores_an_object(x):
    model = clip()
    own = model.encode_text
    model.encode_text = lambda x: own(x) + 1
    fields = dict(vars(model))
    torchcache(model, methods=("forward", "encode_image", "encode_text"))
    model.encode_text(x)
    cache = cache_of(model)
    assert uncache(model) is model
    assert vars(model).keys() == fields.keys() and model.encode_text is fields["encode_text"]
    assert not hasattr(model, "cache_instance")
    assert cache.explain().startswith("not cached: the cache is closed") or cache.root is model
    for target in (model, model.encode_image, Clip, Clip.encode_image, 3):
        with pytest.raises(DecorationError, match="is not cached"):
            uncache(target)
        with pytest.raises(DecorationError, match="is not cached"):
            cache_of(target)


def test_uncache_one_method(x):
    model = clip()
    torchcache(model, methods=("encode_image", "encode_text"))
    plain = uncache(model.encode_image)
    assert plain.__func__ is Clip.encode_image and model.encode_image == plain
    model.encode_image(x), model.encode_text(x)
    assert calls(model) == (0, 5)
    uncache(model.encode_text)
    assert "cache_instance" not in vars(model)


def test_a_class_is_decorated_for_good(x):
    embedder = Embedder()
    for target in (embedder, Embedder, embedder.encode):
        with pytest.raises(DecorationError, match="remove it from Embedder"):
            uncache(target)
    with pytest.raises(DecorationError, match="is decorated for forward: name all at once"):
        torchcache(methods=("decode",))(torchcache(type("Net", (nn.Linear,), {"decode": nn.Linear.forward})))


def test_an_object_of_a_decorated_class_may_have_options_of_its_own(x):
    embedder = Embedder()
    embedder.encode(x)
    torchcache(embedder.encode, policy="lru")
    assert torch.equal(embedder.encode(x), embedder.encoder(x) + 1)
    assert cache_of(embedder).methods["encode"].settings.policy == "lru"
    embedder.decode(x), embedder.decode(x)
    assert cache_of(embedder).stats("decode").hits == 5
    uncache(embedder)
    embedder.encode(x)
    assert cache_of(embedder).settings.policy == "keep"


# Shallow copies


class Copied(Pipeline):
    def __copy__(self):
        twin = Copied.__new__(Copied)
        vars(twin).update(vars(self), words=["b", "c"])
        return twin


@pytest.mark.parametrize("kind", [Pipeline, Copied])
def test_a_shallow_copy_computes_with_what_it_has(x, kind):
    model = kind()
    expected, other = model.encode(x), copy.copy(model)
    other.shift += 2
    cached = torchcache(model, methods=("encode", "decode"))
    assert torch.equal(cached.encode(x), expected)
    twin = copy.copy(cached)
    twin.shift += 2
    for _ in range(2):
        assert torch.equal(twin.encode(x), other.encode(x)) and torch.equal(cached.encode(x), expected)
        assert torch.equal(twin.decode(x), other.decode(x))
    assert type(twin) is kind and set(vars(twin)) == set(vars(cached))
    assert cache_of(twin) is not cache_of(cached) and cache_of(twin).stats(method="encode").misses == len(x)
    uncache(twin)
    assert torch.equal(twin.encode(x), other.encode(x)) and cached.encode.__self__ is cached


class Global(Pipeline):
    def __reduce__(self):
        return "GLOBAL"


def test_an_object_that_pickles_as_a_name_is_its_own_shallow_copy(x):
    pipeline = torchcache(Global(), methods="encode")
    assert copy.copy(pipeline) is pipeline


def test_a_shallow_copy_of_a_module_computes_with_what_it_has(x):
    clip = torchcache(frozen(Clip()))
    twin = copy.copy(clip)
    twin.scale = 3.0
    assert torch.equal(twin(x)[0], clip.image(x).mul(3.0).sum(1)) and twin.encode_image.__self__ is twin
    assert torch.equal(clip(x)[0], clip.image(x).mul(2.0).sum(1))
    again = copy.copy(twin)
    assert torch.equal(again(x)[0], twin(x)[0]) and cache_of(again).stats().misses == 0
    other = copy.copy(frozen(Clip()))  # the class has been told how to copy
    assert not hasattr(other, "cache_instance") and other(x)[0].shape == (len(x),)


def test_a_method_without_its_object_says_what_to_do(x):
    with pytest.raises(ReferenceError, match=r"keep it, or what torchcache\(object.encode\) returns"):
        torchcache(Pipeline(), methods="encode").encode(x)


# torch.compile, replicas, ranks


@pytest.mark.parametrize(
    "make", [lambda: torchcache(clip(), methods=("encode_image", "encode_text")), lambda: frozen(Body())]
)
def test_compiled_around(make, x):
    model = make()
    name = "encode_image" if isinstance(model, Clip) else "encode"
    plain = getattr(model, name)(x)

    @torch.compile(backend="eager")
    def both(x):
        return getattr(model, name)(x) + 1

    for _ in range(3):
        assert torch.equal(both(x), plain + 1)
    assert calls(model)[0] >= 15 and sum(calls(model)) == 20
    other = torch.randn(3, 4)
    assert torch.equal(both(other), getattr(model, name)(other) + 1)
    torch.compiler.reset()


def test_replicas_have_methods_of_their_own(x):
    model = torchcache(clip(), methods=("encode_image",))
    replica = model._replicate_for_data_parallel()
    assert replica.encode_image.__self__ is replica
    assert torch.equal(replica.encode_image(x), model.encode_image(x)) and calls(model) == (0, 5)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_a_method_inside_of_distributed_data_parallel(x, one_rank):
    model = torchcache(clip(), methods=("encode_image",))
    for parameter in model.text.parameters():
        parameter.requires_grad_(True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        for _ in range(2):
            wrapped.module.encode_image(x), wrapped(x)
    assert cache_of(wrapped.module).stats().bypasses == {}
    assert calls(model) == (15, 5)


def test_a_function_in_a_comprehension_is_no_method():
    (double,) = [torchcache(lambda x: 2 * x) for _ in range(1)]
    for _ in range(2):
        assert double(torch.ones(2, 3)).tolist() == [[2, 2, 2]] * 2
    assert cache_of(double).stats().hits == 3
