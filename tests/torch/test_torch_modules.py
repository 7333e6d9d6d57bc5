"""Modules and tensors that PyTorch's tools make, one by one.

Right is what the same module or function returns without a cache, after the same was done to it.
"""

import contextlib
import copy
import functools
import operator
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, stack_module_state
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import fusion, parametrizations, parametrize, prune, stateless
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.helpers.outputs import assert_same, bypasses, frozen, hits, misses, warnings_in
from torchcache2 import UnhashableArgumentError, torchcache

WEIGHT_NORM = "ignore:.torch.nn.utils.weight_norm. is deprecated"
STATELESS = "ignore:.torch.nn.utils.stateless.functional_call. is deprecated"
AO_QUANTIZATION = "ignore:torch.ao.quantization is deprecated"
QUANTIZED_TENSORS = "ignore:torch.quantize_per_tensor, torch.quantize_per_channel"
TRACED = "ignore:.*torch.jit"
NESTED = "ignore:The PyTorch API of nested tensors"
SPARSE = "ignore:Sparse .* tensor support is in beta"
OLD_CHECKPOINT = "ignore:.torch.cpu.amp.autocast"
LAZY = "ignore:Lazy modules are a new feature"


def fractions(*shape, seed):
    """Numbers with so few bits that sums of products are exact in float32.

    Batches of another size may otherwise round differently.
    """
    return torch.randint(-300, 301, shape, generator=torch.Generator().manual_seed(seed)) / 64


X = fractions(6, 8, seed=1)
Y = fractions(6, 8, seed=2)


def exact(module):
    """Small integers for weights."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    return module


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 4)
        exact(self)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class Outer(nn.Module):
    """A model around another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.head = exact(nn.Linear(4, 3))

    def forward(self, x):
        return self.head(self.inner(x) * 2)


def as_class(kind=Net):
    # A new one each time: all instances of a decorated class share their rows.
    return torchcache(type(kind.__name__, (kind,), {}))()


def as_instance(kind=Net):
    return torchcache(kind())


MAKERS = pytest.mark.parametrize("make", [as_class, as_instance])


def assert_close(left, right):
    torch.testing.assert_close(left, right)


def assert_hit(cached, plain, x=X):
    """Right twice, and found the second time in the cache of the module or of its part."""
    assert_same(cached(x), plain(x))
    before = hits(cache_of(cached))
    assert_same(cached(x), plain(x))
    assert hits(cache_of(cached)) == before + len(x)


def cache_of(module):
    return getattr(module, "inner", module)


def assert_found(cached, plain, x=X, same=assert_same):
    """Right, computed at most once, and right again in part."""
    same(cached(x), plain(x))
    before = hits(cached)
    same(cached(x), plain(x))
    assert hits(cached) == before + len(x), cached.cache_instance.stats()
    same(cached(x.flip(0)), plain(x.flip(0)))
    assert hits(cached) == before + 2 * len(x)


def assert_found_at_last(cached, plain, x=X, same=assert_same):
    """As `assert_found`, after one call in which a hook assigns what it derives from a change."""
    same(cached(x), plain(x))
    before = bypasses(cached)
    assert_found(cached, plain, x, same)
    assert bypasses(cached) == before and sum(before.values()) <= 12


def twins(make, kind=Net):
    return frozen(make(kind)), frozen(kind())


def on_both(change, *modules):
    return [change(module) for module in modules]


# Changes of modules: (before the first call, after it). Each is done to the cached and to the plain one.


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, weight):
        return weight * self.scale


@torch.no_grad()
def multiply(tensor, factor=2):
    tensor.mul_(factor)


def parametrized(part):
    return lambda m: frozen(parametrize.register_parametrization(m.first, "weight", part()) and m)


symmetric = parametrized(Symmetric)
scaled = parametrized(lambda: Scaled((8, 8)))


def replace_original(module):
    module.first.parametrizations.weight.original = nn.Parameter(
        module.first.parametrizations.weight.original.detach() * 2, requires_grad=False
    )


def assign_through(module):
    # The setter runs right_inverse, if there is one, and writes to the original.
    class Halved(nn.Module):
        def forward(self, weight):
            return weight / 2

        def right_inverse(self, weight):
            return weight * 2

    parametrize.register_parametrization(module.first, "weight", Halved())
    module.first.weight = torch.ones(8, 8)
    frozen(module)


def of_root(module):
    module.register_parameter("gain", nn.Parameter(torch.ones(4), requires_grad=False))
    parametrize.register_parametrization(module, "gain", Scaled((4,)))
    frozen(module)


class Gained(Net):
    def forward(self, x):
        return super().forward(x) * (self.gain if hasattr(self, "gain") else 1)


def original(module):
    return module.first.parametrizations.weight.original


def first(change, *args):
    """Applied to the first layer, after which the module is frozen again."""
    return lambda m: frozen(seeded(change, m.first, *args) and m)


def nothing(module):
    """What is done before the first call is nothing."""


PARAMETRIZATIONS = {
    "the original, in place": (symmetric, lambda m: multiply(original(m))),
    "the original, replaced": (symmetric, replace_original),
    # Symmetric() reads the upper triangle only: another namespace, the same outputs.
    "a part that does not show": (symmetric, lambda m: original(m).tril_(-1).add_(m.first.weight.triu())),
    "registered late": (nothing, symmetric),
    "a second one": (symmetric, scaled),
    "its own parameter": (scaled, lambda m: multiply(m.first.parametrizations.weight[0].scale)),
    "through the setter": (nothing, assign_through),
    "removed": (scaled, lambda m: parametrize.remove_parametrizations(m.first, "weight")),
    "removed, unparametrized": (
        scaled,
        lambda m: parametrize.remove_parametrizations(m.first, "weight", leave_parametrized=False),
    ),
    "of the root": (of_root, lambda m: multiply(m.parametrizations.gain[0].scale)),
    "weight norm": (
        first(parametrizations.weight_norm),
        lambda m: multiply(m.first.parametrizations.weight.original0),
    ),
    "weight norm, old": (first(nn.utils.weight_norm), lambda m: multiply(m.first.weight_g)),
    "weight norm, old, removed": (first(nn.utils.weight_norm), first(nn.utils.remove_weight_norm)),
    "spectral norm": (first(parametrizations.spectral_norm), lambda m: original(m).add_(torch.eye(8))),
    "spectral norm, old": (
        first(nn.utils.spectral_norm),
        lambda m: m.first.weight_orig.add_(torch.eye(8)),
    ),
    "spectral norm, its vector": (first(nn.utils.spectral_norm), lambda m: m.first.weight_u.add_(1)),
    "orthogonal": (first(parametrizations.orthogonal), lambda m: original(m).add_(torch.eye(8))),
}


def seeded(function, *args):
    torch.default_generator.manual_seed(11)
    return function(*args)


@pytest.mark.filterwarnings(WEIGHT_NORM)
@MAKERS
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.one_in(8)
def test_parametrizations(name, make):
    prepare, change = PARAMETRIZATIONS[name]
    cached, plain = twins(make, Gained)
    on_both(prepare, cached, plain)
    assert_found_at_last(cached, plain, same=assert_close)
    old = cached.cache_instance.module_hash
    on_both(change, cached, plain)
    assert_found_at_last(cached, plain, same=assert_close)
    assert cached.cache_instance.module_hash != old
    if "old" not in name and "its vector" not in name:
        assert bypasses(cached) == {}


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm])
@MAKERS
def test_spectral_norm_in_training_is_not_cached_and_moves_on(norm, make):
    # Its power iteration writes to buffers at every call.
    cached, plain = twins(make)
    on_both(lambda m: seeded(norm, m.first), cached, plain)
    for _ in range(2):
        on_both(nn.Module.train, cached, plain)
        with torch.no_grad():
            for _ in range(3):
                assert_close(cached(X), plain(X))
            on_both(nn.Module.eval, cached, plain)
            assert_found(cached, plain, same=assert_close)
    assert_close(cached.state_dict(), plain.state_dict())
    assert hits(cached) == 2 * 12


@MAKERS
def test_weights_that_parametrize_keeps_do_not_outlive_them(make):
    cached, plain = twins(make)
    on_both(scaled, cached, plain)
    assert_found(cached, plain)
    for _ in range(2):
        with parametrize.cached():
            for _ in range(2):
                assert_same(cached(Y), plain(Y))
                # Until the context ends, the plain module computes with the weight that it had.
                on_both(lambda m: multiply(m.first.parametrizations.weight.original), cached, plain)
        assert_same(cached(Y), plain(Y))
    assert_found(cached, plain)


# Pruning


def global_prune(module):
    parameters = [(module.first, "weight"), (module.second, "weight")]
    prune.global_unstructured(parameters, pruning_method=prune.L1Unstructured, amount=0.3)


def half_mask():
    return (torch.arange(64).view(8, 8) % 2).float()


PRUNE = {
    "random": lambda m: seeded(prune.random_unstructured, m.first, "weight", 0.4),
    "random, structured": lambda m: seeded(prune.random_structured, m.first, "weight", 0.4, 0),
    "l1": lambda m: prune.l1_unstructured(m.first, "weight", 0.4),
    "ln, structured": lambda m: prune.ln_structured(m.first, "weight", 0.4, 2, 1),
    "from a mask": lambda m: prune.custom_from_mask(m.first, "weight", half_mask()),
    "global": global_prune,
    "twice": lambda m: [prune.l1_unstructured(m.first, "weight", 0.2) for _ in range(2)],
    "nothing": lambda m: prune.identity(m.first, "weight"),
    "weight and bias": lambda m: [prune.l1_unstructured(m.first, name, 0.4) for name in ("weight", "bias")],
}
AFTER_PRUNING = {
    "the mask, in place": lambda m: m.first.weight_mask.logical_not_(),
    "the mask, replaced": lambda m: setattr(m.first, "weight_mask", 1 - m.first.weight_mask),
    "the original": lambda m: multiply(m.first.weight_orig),
    "more": lambda m: prune.l1_unstructured(m.first, "weight", 0.5),
    "removed": lambda m: prune.remove(m.first, "weight"),
    "removed and edited": lambda m: (prune.remove(m.first, "weight"), multiply(m.first.weight)),
}


@MAKERS
@pytest.mark.parametrize("change", AFTER_PRUNING)
@pytest.mark.parametrize("name", PRUNE)
@pytest.mark.one_in(16)
def test_pruning(name, change, make):
    cached, plain = twins(make)
    assert_found_at_last(cached, plain)
    on_both(PRUNE[name], cached, plain)
    frozen(cached), frozen(plain)
    assert_found_at_last(cached, plain)
    on_both(AFTER_PRUNING[change], cached, plain)
    frozen(cached), frozen(plain)
    assert_found_at_last(cached, plain)


def test_pruning_of_the_cached_module_itself():
    # Its hook assigns the weight before each forward.
    cached, plain = torchcache(frozen(exact(nn.Linear(8, 4)))), frozen(exact(nn.Linear(8, 4)))
    for change in (
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
        lambda m: m.weight_mask.logical_not_(),
        lambda m: prune.remove(m, "weight"),
    ):
        on_both(change, cached, plain)
        frozen(cached), frozen(plain)
        assert_found_at_last(cached, plain)


# Quantization


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.lstm(x.view(len(x), 2, 4))[0][:, -1])


def quantize_dynamically(kind):
    return torch.ao.quantization.quantize_dynamic(frozen(kind()), {nn.Linear, nn.LSTM}, dtype=torch.qint8)


@pytest.mark.filterwarnings(AO_QUANTIZATION, QUANTIZED_TENSORS)
@pytest.mark.parametrize("kind", [Net, Recurrent])
@pytest.mark.cpu_only
def test_dynamic_quantization_depends_on_the_batch(kind):
    # The scale of the activations is that of the whole batch: an item has no output of its own.
    cached, plain = torchcache(quantize_dynamically(kind)), quantize_dynamically(kind)
    wide = torch.cat([X, Y * 20])
    assert not torch.equal(plain(wide)[:6], plain(X))
    for batch in (X, X, wide, X[:2], torch.cat([X[:1], Y * 50])):
        assert_same(cached(batch), plain(batch))
    assert hits(cached) + sum(bypasses(cached).values()) >= 6
    (advice, *_) = cached.cache_instance.explain().splitlines()
    assert "quantize statically" in advice and "batch_first" not in advice


def quantized_weight(seed):
    weight = fractions(4, 2, 3, 3, seed=seed).clamp(-2, 2)
    return torch.quantize_per_tensor(weight, 0.25, 0, torch.qint8)


class Quantized(nn.Module):
    """A convolution of static scales: of each item alone."""

    def __init__(self):
        super().__init__()
        self.conv = torch.ao.nn.quantized.Conv2d(2, 4, 3)
        self.conv.scale, self.conv.zero_point = 0.5, 64
        self.conv.set_weight_bias(quantized_weight(1), torch.zeros(4))

    def forward(self, x):
        x = torch.quantize_per_tensor(x.view(-1, 2, 4, 4), 0.125, 64, torch.quint8)
        return self.conv(x).dequantize()


@pytest.mark.filterwarnings(AO_QUANTIZATION, QUANTIZED_TENSORS)
@MAKERS
@pytest.mark.cpu_only
def test_a_quantized_convolution(make):
    cached, plain = make(Quantized).eval(), Quantized().eval()
    x = fractions(5, 32, seed=4)
    assert_found(cached, plain, x)
    for change in (
        lambda m: m.conv.set_weight_bias(quantized_weight(2), torch.zeros(4)),
        lambda m: m.conv.set_weight_bias(quantized_weight(2), torch.ones(4)),
        lambda m: setattr(m.conv, "scale", 1.0),
        lambda m: setattr(m.conv, "zero_point", 32),
    ):
        before = cached(x)
        on_both(change, cached, plain)
        assert_found(cached, plain, x)
        assert not torch.equal(cached(x), before)


# DataParallel


def replicate(module, copies):
    """What torch.nn.parallel.replicate() makes, with copies on the same device.

    The tensors of a replica are copies; those that were parameters are plain attributes.
    """
    modules = list(module.modules())
    positions = {id(m): i for i, m in enumerate(modules)}
    replicas = []
    for _ in range(copies):
        parts = [m._replicate_for_data_parallel() for m in modules]
        for original, part in zip(modules, parts, strict=True):
            part._former_parameters = {}
            for name, child in original._modules.items():
                part._modules[name] = None if child is None else parts[positions[id(child)]]
            for name, parameter in original._parameters.items():
                if parameter is None:
                    part._parameters[name] = None
                else:
                    setattr(part, name, parameter.detach().clone())
                    part._former_parameters[name] = getattr(part, name)
            for name, buffer in original._buffers.items():
                if buffer is not None:
                    setattr(part, name, buffer.clone())
        replicas.append(parts[0])
    return replicas


def in_threads(calls):
    outputs = [None] * len(calls)

    def run(i):
        with torch.no_grad():
            outputs[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outputs


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", fractions(8, seed=9))

    def forward(self, x):
        return super().forward(x - self.mean)


def test_replicas_of_the_helper_are_those_of_torch():
    module = Normed()
    for replica in replicate(module, 2):
        assert replica._is_replica and not list(replica.parameters())
        assert replica.first is not module.first and replica.first.weight is not module.first.weight
        assert_same(replica(X), module(X).detach())


@MAKERS
def test_data_parallel(make):
    cached, plain = twins(make, Normed)
    parallel = nn.DataParallel(cached)  # without a second device it calls the module itself
    for _ in range(2):
        assert_same(parallel(X), plain(X))
    assert hits(cached) == 6


@pytest.mark.parametrize("warm", [False, True])
@MAKERS
def test_replicas_compute_with_what_they_have_and_are_not_cached(make, warm):
    cached, plain = twins(make, Normed)
    if warm:
        assert_found(cached, plain)
    before = (misses(cached), hits(cached))
    for _ in range(3):
        replicas = replicate(cached, 2)
        halves = in_threads([lambda r=r, x=x: r(x) for r, x in zip(replicas, X.split(3), strict=True)])
        assert_same(torch.cat(halves), plain(X))
        multiply(replicas[0].first.weight)
        assert not torch.equal(replicas[0](X), plain(X))
    assert (misses(cached), hits(cached)) == before
    assert_found(cached, plain)
    on_both(lambda m: multiply(m.first.weight), cached, plain)
    for replica in replicate(copy.deepcopy(cached), 2):
        assert_same(replica(X), plain(X))


@MAKERS
def test_replicas_that_train(make):
    cached, plain = make(Net), Net()
    gradients = []
    for module in (cached, plain):
        (replica,) = replicate(module, 1)
        weight = replica.second.weight.requires_grad_()
        replica(X).square().sum().backward()
        gradients.append(weight.grad)
    assert gradients[0] is not None
    assert_same(*gradients)


# Tied weights and shared submodules


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = exact(nn.Linear(8, 8, bias=False))
        self.decoder = nn.Linear(8, 8, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))


class TellsTied(Tied):
    def forward(self, x):
        y = super().forward(x)
        return y if self.encoder.weight is self.decoder.weight else -y


def untie(module):
    module.decoder.weight = nn.Parameter(module.encoder.weight.detach().clone(), requires_grad=False)


def tie(module):
    module.decoder.weight = module.encoder.weight


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = exact(nn.Linear(8, 8))
        self.again = self.layer

    def forward(self, x):
        return self.again(self.layer(x))


TYING = [
    lambda m: multiply(m.encoder.weight),
    untie,
    lambda m: multiply(m.encoder.weight),
    lambda m: multiply(m.decoder.weight, 4),
    tie,
]
SHARING = [
    lambda m: multiply(m.layer.weight),
    lambda m: setattr(m, "again", copy.deepcopy(m.layer)),
    lambda m: multiply(m.again.weight),
    lambda m: setattr(m, "layer", m.again),
    lambda m: setattr(m, "again", m.layer),  # changes nothing
]


@MAKERS
@pytest.mark.parametrize(
    "kind, changes, same", [(Tied, TYING, 0), (TellsTied, TYING, 0), (Twice, SHARING, 1)]
)
def test_tied_weights_and_shared_submodules(kind, changes, same, make):
    cached, plain = twins(make, kind)
    assert_found(cached, plain)
    hashes = [cached.cache_instance.module_hash]
    for change in changes:
        on_both(change, cached, plain)
        assert_found(cached, plain)
        hashes.append(cached.cache_instance.module_hash)
    assert len(set(hashes)) == len(hashes) - same


# Replacing modules and parameters


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.named = nn.ModuleDict({"a": nn.Linear(16, 16)})
        self.norm = nn.BatchNorm1d(16)
        exact(self)

    def forward(self, x):
        y = self.stem(x.view(-1, 1, 2, 4)).flatten(1)
        for block in self.blocks:
            y = block(y) / 16
        for block in self.named.values():
            y = block(y) / 16
        return self.norm(y) if self.norm is not None else y


def fuse_conv(module):
    module.stem = nn.Sequential(fusion.fuse_conv_bn_eval(module.stem[0], module.stem[1]), nn.ReLU())


def fuse_conv_in_place(module):
    module.stem[0] = fusion.fuse_conv_bn_eval(module.stem[0], module.stem[1])
    module.stem[1] = nn.Identity()


def fuse_linear(module):
    module.named["a"] = fusion.fuse_linear_bn_eval(module.named["a"], module.norm)
    module.norm = None


def other_linear(seed):
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-3, 4, (16, 16), generator=torch.Generator().manual_seed(seed)))
        layer.bias.zero_()
    return frozen(layer)


def swap_blocks(module):
    module.blocks[0], module.blocks[1] = module.blocks[1], module.blocks[0]


def swap_contents(module):
    for name in ("weight", "bias"):
        torch.utils.swap_tensors(getattr(module.blocks[0], name), getattr(module.blocks[1], name))


def load(module):
    module.load_state_dict({name: tensor.clone().mul_(2) for name, tensor in module.state_dict().items()})


CHANGES = {
    "fused convolution": fuse_conv,
    "fused in place": fuse_conv_in_place,
    "fused linear": fuse_linear,
    "inserted": lambda m: m.blocks.insert(0, other_linear(3)),
    "deleted": lambda m: m.blocks.__delitem__(0),
    "in a dict": lambda m: m.named.update({"b": other_linear(5)}),
    "popped": lambda m: m.named.pop("a"),
    "two swapped": swap_blocks,
    "swapped tensors": swap_contents,
    "loaded": load,
}


@MAKERS
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.one_in(2)
def test_replaced_parts_are_noticed(name, make):
    cached, plain = twins(make, Blocks)
    assert_found(cached, plain, same=assert_close)
    on_both(CHANGES[name], cached, plain)
    frozen(cached), frozen(plain)
    assert_found(cached, plain, same=assert_close)
    assert bypasses(cached) == {}
    if not name.startswith("fused"):
        assert not torch.allclose(plain(X), frozen(Blocks())(X))


# Lazy modules


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.LazyConv1d(2, 3)
        self.norm = nn.LazyBatchNorm1d()
        self.linear = nn.LazyLinear(4)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x[:, None])).flatten(1))


LAZIES = {
    "class": (lambda: as_class(Lazy), Lazy),
    "instance": (lambda: as_instance(Lazy), Lazy),
    "itself": (lambda: torchcache(nn.LazyLinear(4)), lambda: nn.LazyLinear(4)),
}


@pytest.mark.filterwarnings(LAZY)
@pytest.mark.parametrize("name", LAZIES)
@torch.no_grad()
def test_lazy_modules(name):
    cached, plain = (make().eval() for make in LAZIES[name])
    outputs = []
    for module in (cached, plain):
        torch.default_generator.manual_seed(3)
        outputs.append(module(X))
    assert_same(*outputs)
    assert type(getattr(cached, "linear", cached)) is nn.Linear
    assert_found(cached, plain)
    assert bypasses(cached) == ({} if name == "itself" else {"lazy": 6})


@pytest.mark.filterwarnings(LAZY)
@MAKERS
def test_lazy_modules_that_are_loaded(make):
    source = Lazy().eval()
    with torch.no_grad():
        source(X)
        cached = make(Lazy).eval()
        cached.load_state_dict(source.state_dict())
        for _ in range(2):
            assert_same(cached(X), source(X))
        assert_found(cached, source)


# Other weights for one call


def changed_weights(module, factor):
    return {name: parameter.detach() * factor for name, parameter in module.named_parameters()}


@pytest.mark.filterwarnings(STATELESS)
@pytest.mark.parametrize("call", [functional_call, stateless.functional_call])
@MAKERS
@pytest.mark.one_in(2)
def test_functional_call(call, make):
    cached, plain = twins(make)
    weights = changed_weights(plain, 1)
    for _ in range(2):
        assert_same(cached(X), plain(X))
        for factor in (2, 3, -1):
            for tensor in weights.values():
                tensor.mul_(factor)
            # Equal weights are one namespace, whoever holds them, and in whatever tensors.
            for same in (weights, {name: tensor.clone() for name, tensor in weights.items()}):
                for batch in (X, Y):
                    assert_same(call(cached, same, (batch,)), call(plain, same, (batch,)))
            assert_same(cached(X), plain(X))
    assert hits(cached) >= 2 * 3 * (12 + 6)


SOME = {
    "a buffer": (Normed, lambda m: {"mean": X[0]}, {}),
    "a weight": (Normed, lambda m: {"first.weight": Y[:1].expand(8, 8)}, {}),
    "none": (Normed, lambda m: {}, {}),
    "tied": (Tied, lambda m: {"encoder.weight": m.encoder.weight * 2}, {"tie_weights": True}),
    "one of two tied": (Tied, lambda m: {"encoder.weight": m.encoder.weight * 2}, {"tie_weights": False}),
}


@MAKERS
@pytest.mark.parametrize("name", SOME)
def test_functional_call_with_some_weights_and_buffers(name, make):
    kind, some, options = SOME[name]
    cached, plain = twins(make, kind)
    for batch in (X, X, Y):
        outputs = [functional_call(one, some(plain), (batch,), **options) for one in (cached, plain)]
        assert_same(*outputs)
    assert_same(cached(X), plain(X))


@MAKERS
def test_functional_call_with_gradients(make):
    cached, plain = twins(make)
    cached(X)
    gradients = []
    for module in (cached, plain):
        weights = {n: p.requires_grad_() for n, p in changed_weights(plain, 2).items()}
        functional_call(module, weights, (X,)).square().sum().backward()
        gradients.append({name: weight.grad for name, weight in weights.items()})
    assert_same(*gradients)
    assert bypasses(cached) == {"grad": 6}
    assert_found(cached, plain)


# Transforms


def cached_targets():
    """Cached callables of (6, 8), each with the plain one."""
    net = frozen(Net())
    return {
        "function": lambda: (torchcache(lambda x: net(x)), net),
        "class": lambda: twins(as_class),
        "instance": lambda: twins(as_instance),
    }


TARGETS = pytest.mark.parametrize("target", cached_targets())
WARM = pytest.mark.parametrize("warm", [False, True])


def targets(name, warm):
    cached, plain = cached_targets()[name]()
    if warm:
        assert_found(cached, plain)
    return cached, plain


TRANSFORMS = {
    "vmap": lambda f: torch.func.vmap(f)(X.view(2, 3, 8)),
    "vmap over items": lambda f: torch.func.vmap(lambda x: f(x[None])[0])(X),
    "vmap of vmap": lambda f: torch.func.vmap(torch.func.vmap(lambda x: f(x[None])[0]))(X.view(2, 3, 8)),
    "vmap, another dimension": lambda f: torch.func.vmap(f, in_dims=1, out_dims=1)(X.view(3, 2, 8)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum())(X),
    "grad and value": lambda f: torch.func.grad_and_value(lambda x: f(x).square().sum())(X),
    "grad for each item": lambda f: torch.func.vmap(torch.func.grad(lambda x: f(x[None]).square().sum()))(X),
    "vjp": lambda f: torch.func.vjp(f, X)[1](torch.ones(6, 4)),
    "jvp": lambda f: torch.func.jvp(f, (X,), (Y,)),
    "jacrev": lambda f: torch.func.jacrev(f)(X),
    "jacfwd": lambda f: torch.func.jacfwd(f)(X),
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).square().sum())(X[:2]),
    "functionalize": lambda f: torch.func.functionalize(f)(X),
    "autograd jacobian": lambda f: torch.autograd.functional.jacobian(f, X),
    "make_fx": lambda f: [g := make_fx(f)(X), g(X), g(Y)][1:],
    "make_fx, fake": lambda f: [
        g := make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(X),
        g(X),
        g(Y),
    ][1:],
    "make_fx, symbolic": lambda f: [
        g := make_fx(f, tracing_mode="symbolic", _allow_non_fake_inputs=True)(X),
        g(X),
        g(Y[:4]),
    ][1:],
    "make_fx of a gradient": lambda f: make_fx(torch.func.grad(lambda x: f(x).square().sum()))(X)(Y),
}


@functools.cache
def transformed(name):
    """What a transform of the plain module gives; all targets have its weights."""
    return TRANSFORMS[name](frozen(Net()))


@pytest.mark.filterwarnings(TRACED)
@WARM
@TARGETS
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.one_in(12)
def test_transforms_run_the_plain_forward(name, target, warm):
    cached, plain = targets(target, warm)
    for _ in range(2):
        assert_same(TRANSFORMS[name](cached), transformed(name))
    assert_found(cached, plain)
    assert_found(cached, plain, Y)


def test_an_ensemble_of_functional_calls():
    models = [frozen(Net()) for _ in range(3)]
    for factor, model in enumerate(models):
        multiply(model.first.weight, factor)
    cached, plain = twins(as_instance)
    parameters, buffers = stack_module_state(models)
    outputs = [
        torch.func.vmap(lambda p, b, m=m: functional_call(m, (p, b), (X,)))(parameters, buffers)
        for m in (cached, plain)
    ]
    assert_same(*outputs)
    assert_same(outputs[0], torch.stack([model(X) for model in models]))
    assert_found(cached, plain)


@pytest.mark.filterwarnings(TRACED)
@WARM
@TARGETS
def test_forward_mode_gradients(target, warm):
    cached, plain = targets(target, warm)

    def tangent(f, x, direction):
        with forward_ad.dual_level():
            output = f(forward_ad.make_dual(x, direction))
            return tuple(forward_ad.unpack_dual(output))

    for direction in (torch.ones_like(X), Y):
        assert_same(tangent(cached, X, direction), tangent(plain, X, direction))
    with forward_ad.dual_level():
        assert_same(cached(X), plain(X))
    assert_found(cached, plain)


@pytest.mark.filterwarnings(TRACED)
@MAKERS
def test_weights_with_forward_mode_gradients(make):
    cached, plain = twins(make)
    cached(X)
    outputs = []
    for module in (cached, plain):
        with forward_ad.dual_level():
            weight = forward_ad.make_dual(plain.first.weight, torch.ones(8, 8))
            output = functional_call(module, {"first.weight": weight}, (X,))
            outputs.append(tuple(forward_ad.unpack_dual(output)))
    assert outputs[0][1] is not None
    assert_same(*outputs)


# Fake and meta tensors


def fake_mode(**options):
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(**options)


@WARM
@TARGETS
def test_fake_tensors(target, warm):
    cached, plain = targets(target, warm)
    before = cached.cache_instance.stats().memory_rows
    for _ in range(2):
        mode = fake_mode(allow_non_fake_inputs=True)
        with mode:
            fake = mode.from_tensor(X)
            outputs = [f(fake) for f in (cached, plain)]
            assert {(type(o), o.shape, o.dtype) for o in outputs} == {
                (type(outputs[1]), (6, 4), torch.float32)
            }
    assert cached.cache_instance.stats().memory_rows == before
    assert_found(cached, plain)


@MAKERS
def test_a_module_made_of_fake_tensors(make):
    with fake_mode():
        cached, plain = nn.Linear(8, 4), nn.Linear(8, 4)
        cached = torchcache(cached) if make is as_instance else as_class(Net)
        output, x = cached(torch.empty(6, 8)), torch.empty(6, 8)
        assert output.shape == (6, 4) and type(output) is type(plain(x))
    assert cached.cache_instance.stats().memory_rows == 0


@WARM
@TARGETS
def test_meta_tensors(target, warm):
    cached, plain = targets(target, warm)
    if target == "function":
        cached, plain = torchcache(lambda x: x.sum(1)), lambda x: x.sum(1)
    else:
        on_both(lambda m: m.to("meta"), cached, plain)
    before = cached.cache_instance.stats().memory_rows
    for _ in range(2):
        output, expected = (f(torch.empty(6, 8, device="meta")) for f in (cached, plain))
        assert output.device.type == "meta" and output.shape == expected.shape
    assert cached.cache_instance.stats().memory_rows == before


@MAKERS
@pytest.mark.cpu_only
def test_a_module_that_was_made_on_meta(make):
    with torch.device("meta"):
        cached = frozen(make(Net)) if make is as_instance else None
    if cached is None:
        cached = frozen(make(Net)).to("meta")
    plain = frozen(Net())
    assert cached(torch.empty(6, 8, device="meta")).device.type == "meta"
    cached.to_empty(device="cpu")
    cached.load_state_dict(plain.state_dict())
    assert_found(cached, plain)
    cached.to("meta").load_state_dict(plain.state_dict(), assign=True)
    assert_found(cached, plain)


# Tracing


def constants(graph_module):
    """Tensors in a graph that are neither parameters nor buffers of the model."""
    return [n for n, t in vars(graph_module).items() if isinstance(t, torch.Tensor)] + [
        n for n in graph_module.state_dict() if "constant" in n or "lifted" in n
    ]


def as_child(make):
    return frozen(Outer(make(Net))), frozen(Outer(Net()))


TRACEABLE = {
    "class": lambda: twins(as_class),
    "instance": lambda: twins(as_instance),
    "class in a model": lambda: as_child(as_class),
    "instance in a model": lambda: as_child(as_instance),
}
TRACED_MODULES = pytest.mark.parametrize("target", TRACEABLE)


def traced_targets(name, warm):
    cached, plain = TRACEABLE[name]()
    if warm:
        for batch in (X, X, Y):
            assert_same(cached(batch), plain(batch))
    return cached, plain


def can_export_strictly():
    return hasattr(torch.compiler, "is_exporting")


@functools.cache
def exported_names(in_model, strict):
    """Names of weights and constants in the exported program of a plain module, or of a model around it."""
    plain = frozen(Outer(Net()) if in_model else Net())
    program = torch.export.export(plain, (X,), strict=strict)
    return [list(program.state_dict), list(program.constants)]


@pytest.mark.parametrize("strict", [False, *([True] if can_export_strictly() else [])])
@WARM
@TRACED_MODULES
@pytest.mark.one_in(15)
def test_export(target, warm, strict):
    cached, plain = traced_targets(target, warm)
    program = torch.export.export(cached, (X,), strict=strict)
    assert [list(program.state_dict), list(program.constants)] == exported_names("model" in target, strict)
    exported = program.module()
    for batch in (X, Y, X.flip(0)):
        assert_same(exported(batch), plain(batch))
    state = {name: tensor * 2 for name, tensor in plain.state_dict().items()}
    exported.load_state_dict(state)
    plain.load_state_dict(state)
    assert_same(exported(Y), plain(Y))
    cached.load_state_dict(state)
    assert_hit(cached, plain)


@WARM
@TRACED_MODULES
@pytest.mark.one_in(2)
def test_export_with_batches_of_any_size(target, warm):
    cached, plain = traced_targets(target, warm)
    batch = torch.export.Dim("batch", min=2, max=100)
    program = torch.export.export(cached, (X,), dynamic_shapes=({0: batch},), strict=False).module()
    for x in (X, torch.cat([X, Y]), Y[:3]):
        assert_same(program(x), plain(x))


@pytest.mark.filterwarnings(TRACED)
@WARM
@TRACED_MODULES
@pytest.mark.one_in(2)
def test_jit_trace(target, warm):
    cached, plain = traced_targets(target, warm)
    traced = torch.jit.trace(cached, (X,))
    assert list(traced.state_dict()) == list(plain.state_dict())
    for batch in (X, Y, Y[:2], torch.cat([X, Y])):
        assert_same(traced(batch), plain(batch))
    # A traced module has the weights of the module, not copies.
    on_both(lambda m: [multiply(p, -2) for p in m.parameters()], cached, plain)
    for batch in (X, Y):
        assert_same(traced(batch), plain(batch))
        assert_same(cached(batch), plain(batch))
    assert_hit(cached, plain)


@WARM
@TRACED_MODULES
@pytest.mark.one_in(2)
def test_symbolic_trace(target, warm):
    cached, plain = traced_targets(target, warm)
    graph = torch.fx.symbolic_trace(cached)
    assert constants(graph) == []
    assert sorted(graph.state_dict()) == sorted(plain.state_dict())
    for batch in (X, Y, Y[:2], torch.cat([X, Y])):
        assert_same(graph(batch), plain(batch))
    on_both(lambda m: [multiply(p, -2) for p in m.parameters()], graph, plain)
    for batch in (X, Y):
        assert_same(graph(batch), plain(batch))
    # The graph's modules are those of the model.
    assert_hit(cached, plain)
    fresh = copy.deepcopy(graph)
    on_both(lambda m: [multiply(p, -2) for p in m.parameters()], fresh, plain)
    assert_same(fresh(Y), plain(Y))


@pytest.mark.filterwarnings(TRACED)
@pytest.mark.parametrize("trace", [lambda f: torch.jit.trace(f, (X,)), torch.fx.symbolic_trace])
@WARM
def test_traces_of_a_function(warm, trace):
    cached, plain = torchcache(lambda x: x.relu() * 2), lambda x: x.relu() * 2
    if warm:
        cached(X)
    traced = trace(cached)
    for batch in (X, Y, Y[:2]):
        assert_same(traced(batch), plain(batch))


def test_a_cached_leaf_of_a_graph_is_still_cached():
    # Torch's own modules are leaves: the graph calls them.
    model = nn.Sequential(torchcache(frozen(exact(nn.Linear(8, 4)))), nn.Tanh())
    plain = nn.Sequential(frozen(exact(nn.Linear(8, 4))), nn.Tanh())
    graph = torch.fx.symbolic_trace(model)
    for _ in range(2):
        assert_same(graph(X), plain(X))
    assert hits(model[0]) == 6


# Hooks of autograd, checkpoints


@contextlib.contextmanager
def counted_hooks(packed):
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor.shape) or tensor.clone(), lambda tensor: tensor
    ):
        yield


@pytest.mark.parametrize("train", [False, True])
@MAKERS
def test_saved_tensors_hooks(make, train):
    cached, plain = make(Net), Net()
    if not train:
        frozen(cached), frozen(plain)
    results = []
    for backbone in (cached, plain):
        head, packed, losses = exact(nn.Linear(4, 2)), [], []
        for _ in range(2):
            with counted_hooks(packed):
                loss = head(backbone(X)).square().sum()
            loss.backward()
            losses.append(loss.detach())
        results.append((losses, [p.grad for p in (*head.parameters(), *backbone.parameters())], packed))
    (loss, gradients, packed), (expected_loss, expected_gradients, expected_packed) = results
    assert_same(loss, expected_loss)
    assert_same(gradients, expected_gradients)
    assert packed == expected_packed
    assert (hits(cached), bypasses(cached)) == ((0, {"grad": 12}) if train else (6, {}))


CHECKPOINTS = {
    "backbone": lambda backbone, head, x, r: head(checkpoint(backbone, x, use_reentrant=r)),
    "both": lambda backbone, head, x, r: checkpoint(lambda x: head(backbone(x)), x, use_reentrant=r),
    "one in another": lambda backbone, head, x, r: checkpoint(
        lambda x: head(checkpoint(backbone, x, use_reentrant=r)), x, use_reentrant=r
    ),
}


@pytest.mark.filterwarnings(OLD_CHECKPOINT, "ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("needs", ["nothing", "input", "weights", "input and weights"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
@MAKERS
@pytest.mark.one_in(12)
def test_checkpoints(name, reentrant, needs, make):
    cached, plain = make(Net).eval(), Net().eval()
    results = []
    for backbone in (cached, plain):
        backbone.requires_grad_("weights" in needs)
        head = exact(nn.Linear(4, 2))
        outputs = []
        for batch in (X, X, Y, torch.cat([X[:3], -Y])):
            x = batch.clone().requires_grad_("input" in needs)
            output = CHECKPOINTS[name](backbone, head, x, reentrant)
            if output.requires_grad:
                output.square().sum().backward()
            outputs += [output.detach(), x.grad]
        gradients = [p.grad for p in (*head.parameters(), *backbone.parameters())]
        results.append((outputs, gradients))
    assert_same(*results)
    if needs == "nothing":
        assert hits(cached) >= 9 and bypasses(cached) == {}
    elif not reentrant:
        assert hits(cached) == 0 and set(bypasses(cached)) == {"grad"}
    with torch.no_grad():
        assert_found(cached, plain)


# Subclasses of Tensor


class Tagged(torch.Tensor):
    """What as_subclass() makes: torch keeps the class of what it computes."""


class Logged(torch.Tensor):
    """Sees every function of torch."""

    seen = ()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        Logged.seen = (*Logged.seen, function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Wrapped(torch.Tensor):
    """Holds another tensor, and doubles what relu returns."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Wrapped({self.inner})"

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def unwrap(leaf):
            return leaf.inner if isinstance(leaf, Wrapped) else leaf

        output = function(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs or {}))
        if function is torch.ops.aten.relu.default:
            output = output * 2
        return pytree.tree_map(lambda leaf: Wrapped(leaf) if isinstance(leaf, torch.Tensor) else leaf, output)


def content(tensor):
    return tensor.inner if isinstance(tensor, Wrapped) else tensor.as_subclass(torch.Tensor)


SUBCLASSES = {
    "as_subclass": lambda x: x.clone().as_subclass(Tagged),
    "torch function": lambda x: x.clone().as_subclass(Logged),
    "torch dispatch": lambda x: Wrapped(x.clone()),
}


@pytest.mark.parametrize("name", SUBCLASSES)
@pytest.mark.parametrize("target", ["function", "class", "instance"])
def test_subclasses_of_tensor_get_the_plain_forward(target, name):
    cached, plain = targets(target, warm=True)
    misses_before = misses(cached)
    wrap = SUBCLASSES[name]
    for batch in (X, X, Y, Y[:0]):
        output, expected = cached(wrap(batch)), plain(wrap(batch))
        assert type(output) is type(expected) is type(wrap(batch))
        assert torch.equal(content(output), content(expected))
    assert bypasses(cached) == {"subclass": 18}
    assert misses(cached) == misses_before
    assert_found(cached, plain)


@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses_of_tensor_anywhere_in_the_arguments(name):
    def forward(x, batch=None, *rest, table=None, **named):
        y = x + batch["a"][0] if batch is not None else x
        y = y + rest[0] if rest else y
        y = y * table if table is not None else y
        return y - named["z"] if named else y

    cached, wrap = torchcache(shared_args=("table",))(forward), SUBCLASSES[name]
    calls = [
        ((X, {"a": [wrap(Y)]}), {}),
        ((X, None, wrap(Y)), {}),
        ((X,), {"table": wrap(Y[0])}),
        ((X,), {"z": wrap(Y)}),
        ((wrap(X),), {"table": Y[0]}),
    ]
    for args, kwargs in calls * 2:
        output, expected = cached(*args, **kwargs), forward(*args, **kwargs)
        assert type(output) is type(expected) is type(wrap(X))
        assert torch.equal(content(output), content(expected))
    assert bypasses(cached) == {"subclass": 60}
    assert misses(cached) == 0


def test_the_forward_runs_once_for_a_subclass_and_sees_it_and_there_is_one_warning(log):
    seen = []
    cached = torchcache(lambda x: seen.append(x) or x * 2)
    tagged = [X.clone().as_subclass(Tagged) for _ in range(3)]
    for x in tagged:
        cached(x)
    assert len(seen) == 3 and all(map(operator.is_, seen, tagged))
    (message,) = warnings_in(log)
    assert "subclass" in message and "Tagged" in message


@TARGETS
def test_parameters_as_arguments(target):
    cached, plain = targets(target, warm=False)
    still = nn.Parameter(X, requires_grad=False)
    assert_found(cached, plain, still)
    assert type(cached(still)) is torch.Tensor
    before = hits(cached)
    assert_same(cached(X), plain(X))  # the same items
    trained = nn.Parameter(X.clone())
    with torch.no_grad():
        assert_same(cached(trained), plain(trained))
    assert hits(cached) == before + 12
    outputs = [f(trained) for f in (cached, plain)]
    assert_same(*outputs)
    assert_same(*(torch.autograd.grad(output.square().sum(), trained) for output in outputs))
    assert bypasses(cached) == {"grad": 6}


@MAKERS
def test_weights_of_a_subclass(make):
    cached, plain = twins(make)
    for module in (cached, plain):
        for linear in (module.first, module.second):
            linear.weight = nn.Parameter(Wrapped(linear.weight.detach()), requires_grad=False)

    def check():
        for _ in range(2):
            output, expected = cached(X), plain(X)
            assert type(output) is type(expected) is Wrapped
            assert torch.equal(output.inner, expected.inner)

    check()
    on_both(lambda m: m.first.weight.inner.mul_(2), cached, plain)
    check()


# Other layouts


def nested(**options):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)], **options)


def quantized(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)


SQUARE = fractions(4, 4, seed=5)
LAYOUTS = {
    "COO": (lambda: SQUARE.to_sparse(), "sparse_coo"),
    "CSR": (lambda: SQUARE.to_sparse_csr(), "sparse_csr"),
    "CSC": (lambda: SQUARE.to_sparse_csc(), "sparse_csc"),
    "BSR": (lambda: SQUARE.to_sparse_bsr((2, 2)), "sparse_bsr"),
    "BSC": (lambda: SQUARE.to_sparse_bsc((2, 2)), "sparse_bsc"),
    "nested, strided": (lambda: nested(), "nested"),
    "nested, jagged": (lambda: nested(layout=torch.jagged), "nested"),
    "mkldnn": (lambda: SQUARE.to_mkldnn(), "mkldnn"),
    "quantized": (lambda: quantized(SQUARE), "quantized"),
    "quantized by channel": (
        lambda: torch.quantize_per_channel(SQUARE, torch.ones(4), torch.zeros(4), 0, torch.qint8),
        "quantized",
    ),
}
LAYOUT_WARNINGS = pytest.mark.filterwarnings(NESTED, SPARSE, QUANTIZED_TENSORS)


@LAYOUT_WARNINGS
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.cpu_only
def test_arguments_of_other_layouts_are_named(name):
    make, word = LAYOUTS[name]

    def forward(x, batch=None, *rest, table=None, **named):
        return x * 2

    cached = torchcache(shared_args=("table",), strict=True)(forward)
    dense = torch.ones(4, 3)
    calls = {
        "argument x ": ((make(),), {}),
        "argument batch['a'][1] ": ((dense, {"a": [dense, make()]}), {}),
        "argument rest[0] ": ((dense, None, make()), {}),
        "argument table ": ((dense,), {"table": make()}),
        "argument named['z'] ": ((dense,), {"z": make()}),
    }
    for words, (args, kwargs) in calls.items():
        with pytest.raises(UnhashableArgumentError) as caught:
            cached(*args, **kwargs)
        assert words in str(caught.value) and word in str(caught.value), str(caught.value)
    assert_found(cached, forward, dense)
    assert bypasses(cached) == {}


@LAYOUT_WARNINGS
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.cpu_only
def test_outputs_of_other_layouts_are_passed_through(name, log):
    make, word = LAYOUTS[name]

    def forward(x):
        return {"y": x * 2, "o": make()}

    cached, kept = torchcache(forward), make()
    for batch in (X, X, torch.cat([X, Y])):
        output = cached(batch)
        assert torch.equal(output["y"], batch * 2)
        assert output["o"].layout is kept.layout and type(output["o"]) is type(kept)
        assert output["o"].is_quantized == kept.is_quantized and output["o"].is_nested == kept.is_nested
    assert hits(cached) == misses(cached) == 0
    assert sum(bypasses(cached).values()) == 24
    (message,) = warnings_in(log)
    assert word in message and "['o']" in message


@LAYOUT_WARNINGS
@pytest.mark.parametrize("name", LAYOUTS)
@MAKERS
@pytest.mark.one_in(2)
@pytest.mark.cpu_only
def test_weights_of_other_layouts(name, make):
    table, _ = LAYOUTS[name]

    class Keeper(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = table()

        def forward(self, x):
            if self.table.is_nested:
                return x * self.table.unbind()[0].sum()
            dense = self.table.dequantize() if self.table.is_quantized else self.table.to_dense()
            return x[:, :4] @ dense

    cached, plain = make(Keeper), Keeper()
    assert_found(cached, plain)
    table_before, table = (
        table,
        lambda: table_before() * 2 if "quantized" not in name else quantized(SQUARE + 1),
    )
    on_both(lambda m: setattr(m, "table", table()), cached, plain)
    assert_found(cached, plain)


MASKED = "ignore:The PyTorch API of MaskedTensors"


@pytest.mark.filterwarnings(AO_QUANTIZATION, QUANTIZED_TENSORS)
@pytest.mark.cpu_only
def test_two_dynamically_quantized_modules_do_not_share_rows():
    cached, other = Net(), Net()
    multiply(other.first.weight, -1)
    cached, other = (
        torch.ao.quantization.quantize_dynamic(frozen(module), {nn.Linear}) for module in (cached, other)
    )
    expected = [module(X) for module in (cached, other)]
    binder = torchcache()
    for module, output in zip((cached, other), expected, strict=True):
        assert_same(binder(module)(X), output)
    assert not torch.equal(*expected)


def test_tied_and_untied_instances_of_one_class():
    kind = torchcache(type("TellsTied", (TellsTied,), {}))
    tied, untied, plain = frozen(kind()), frozen(kind()), frozen(TellsTied())
    untie(untied)
    for _ in range(2):
        assert_same(tied(X), plain(X))
        assert_same(untied(X), -plain(X))


@MAKERS
def test_parameters_that_swap_on_conversion(make):
    # torch.utils.swap_tensors() fails on tensors that somebody else refers to.
    cached, plain = twins(make, Blocks)
    assert_found(cached, plain, same=assert_close)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        on_both(nn.Module.double, cached, plain)
        assert_found(cached, plain, X.double(), same=assert_close)
        on_both(load, cached, plain)
        assert_found(cached, plain, X.double(), same=assert_close)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.filterwarnings(MASKED)
def test_masked_tensors():
    cached = torchcache(lambda x: x * 2)
    masked = torch.masked.masked_tensor(X, X > 0)
    for _ in range(2):
        output = cached(masked)
        assert type(output) is type(masked)
        assert torch.equal(output.get_data()[X > 0], X[X > 0] * 2)
    assert bypasses(cached) == {"subclass": 12}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_outputs_of_a_subclass_are_passed_through(name):
    wrap = SUBCLASSES[name]

    def forward(x):
        return {"y": x * 2, "w": wrap(x)}

    cached = torchcache(forward)
    for batch in (X, X, torch.cat([X, Y])):
        output, expected = cached(batch), forward(batch)
        assert type(output["w"]) is type(expected["w"])
        assert torch.equal(content(output["w"]), content(expected["w"]))
        assert torch.equal(output["y"], expected["y"])
    assert sum(bypasses(cached).values()) == 24 and hits(cached) == misses(cached) == 0


@WARM
@MAKERS
def test_make_fx_of_a_functional_call(make, warm):
    cached, plain = twins(make)
    if warm:
        cached(X)
    weights = changed_weights(plain, 2)
    graph = make_fx(lambda w, x: functional_call(cached, w, (x,)))(weights, X)
    for factor in (1, 3):
        weights = changed_weights(plain, factor)
        assert_same(graph(weights, Y), functional_call(plain, weights, (Y,)))


def test_pruned_weights_that_train():
    cached, plain = as_instance(), Net()
    on_both(lambda m: prune.l1_unstructured(m.first, "weight", 0.5), cached, plain)
    for module in (cached, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            module(X).mean().backward()
            optimizer.step()
    assert_same(cached.first.weight_orig.grad, plain.first.weight_orig.grad)
    with torch.no_grad():
        assert_close(cached(X), plain(X))
        assert_found(cached, plain, same=assert_close)
    assert bypasses(cached)["grad"] == 12
