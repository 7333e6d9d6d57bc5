"""`warm_up`: the items of a dataset are computed before they are needed, each by one rank."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from torchcache2.core.errors import NotCachedError, OptionError
from torchcache2.core.logs import listed, logger
from torchcache2.core.private import PRE_HOOKS
from torchcache2.core.process import place
from torchcache2.core.settings import CacheSettings, disabled_by_environment
from torchcache2.core.values import leaves_of, mapped
from torchcache2.decorator.bypass import BypassError, of_module
from torchcache2.decorator.shares import share_of
from torchcache2.engine.cache import Cache
from torchcache2.engine.progress import Progress, WarmupStats
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.running import Forward
from torchcache2.identity.marks import LAZY_ATTRIBUTE
from torchcache2.identity.namespace import NamespaceKeeper

__all__ = ["warm_up"]

_CPU = torch.device("cpu")
_ADVICE = "pass inputs, which maps a batch of samples to the arguments, such as inputs=lambda batch: batch[1]"


class Warmable(Protocol):
    """The cache of a module or function: what `warm_up` is a method of."""

    settings: CacheSettings
    engine: Cache
    keeper: NamespaceKeeper
    method: str
    name: str
    bypass: str | None
    reasons: dict[str, str]

    def call(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of ``forward(*args, **kwargs)``."""
        ...

    def flush(self) -> None:
        """Make rows durable."""
        ...

    def of(self, method: str | None) -> Any:
        """The cache of one method."""
        ...

    def join(self) -> AbstractContextManager[None]:
        """Around calls of which ranks make different numbers."""
        ...

    def living_root(self) -> Any:
        """The object or function."""
        ...


def warm_up(
    self: Warmable,
    data: Any,
    *,
    inputs: Callable[[Any], Any] | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    method: str | None = None,
) -> WarmupStats:
    """Compute the items of a dataset that are not there yet.

    In a job of several ranks, all of them call this, and each takes every n-th sample: rank and number of
    ranks come from `torch.distributed` or, if that is not initialised, from ``RANK`` and ``WORLD_SIZE``; with
    ``distributed="collective"``, from its process group. Only then ranks wait for each other; else rows of
    others are found if they share memory or a folder. Rank 0 shows how far it is, with rate and time left,
    and after the first batches what all of it will take.

    Calls run under `torch.no_grad`, and otherwise in the state that the caller has set: device, autocast,
    ``eval()``. Tensors on the CPU are moved to the device of the module's weights. Generators of random
    numbers are afterwards as before.

    Parameters
    ----------
    data : Dataset, DataLoader or iterable of batches
        A dataset has ``__getitem__`` and ``__len__``, or is an `IterableDataset`; its samples are put into
        batches by `torch.utils.data.default_collate`. A loader is read without shuffling, each sample once;
        one that gives each rank a part of its own, as with a `DistributedSampler`, is taken as it is, and so
        is any other iterable of batches.
    inputs : callable, optional
        ``inputs(batch)`` gives the arguments for a batch of samples: a tuple of them, a dict of them by
        name, or the only one. Default: the first element of a tuple or list, a dict by name, a tensor or a
        list of texts as it is.
    batch_size, num_workers : int
        Of the loader that is made for a dataset.
    method : str, optional
        The method to call, if several of an object are cached.

    Returns
    -------
    WarmupStats
        How many items were computed and found, and how long it took.

    Raises
    ------
    NotCachedError
        If calls cannot be cached, such as in training mode with dropout: nothing would be kept.
    OptionError
        If `data` is empty or no dataset, or if the module does not take what a batch is.

    Examples
    --------
    >>> from torchcache2 import torchcache
    >>> backbone = torchcache(nn.Linear(4, 2)).eval().requires_grad_(False)
    >>> images, labels = torch.rand(100, 4), torch.arange(100)
    >>> dataset = torch.utils.data.TensorDataset(images, labels)
    >>> warmed = backbone.cache_instance.warmup(dataset)
    >>> warmed.computed, warmed.found
    (100, 0)
    >>> features = backbone(images[:10])
    >>> backbone.cache_instance.stats().hits
    10
    """
    self = self.of(method)
    with self.join():  # shares may have different numbers of batches, or none, which is an error
        return _warmed_up(self, data, inputs, batch_size, num_workers)


def _warmed_up(
    self: Warmable, data: Any, inputs: Callable[[Any], Any] | None, batch_size: int, num_workers: int
) -> WarmupStats:
    collective = self.engine.collective
    root, name, where = self.living_root(), self.name, place() if collective is None else collective.place()
    if self.engine.is_closed:
        raise NotCachedError(f"{name}: its cache is closed, so nothing would be kept")
    is_sharded = self.keeper.looks_sharded(root)  # then all ranks have to make as many calls
    share = share_of(data, where, batch_size, num_workers, is_even=is_sharded)
    if not self.settings.enabled or disabled_by_environment():
        logger.info("%s: nothing is warmed up, because caching is turned off", name)
        return WarmupStats(0, 0, 0.0, 0)
    if where.rank == 0 and getattr(root, "training", False):
        logger.warning(
            "%s: it is warmed up in training mode, and its rows will be found in that mode only; "
            "call .eval() first if it is to be used in that mode",
            name,
        )
    progress = Progress(
        name, self.engine.counters, self.engine.tiers, share.items, share.total, is_shown=where.rank == 0
    )
    generator = getattr(share.batches, "generator", None)
    generators = [generator] if isinstance(generator, torch.Generator) else []
    random = RandomState([*self.keeper.generators, *generators])
    try:
        with torch.no_grad():
            for batch in share.batches:
                _warm(self, root, batch, inputs, progress)
    finally:
        random.restore()
        progress.close()
    if progress.batches == 0 and share.items != 0 and where.rank == 0:
        raise OptionError("data is empty: it has given no batch. Has somebody else read it to its end?")
    self.flush()
    return progress.stats()


def _warm(
    cache: Warmable, root: Any, batch: Any, inputs: Callable[[Any], Any] | None, progress: Progress
) -> None:
    """Have the items of one batch computed, those that are not there."""
    name = cache.name
    args, kwargs = _arguments(batch, inputs)
    if progress.batches == 0:
        _check_arguments(name, root, cache.method, batch, args, kwargs)
    args, kwargs = _moved((args, kwargs), root)
    stops = of_module(cache.keeper, root, is_without_grad=True)
    if stops := [stop for stop in stops if stop.reason != "lazy"]:  # the first call makes such parameters
        raise BypassError.all_of(stops).as_error(name)
    for is_last in (False, True):  # the first call may set something up, and not be cached for that
        if isinstance(root, types.FunctionType):
            output = cache.call(Forward(root), args, kwargs)
        elif isinstance(root, nn.Module) and cache.method == "forward":
            output = root(*args, **kwargs)
        else:
            output = getattr(root, cache.method)(*args, **kwargs)
        reason = cache.bypass
        if reason is None:
            progress.update(_stored_bytes(output, cache.settings.cache_dtype))
            return
        if is_last:
            raise BypassError(reason, cache.reasons[reason]).as_error(name)


def _arguments(batch: Any, inputs: Callable[[Any], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a batch of samples, by position and by name."""
    if inputs is not None:
        given = inputs(batch)
        if isinstance(given, tuple):
            return given, {}
    elif isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], str):
        given = batch[0]
    elif isinstance(batch, (tuple, list, Mapping, Tensor, np.ndarray)):
        given = batch
    else:
        raise OptionError(f"a batch of samples is {_outline(batch)}: {_ADVICE}")
    return ((), dict(given)) if isinstance(given, Mapping) else ((given,), {})


def _check_arguments(
    name: str, root: Any, method: str, batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise if the arguments are not those of the method; a hook may change them before a forward."""
    if getattr(root, PRE_HOOKS, None) and method == "forward":
        return
    signature = inspect.signature(getattr(root, method, root))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(
            f"{name}{signature} does not take a batch of samples, {_outline(batch)}: {error}; {_ADVICE}"
        ) from None


def _outline(batch: Any) -> str:
    """What a batch of samples is made of, in some words."""
    if isinstance(batch, Mapping):
        return f"a dict of {listed([repr(key) for key in batch])}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {listed([type(element).__name__ for element in batch])}"
    return f"of type {type(batch).__name__}"


def _moved(arguments: Any, root: Any) -> Any:
    """The arguments, with tensors on the CPU moved to where the first weights of the module are."""
    weights = chain(root.parameters(), root.buffers()) if isinstance(root, nn.Module) else ()
    lazy = getattr(root, "__dict__", {}).get(LAZY_ATTRIBUTE)
    device = next((weight.device for weight in weights), _CPU) if lazy is None else lazy.device()
    if device.type in ("cpu", "meta"):
        return arguments

    def moved(leaf: Any) -> Any:
        return (
            leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) and leaf.device == _CPU else leaf
        )

    return mapped(moved, arguments)


def _stored_bytes(output: Any, cache_dtype: torch.dtype | None) -> int:
    """Bytes of the rows of an output, as they are kept."""
    leaves = leaves_of(output, objects=True)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    dtypes = [cache_dtype if cache_dtype and leaf.is_floating_point() else leaf.dtype for leaf in tensors]
    size = sum(leaf.numel() * dtype.itemsize for leaf, dtype in zip(tensors, dtypes, strict=True))
    return size + sum(leaf.nbytes for leaf in leaves if isinstance(leaf, np.ndarray))
