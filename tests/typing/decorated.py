"""Type-checked, never run: what users' code looks like to mypy.

Wrong uses carry an ignore of the error that they have to be; one that is not an error is an unused ignore.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from torchcache2 import (
    Cache,
    CacheSettings,
    CacheStats,
    Keys,
    ModuleCache,
    cache_of,
    set_logger_config,
    torchcache,
    uncache,
)

images = torch.zeros(4, 3)


# A class stays the class that it was.


@torchcache
class Bare(nn.Module):
    cache_instance: Cache  # for a type checker: nn.Module says that any other attribute is a tensor or module

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(3, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def describe(self, indent: int = 0) -> str:
        return " " * indent + str(self.width)


@torchcache()
class Called(Bare):
    """A subclass of a decorated class, decorated as well."""


@torchcache(policy="lru", max_memory_cache_size="4GB", shared_args=("mask",))
class WithOptions(nn.Module):
    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x * scale, x * mask


class Child(Bare):
    def __init__(self) -> None:
        super(Child, self).__init__(5)  # noqa: UP008 (users write it, and a wrapping subclass would break it)


bare = Bare(5, bias=False)
assert_type(bare, Bare)
assert_type(bare.width, int)
assert_type(bare.linear, nn.Linear)
assert_type(bare.describe(2), str)
assert_type(bare.forward(images), Tensor)
assert_type(bare.eval(), Bare)
assert_type(bare.cache_instance.stats(), CacheStats)
assert_type(Called(5), Called)
assert_type(Called(5).width, int)
assert_type(Child(), Child)
assert_type(Child().width, int)
assert_type(WithOptions(), WithOptions)
assert_type(WithOptions().forward(images, images, 2.0), tuple[Tensor, Tensor])
a_class: type[Bare] = Bare
a_base: type[Bare] = Called
Bare("wide")  # type: ignore[arg-type]
Bare(5, bia=False)  # type: ignore[call-arg]
Bare()  # type: ignore[call-arg]
bare.forward("images")  # type: ignore[arg-type]
bare.describe(wide=True)  # type: ignore[call-arg]
WithOptions().forward(images)  # type: ignore[call-arg]


def narrowed(module: nn.Module) -> int:
    return module.width if isinstance(module, Bare) else 0


# A function keeps its signature, names and defaults included.


class Scale(Protocol):
    def __call__(self, x: Tensor, scale: float = ..., *, flip: bool = ...) -> Tensor: ...


@torchcache
def bare_function(x: Tensor, scale: float = 1.0, *, flip: bool = False) -> Tensor:
    return -x * scale if flip else x * scale


@torchcache()
def called_function(x: Tensor, scale: float = 1.0, *, flip: bool = False) -> Tensor:
    return -x * scale if flip else x * scale


@torchcache(cache_dtype=torch.bfloat16, subsample_count=10_000)
def function_with_options(x: Tensor) -> dict[str, Tensor]:
    return {"x": x}


scales: list[Scale] = [bare_function, called_function]
assert_type(bare_function(images, scale=2, flip=True), Tensor)
assert_type(called_function(images, 2.0), Tensor)
assert_type(function_with_options(images), dict[str, Tensor])
bare_function("images")  # type: ignore[arg-type]
bare_function(images, 1.0, True)  # type: ignore[call-arg]
called_function()  # type: ignore[call-arg]
called_function(images, factor=2)  # type: ignore[call-arg]
function_with_options(images, 2)  # type: ignore[call-arg]


# An instance keeps its type.

assert_type(torchcache(nn.Linear(3, 5)), nn.Linear)
assert_type(torchcache()(nn.Linear(3, 5)), nn.Linear)
assert_type(torchcache(policy="lru")(nn.Linear(3, 5)), nn.Linear)
assert_type(torchcache(nn.Linear(3, 5)).weight, Tensor)
assert_type(torchcache(nn.Linear(3, 5), policy="lru", methods="forward"), nn.Linear)


# A method, of an object and in the body of a class; and what is known of a cache, where attributes are not.


class Embedder:
    @torchcache
    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    @torchcache(policy="lru")
    def decode(self, x: Tensor) -> Tensor:
        return x

    def plain(self, x: Tensor) -> Tensor:
        return x


embedder = Embedder()
assert_type(embedder.encode(images, 2.0), Tensor)
assert_type(embedder.decode(images), Tensor)
assert_type(torchcache(embedder.plain)(images), Tensor)
assert_type(torchcache(embedder, methods=("encode", "plain")), Embedder)
assert_type(torchcache(methods=("encode",))(embedder), Embedder)
assert_type(cache_of(embedder), ModuleCache)
assert_type(cache_of(nn.Linear(3, 5)).stats(), CacheStats)
assert_type(cache_of(embedder).stats(method="encode").hits, int)
assert_type(uncache(embedder), Embedder)
embedder.encode("images")  # type: ignore[arg-type]


# Options: every one by name, and what it takes.

torchcache(
    enabled=True,
    subsample_count=10_000,
    persistent_module_hash="resnet",
    max_memory_cache_size=1_000_000,
    memory_cache_device="cpu",
    cache_dtype=torch.bfloat16,
    policy="keep",
    shared_args=("mask", "table"),
    distributed="node",
)
torchcache(
    subsample_count=None,
    persistent_module_hash=None,
    max_memory_cache_size=0.5,
    memory_cache_device=None,
    cache_dtype=None,
    shared_args=(),
)
torchcache(max_memory_cache_size="4GB", memory_cache_device=torch.device("cpu"))

torchcache(max_size=5)  # type: ignore[call-overload]
torchcache(enabled="yes")  # type: ignore[call-overload]
torchcache(max_memory_cache_size=None)  # type: ignore[call-overload]
torchcache(cache_dtype="bfloat16")  # type: ignore[call-overload]
torchcache(distributed="nodes")  # type: ignore[call-overload]
torchcache(policy="fifo")  # type: ignore[call-overload]
torchcache(shared_args="mask", item_args="texts")
torchcache(shared_args=5)  # type: ignore[call-overload]


# The settings, the engine and what it counts.

settings = CacheSettings(policy="lru", max_memory_cache_size=0.5)
assert_type(settings.enabled, bool)
assert_type(settings.shared_args, Sequence[str])
assert_type(settings.memory_budget(), int)
settings.enabled = False  # type: ignore[misc]
CacheSettings(policy="fifo")  # type: ignore[arg-type]
CacheSettings(max_size=5)  # type: ignore[call-arg]


def use(cache: Cache, keys: Keys) -> CacheStats:
    def compute(positions: Tensor) -> Tensor:
        return positions.double()

    cache.fetch(keys, compute)
    cache.fetch(keys, lambda positions: {"squares": positions**2})
    cache.fetch(keys, 5)  # type: ignore[arg-type]
    with Cache(bytes(16), settings) as other:
        other.clear()
    return cache.stats()


stats = use(Cache(bytes(16)), Keys(bytes(16), torch.zeros(4, 16, dtype=torch.uint8).numpy()))
assert_type(stats.hits, int)
assert_type(stats.bypasses, Mapping[str, int])
assert_type(stats.seconds_saved, float | None)
assert_type(stats.hit_rate, float)
stats.hits = 5  # type: ignore[misc]

set_logger_config(level="INFO", fmt="%(message)s", filename="cache.log")
set_logger_config(level=1.5)  # type: ignore[arg-type]
