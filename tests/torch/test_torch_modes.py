"""Modes of PyTorch: autocast, gradients, determinism, defaults, memory formats and dtypes, one by one.

Right is what the same module or function returns in the same mode without a cache.
"""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tests.helpers.outputs import assert_same, bypasses, frozen, hits
from torchcache2 import torchcache, uncache

pytestmark = pytest.mark.cpu_only


def fractions(*shape, seed):
    """Numbers with so few bits that sums of products are exact in float32, but not in less.

    Batches of another size may otherwise round differently.
    """
    return torch.randint(-300, 301, shape, generator=torch.Generator().manual_seed(seed)) / 64


X = fractions(6, 8, seed=1)
Y = fractions(6, 8, seed=2)
IMAGES = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))
VOLUMES = torch.randn(4, 2, 3, 4, 5, generator=torch.Generator().manual_seed(4))

COMPLEX_HALF = "ignore:ComplexHalf support is experimental"
NO_CUDA = "ignore:.*CUDA is not available"
NO_FLOAT32 = "ignore:In CPU autocast, but the target dtype is not supported"
DEPRECATED_AUTOCAST = "ignore:.torch.cpu.amp.autocast"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(seed)
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def cached_class(kind=Net):
    # A new one each time: all instances of a decorated class share their rows.
    return torchcache(type(kind.__name__, (kind,), {}))


def as_class():
    return frozen(cached_class()()), frozen(Net())


def as_instance():
    return torchcache(frozen(Net())), frozen(Net())


def as_function():
    net = frozen(Net())
    return torchcache(lambda x: net(x)), net


KINDS = pytest.mark.parametrize("make", [as_class, as_instance, as_function])


def assert_found(cached, plain, *args):
    """Right, and computed at most once."""
    assert_same(cached(*args), plain(*args))
    before = hits(cached)
    assert_same(cached(*args), plain(*args))
    assert hits(cached) == before + len(args[0])


# Autocast


def bf16(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def fp16(**options):
    return torch.autocast("cpu", dtype=torch.float16, **options)


@contextlib.contextmanager
def stacked(*contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def switched_by_hand():
    torch.set_autocast_enabled("cpu", True)
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)
        torch.set_autocast_enabled("cpu", False)


@contextlib.contextmanager
def with_another_dtype_inside():
    with bf16():
        torch.set_autocast_dtype("cpu", torch.float16)
        yield


# Each with the dtype that products have under it.
AUTOCAST = {
    "none": (contextlib.nullcontext, torch.float32),
    "disabled": (lambda: torch.autocast("cpu", enabled=False), torch.float32),
    "disabled, with a dtype": (lambda: bf16(enabled=False), torch.float32),
    "without a dtype": (lambda: torch.autocast("cpu"), torch.bfloat16),
    "bf16": (bf16, torch.bfloat16),
    "fp16": (fp16, torch.float16),
    "float32": (lambda: torch.autocast("cpu", dtype=torch.float32), torch.float32),
    "cache off": (lambda: bf16(cache_enabled=False), torch.bfloat16),
    "amp": (lambda: torch.amp.autocast("cpu", torch.float16), torch.float16),
    "the old name": (lambda: torch.cpu.amp.autocast(), torch.bfloat16),
    "of another device": (lambda: torch.autocast("cuda"), torch.float32),
    "fp16 in bf16": (lambda: stacked(bf16(), fp16()), torch.float16),
    "bf16 in fp16": (lambda: stacked(fp16(), bf16()), torch.bfloat16),
    "disabled in bf16": (lambda: stacked(bf16(), bf16(enabled=False)), torch.float32),
    "bf16 in disabled": (lambda: stacked(bf16(enabled=False), bf16()), torch.bfloat16),
    "three deep": (lambda: stacked(bf16(), fp16(enabled=False), fp16()), torch.float16),
    "by hand": (switched_by_hand, torch.float16),
    "the dtype set inside": (with_another_dtype_inside, torch.float16),
}
AUTOCAST_WARNINGS = pytest.mark.filterwarnings(NO_CUDA, NO_FLOAT32, DEPRECATED_AUTOCAST)


@AUTOCAST_WARNINGS
@KINDS
@pytest.mark.parametrize("name", AUTOCAST)
@pytest.mark.one_in(8)
def test_outputs_under_autocast_are_those_of_the_plain_module(name, make):
    cached, plain = make()
    context, dtype = AUTOCAST[name]
    cached(X[:3]), cached(X.flip(0)[:1])
    for _ in range(2):
        with context():
            assert_same(cached(X), plain(X))
            assert cached(X).dtype is dtype
        assert_same(cached(X), plain(X))
    assert hits(cached) > 24


@pytest.mark.one_in(4)
@AUTOCAST_WARNINGS
@pytest.mark.parametrize("name", AUTOCAST)
def test_equal_effective_autocast_shares_rows(name):
    cached, plain = as_instance()
    context, dtype = AUTOCAST[name]
    simplest = {torch.float32: contextlib.nullcontext, torch.bfloat16: bf16, torch.float16: fp16}[dtype]
    with simplest():
        cached(X)
    with context():
        assert_same(cached(X), plain(X))
    assert hits(cached) == 6


def inside(self, x):
    with bf16():
        return Net.forward(self, x)


def off_inside(self, x):
    hidden = torch.relu(self.first(x))
    with torch.autocast("cpu", enabled=False):
        return self.second(hidden.float())


def on_a_helper(self, x):
    hidden = torch.autocast("cpu", dtype=torch.float16)(lambda x: torch.relu(self.first(x)))
    return hidden(x) if torch.is_autocast_enabled("cpu") else self.second(hidden(x).float())


@torch.autocast("cpu", dtype=torch.bfloat16)
def on_the_forward(self, x):
    return Net.forward(self, x)


@torch.autocast("cpu", enabled=False)
def off_on_the_forward(self, x):
    return Net.forward(self, x)


def as_attribute(self, x):
    with self.mode:
        return Net.forward(self, x)


INSIDE = [inside, off_inside, on_a_helper, on_the_forward, off_on_the_forward, as_attribute]


def with_forward(forward):
    return type("Inside", (Net,), {"forward": forward, "mode": bf16()})


@pytest.mark.parametrize("decorate", ["class", "instance"])
@pytest.mark.parametrize("outer", [contextlib.nullcontext, bf16, fp16, lambda: bf16(enabled=False)])
@pytest.mark.parametrize("forward", INSIDE)
@pytest.mark.one_in(12)
def test_autocast_inside_of_the_forward(forward, outer, decorate):
    kind = with_forward(forward)
    plain = frozen(kind())
    cached = frozen(cached_class(kind)()) if decorate == "class" else torchcache(frozen(kind()))
    assert_found(cached, plain, X)
    with outer():
        assert_found(cached, plain, X)
        mixed = torch.cat([Y[:2], X])
        assert_same(cached(mixed), plain(mixed))
    assert_found(cached, plain, X)
    assert bypasses(cached) == {}


def test_another_autocast_object_in_an_attribute_is_noticed():
    kind = with_forward(as_attribute)
    cached, plain = torchcache(frozen(kind())), frozen(kind())
    cached(X)
    for module in (cached, plain):
        module.mode = fp16()
    assert_found(cached, plain, X)
    assert cached(X).dtype is torch.float16


def test_decorated_functions_that_differ_in_their_autocast_alone():
    net = frozen(Net())

    def make(dtype):
        @torch.autocast("cpu", dtype=dtype)
        def forward(x):
            return net(x)

        return forward

    hashes = set()
    for dtype in (torch.bfloat16, torch.float16):
        cached = torchcache(make(dtype))
        assert_found(cached, make(dtype), X)
        hashes.add(cached.cache_instance.module_hash)
    assert len(hashes) == 2


def test_weights_that_autocast_has_cast_do_not_outlive_them():
    # Autocast keeps what it casts of leaves that require grad until its outermost context ends.
    cached, plain = torchcache(Net().eval()), Net().eval()
    with bf16(), torch.no_grad():
        assert_found(cached, plain, X)
        for module in (cached, plain):
            module.first.weight.mul_(-1)
        assert_same(cached(X), plain(X))
    with bf16(), torch.no_grad():
        assert_same(cached(X), plain(X))


# Gradient modes

MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "not inference in inference": lambda: stacked(torch.inference_mode(), torch.inference_mode(False)),
    "no_grad in inference": lambda: stacked(torch.inference_mode(), torch.no_grad()),
    "grad in no_grad": lambda: stacked(torch.no_grad(), torch.enable_grad()),
    "inference in no_grad": lambda: stacked(torch.no_grad(), torch.inference_mode()),
}


@KINDS
@pytest.mark.parametrize("reading", MODES)
@pytest.mark.parametrize("writing", MODES)
@pytest.mark.one_in(18)
def test_rows_cross_gradient_modes(writing, reading, make):
    cached, plain = make()
    with MODES[writing]():
        cached(X[:4])
    with MODES[reading]():
        for batch in (X[:4], torch.cat([X[1:3], Y])):
            assert_same(cached(batch), plain(batch))
    assert hits(cached) == 4 + 2
    # What was found is an ordinary tensor: it can be written to, and be part of a graph.
    found = cached(torch.cat([X[:4], Y]))
    assert hits(cached) == 6 + 10
    head = nn.Linear(4, 2)
    head(found).sum().backward()
    assert torch.equal(head.weight.grad, plain(torch.cat([X[:4], Y])).sum(0).expand(2, 4))
    found.zero_()
    assert_same(cached(X[:4]), plain(X[:4]))


@pytest.mark.parametrize("mode", ["no_grad", "inference", "set_grad_enabled"])
def test_a_trainable_module_is_cached_only_while_gradients_are_off(mode):
    cached, plain = torchcache(Net()), Net()
    for _ in range(2):
        with MODES[mode]():
            assert_same(cached(X), plain(X))
        outputs = [module(X) for module in (cached, plain)]
        assert_same(*outputs)
        assert all(output.requires_grad for output in outputs)
        for output in outputs:
            output.square().sum().backward()
        assert_same([p.grad for p in cached.parameters()], [p.grad for p in plain.parameters()])
    assert (hits(cached), bypasses(cached)) == (6, {"grad": 12})


@pytest.mark.parametrize("mode", MODES)
def test_inputs_made_in_inference_mode(mode):
    cached, plain = as_class()
    with torch.inference_mode():
        x = X.clone()
    with MODES[mode]():
        assert_found(cached, plain, x)
        before = hits(cached)
        assert_same(cached(X), plain(X))
    assert hits(cached) == before + 6


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("make", [as_class, as_instance])
def test_modules_made_in_inference_mode(make, mode):
    with torch.inference_mode():
        cached, plain = make()
    with MODES[mode]():
        assert_found(cached, plain, X)
    with torch.inference_mode():
        for module in (cached, plain):
            module.first.weight.mul_(-1)
    with MODES[mode]():
        assert_found(cached, plain, X)


# Deterministic algorithms


@contextlib.contextmanager
def deterministic(mode=True, *, warn_only=False):
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def written_at_random(x):
    return x.clone().put_(torch.arange(len(x)), x[:, 0].clone())


def test_an_operation_without_a_deterministic_form_fails_in_that_mode_with_rows_as_without():
    cached, words = torchcache(written_at_random), "put_ does not have a deterministic"
    for _ in range(2):
        assert_found(cached, written_at_random, X)
        for function in (written_at_random, cached):
            with deterministic(), pytest.raises(RuntimeError, match=words):
                function(X)
    with deterministic(warn_only=True), pytest.warns(UserWarning, match=words):
        assert_same(torchcache(written_at_random)(X), written_at_random(X))


def test_a_forward_that_reads_the_deterministic_mode():
    def forward(x):
        return x * (3 if torch.are_deterministic_algorithms_enabled() else 2)

    cached = torchcache(forward)
    for context in (contextlib.nullcontext, deterministic, contextlib.nullcontext, deterministic):
        with context():
            assert_same(cached(X), forward(X))
    assert hits(cached) == 12


def test_memory_that_deterministic_mode_fills():
    # In this mode torch.empty fills what it makes, which must not become part of an output.
    cached, plain = as_instance()
    with deterministic():
        cached(X[:3])
        for batch in (X, torch.cat([X[:2], Y]), X[:0]):
            assert_same(cached(batch), plain(batch))
        convolution = torchcache(frozen(nn.Conv2d(3, 3, 1)).to(memory_format=torch.channels_last))
        convolution(IMAGES[:4])
        assert not convolution(IMAGES).isnan().any()


# Default dtype, precision, device


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULT_DTYPE = {
    "new tensors": lambda x: torch.ones(len(x), 3) + x[:, :1],
    "quotients of integers": lambda x: (x * 10).long() / 3,
    "ranges": lambda x: torch.arange(0, 1, 0.25).expand(len(x), 4),
    "complex numbers": lambda x: (x * 10).long() * 1j,
    "python numbers": lambda x: torch.full((len(x),), 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", DEFAULT_DTYPE)
@pytest.mark.filterwarnings(COMPLEX_HALF)
def test_the_default_dtype(name, dtype):
    forward = DEFAULT_DTYPE[name]
    if name == "complex numbers" and dtype is torch.bfloat16:
        dtype = torch.float64  # torch has no complex numbers of bfloat16
    cached = torchcache(forward)
    for _ in range(2):
        assert_found(cached, forward, X)
        with default_dtype(dtype):
            assert_found(cached, forward, X)
    assert cached.cache_instance.stats().misses == 12


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_precision_of_matrix_products(precision):
    cached, plain = as_instance()
    before = torch.get_float32_matmul_precision()
    assert_found(cached, plain, X)
    torch.set_float32_matmul_precision(precision)
    try:
        misses = cached.cache_instance.stats().misses
        assert_found(cached, plain, X)
        assert cached.cache_instance.stats().misses == misses + 6
    finally:
        torch.set_float32_matmul_precision(before)
    assert_found(cached, plain, X)
    assert cached.cache_instance.stats().misses == 12


def precision_switches():
    """What sets the precision of float32 products since torch 2.9, as far as this torch has it."""
    switches = {}
    for name in ("cuda.matmul", "mkldnn.matmul", "mkldnn.conv", "cudnn.conv"):
        backend, part = name.split(".")
        with contextlib.suppress(AttributeError):
            switch = getattr(getattr(torch.backends, backend), part)
            switch.fp32_precision  # noqa: B018  older ones raise
            switches[name] = switch
    return switches


def test_the_precision_of_each_backend():
    # Once one of these is set, torch.get_float32_matmul_precision() is an error.
    cached, plain = as_instance()
    for name, switch in precision_switches().items():
        cached.cache_instance.clear()
        assert_found(cached, plain, X)
        before, misses = switch.fp32_precision, cached.cache_instance.stats().misses
        usual = {"cuda.matmul": "tf32", "cudnn.conv": "ieee"}  # what it is not yet
        switch.fp32_precision = usual.get(name, "bf16")
        try:
            assert_found(cached, plain, X)
            assert cached.cache_instance.stats().misses == misses + 6, name
        finally:
            switch.fp32_precision = before
        assert_found(cached, plain, X)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def makes_tensors(x):
    return torch.zeros(len(x), 2)


@pytest.mark.parametrize("context", [default_device, torch.device])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_forward_makes_follow_the_default_device(device, context):
    cached = torchcache(makes_tensors)
    assert_found(cached, makes_tensors, X)
    for _ in range(2):
        with context(device):
            output = cached(X)
            assert output.device.type == makes_tensors(X).device.type == device
    assert_found(cached, makes_tensors, X)


class Shifted(TorchFunctionMode):
    """Adds one to what torch.relu returns."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output + 1 if function is torch.relu else output


@KINDS
def test_a_torch_function_mode_sees_the_plain_forward(make):
    cached, plain = make()
    assert_found(cached, plain, X)
    for batch in (X, Y):
        with Shifted():
            assert_same(cached(batch), plain(batch))
        assert_same(cached(batch), plain(batch))


# Memory formats

LAST = torch.channels_last
LAST_3D = torch.channels_last_3d


def layout_of(tensor):
    formats = (torch.contiguous_format, LAST, LAST_3D)
    return [tensor.is_contiguous(memory_format=f) for f in formats if f is formats[0] or fits(tensor, f)]


def fits(tensor, memory_format):
    return tensor.dim() == (4 if memory_format is LAST else 5)


def to_last(tensor):
    return tensor.to(memory_format=LAST if tensor.dim() == 4 else LAST_3D)


def conv2d():
    torch.manual_seed(5)
    module = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    return frozen(module).to(memory_format=LAST)


def conv3d():
    torch.manual_seed(5)
    return frozen(nn.Conv3d(2, 3, 1)).to(memory_format=LAST_3D)


FORMATS = {
    "conv2d": (conv2d, IMAGES),
    "conv3d": (conv3d, VOLUMES),
    "function": (lambda: lambda x: to_last(x * 2), IMAGES),
    "function, 3d": (lambda: lambda x: to_last(x * 2), VOLUMES),
    "half": (lambda: lambda x: to_last(x.half()), IMAGES),
    "bytes": (lambda: lambda x: to_last((x * 10).to(torch.uint8)), IMAGES),
    "several": (lambda: lambda x: {"a": to_last(x * 2), "b": (x.contiguous() * 3, x.sum((1, 2, 3)))}, IMAGES),
    "one channel": (lambda: lambda x: to_last(x[:, :1] * 2), IMAGES),
    "one pixel": (lambda: lambda x: to_last(x[:, :, :1, :1] * 2), IMAGES),
    "one row": (lambda: lambda x: to_last(x[:, :, :1] * 2), IMAGES),
}


@pytest.mark.parametrize("made", [torch.contiguous_format, None])
@pytest.mark.parametrize("name", FORMATS)
def test_channels_last_comes_back_channels_last(name, made):
    make, x = FORMATS[name]
    plain, cached = make(), torchcache(make())
    if made is None:
        x = to_last(x)

    def check(batch):
        output, expected = cached(batch), plain(batch)
        for a, b in zip(pytree.tree_leaves(output), pytree.tree_leaves(expected), strict=True):
            # For a single item, torch's 3d convolution takes the other layout.
            assert layout_of(a) == layout_of(b) or (name == "conv3d" and len(batch) == 1)
            # A convolution of another batch size may round differently.
            torch.testing.assert_close(a, b)
        return output

    first = check(x[:2])
    assert_same(check(x[:2]), first)
    check(x[:3])
    whole = check(x)
    assert_same(check(x), whole)
    assert_same(cached(x.flip(0).flip(0)), whole)
    check(x[torch.tensor([2, 0, 2])])
    check(x[1:2])
    check(torch.cat([x[:2], x[:2] + 1]))
    stats = cached.cache_instance.stats()
    assert (stats.misses, dict(stats.bypasses)) == (len(x) + 2, {})


def test_weights_that_are_converted_to_channels_last_find_no_rows_of_the_other_format():
    cached = torchcache(frozen(nn.Conv2d(3, 4, 3)))
    for convert in (lambda: cached, lambda: cached.to(memory_format=LAST)):
        plain = uncache(copy.deepcopy(convert()))
        for _ in range(2):
            assert layout_of(cached(IMAGES)) == layout_of(plain(IMAGES))
    assert cached.cache_instance.stats().hits == 2 * len(IMAGES)


def test_rows_of_both_formats_in_one_batch():
    def forward(x):
        return to_last(x * 2) if len(x) > 2 else (x * 2).contiguous()

    cached = torchcache(forward)
    cached(IMAGES[:2]), cached(IMAGES[2:])
    for batch in (IMAGES, IMAGES.flip(0), torch.cat([IMAGES[1:4], IMAGES[:2] + 1])):
        assert torch.equal(cached(batch), batch * 2)
    assert torch.equal(cached(IMAGES[:2]), IMAGES[:2] * 2)


@pytest.mark.parametrize("options", [{"cache_dtype": torch.bfloat16}, {"memory_cache_device": None}])
def test_channels_last_with_options(options):
    cached = torchcache(**options)(lambda x: to_last(x * 2))
    dtype = options.get("cache_dtype", torch.float32)
    for batch in (IMAGES[:2], IMAGES[:2], IMAGES, IMAGES.flip(0)):
        output = cached(batch)
        assert output.is_contiguous(memory_format=LAST) and output.dtype is torch.float32
        assert torch.equal(output, (batch * 2).to(dtype).float())
    assert hits(cached) == 2 + 2 + 6


# Dtypes

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOATS8 += [torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []
DTYPES = [torch.bool, *FLOATS, *COMPLEX, *INTEGERS, *UNSIGNED, *FLOATS8]


def of_dtype(dtype):
    if dtype is torch.bool:
        return X > 0
    # Every pattern of bits that a dtype has room for, such as NaNs of several kinds.
    bits = torch.randint(0, 256, (6, 8 * dtype.itemsize), dtype=torch.uint8)
    return bits.view(-1).view(dtype).view(6, 8)


def rows_of(x, positions):
    size = x.element_size() * 8
    picked = x.contiguous().view(torch.uint8).view(6, size)[positions]
    return picked.view(-1).view(x.dtype).view(-1, 8)


@pytest.mark.filterwarnings(COMPLEX_HALF)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_of_every_dtype_keep_every_bit(dtype):
    values = of_dtype(dtype)
    index = torch.arange(6)

    def forward(positions):
        return {"y": rows_of(values, positions), "n": (positions.double(), rows_of(values, positions))}

    cached = torchcache(forward)
    for batch in (index[:4], index[:4], index, index.flip(0), index[torch.tensor([0, 0, 3])]):
        assert_same(cached(batch), forward(batch))
    assert (hits(cached), bypasses(cached)) == (4 + 4 + 6 + 3, {})


@pytest.mark.filterwarnings(COMPLEX_HALF)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_of_every_dtype_are_items_by_every_bit(dtype):
    values = of_dtype(dtype)

    def forward(x):
        return x.contiguous().view(-1).view(torch.uint8).view(len(x), -1).clone()

    cached = torchcache(forward)
    assert_found(cached, forward, values)
    for positions in (torch.arange(5, -1, -1), torch.tensor([0, 0, 3])):
        before = hits(cached)
        batch = rows_of(values, positions)
        assert_same(cached(batch), forward(batch))
        assert hits(cached) == before + len(batch)
    if dtype is not torch.bool:
        flipped = values.view(torch.uint8).clone()
        flipped[3, 0] ^= 1
        flipped = flipped.view(dtype)
        before = hits(cached)
        assert_same(cached(flipped), forward(flipped))
        assert hits(cached) == before + 5


def test_a_module_that_changes_dtype():
    cached, plain = as_instance()
    for change in (nn.Module.double, nn.Module.bfloat16, nn.Module.float):
        dtype = next(change(plain).parameters()).dtype
        change(cached)
        assert_found(cached, plain, X.to(dtype))


def test_denormal_numbers_that_are_flushed():
    tiny = torch.full((2, 3), 1e-40)
    cached = torchcache(lambda x: x * 2)
    assert bool((cached(tiny) > 0).all())
    supported = torch.set_flush_denormal(True)
    try:
        assert torch.equal(cached(tiny), tiny * 2)
        assert bool((cached(tiny) == 0).all()) == supported
    finally:
        torch.set_flush_denormal(False)
    assert bool((cached(tiny) > 0).all())


def test_equal_numbers_of_other_dtypes_are_other_items():
    cached = torchcache(lambda x: x * 2)
    dtypes = [*FLOATS, torch.int64, torch.int32, torch.complex64]
    for _ in range(2):
        for dtype in dtypes:
            x = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=dtype)
            assert_same(cached(x), x * 2)
    stats = cached.cache_instance.stats()
    assert (stats.misses, stats.hits) == (3 * len(dtypes), 3 * len(dtypes))


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode, bf16, deterministic])
def test_channels_last_in_other_modes(context):
    plain, cached = conv2d(), torchcache(conv2d())
    with context():
        for batch in (IMAGES[:3], IMAGES[:3], IMAGES[:3].flip(0)):
            output, expected = cached(batch), plain(batch)
            assert layout_of(output) == layout_of(expected) and output.dtype is expected.dtype
            torch.testing.assert_close(output, expected)
    assert hits(cached) == 6


def test_custom_fwd_inside_of_the_forward():
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad

    def forward(x):
        return Square.apply(x)

    cached = torchcache(forward)
    for context in (contextlib.nullcontext, bf16, contextlib.nullcontext):
        with context():
            assert_found(cached, forward, X.bfloat16())


def test_modes_that_the_forward_sets_do_not_leak():
    def forward(x):
        with torch.inference_mode():
            y = x * 2
        return y.clone() + 1 if len(x) else y

    cached = torchcache(forward)
    for _ in range(2):
        assert_same(cached(X), forward(X))
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert hits(cached) == 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_gradient_mode_around_the_cache(mode):
    plain = Net()
    cached = torchcache(lambda x: plain(x))
    called = mode()(cached)
    for _ in range(2):
        with mode():
            expected = plain(X)
        output = called(X)
        assert_same(output, expected)
        assert not output.requires_grad
    assert hits(cached) == 6
    with torch.no_grad():
        assert_found(cached, plain, X)
