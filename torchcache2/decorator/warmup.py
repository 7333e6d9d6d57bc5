"""`warm_up`: computes the items of a dataset before they are needed, each on one rank.

Ranks divide the samples of a dataset or loader among them, see `share_of`. `estimate` predicts the cost.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from torchcache2.core.errors import NotCachedError, OptionError, OutputError
from torchcache2.core.logs import logger, shown
from torchcache2.core.private import PRE_HOOKS
from torchcache2.core.process import Place, place
from torchcache2.core.settings import disabled_by_environment
from torchcache2.core.values import UnstorableError, mapped
from torchcache2.decorator.bypass import BypassError, of_module
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.running import Forward
from torchcache2.engine.warmup import ADVICE, OPTION, Estimate, Looks, Progress, WarmupStats, output_sizes
from torchcache2.identity.libraries import weights_of
from torchcache2.identity.marks import LAZY_ATTRIBUTE

_CPU = torch.device("cpu")
_SHARED_OUT = ("num_replicas", "num_processes")  # attributes of what gives each rank its own part already
_ADVICE = "pass inputs, which maps a batch of samples to the arguments: inputs=lambda batch: batch[{!r}]"

_EMPTY = "data is empty: it gave no batch. Was it read to its end before?"


def warm_up(
    self: Any,
    data: Any,
    *,
    inputs: Callable[[Any], Any] | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    method: str | None = None,
) -> WarmupStats:
    """Compute the items of a dataset that are not cached yet.

    In a job of several ranks, all of them call this, and each takes every n-th sample: rank and number of
    ranks come from `torch.distributed` or, if that is not initialised, from ``RANK`` and ``WORLD_SIZE``.
    Ranks do not wait for each other. Rank 0 shows progress, rate and time left and, after the first batches,
    an estimate of memory, disk and time.

    Calls run under `torch.no_grad`, and otherwise in the caller's state: device, autocast, ``eval()``.
    Tensors on the CPU are moved to the device of the module's weights. Random generators keep their state.

    Parameters
    ----------
    data : Dataset, DataLoader or iterable of batches
        A dataset has ``__getitem__`` and ``__len__``, or is an `IterableDataset`;
        `torch.utils.data.default_collate` puts its samples into batches. A loader is read without shuffling,
        each sample once. A loader that already divides data among ranks, such as by a `DistributedSampler`,
        is used as it is, and so is any other iterable of batches.
    inputs : callable, optional
        ``inputs(batch)`` returns the arguments for a batch of samples: a tuple, a dict by name, or a single
        one. Default: the first element of a tuple or list, a dict by name, a tensor or a list of texts
        unchanged.
    batch_size, num_workers : int
        For the loader made for a dataset.
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
        If `data` is empty or not a dataset, or if the module does not accept a batch of it.

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
    self, root, share = _begun(self, method, data, batch_size, num_workers)
    name, is_rank_zero = self.name, place().rank == 0
    if not self.settings.enabled or disabled_by_environment():
        logger.info("%s: nothing is warmed up, because caching is turned off", name)
        return WarmupStats(0, 0, 0.0, 0)
    if is_rank_zero and getattr(root, "training", False):
        logger.warning(
            "%s: it is warmed up in training mode, and its rows are found in training mode only; for "
            "evaluation, call .eval() first",
            name,
        )
    counters, tiers = self.engine.counters, self.engine.tiers
    progress = Progress(name, counters, tiers, share.items, share.total, is_shown=is_rank_zero)
    try:
        with torch.no_grad(), _random_as_before(self, share):
            for batch in share.batches:
                _warm(self, root, batch, inputs, progress)
    finally:
        progress.close()
    if progress.batches == 0 and share.items != 0 and is_rank_zero:
        raise OptionError(_EMPTY)
    self.flush()
    return progress.stats()


def _warm(cache: Any, root: Any, batch: Any, inputs: Callable[[Any], Any] | None, progress: Progress) -> None:
    """Compute the missing items of one batch."""
    args, kwargs = _ready(cache, root, batch, inputs, is_first=progress.batches == 0)
    for is_last in (False, True):  # the first call may initialise something, and so not be cached
        if isinstance(root, types.FunctionType):
            output = cache.call(Forward(root), args, kwargs)
        else:
            output = _called(cache, root)(*args, **kwargs)
        reason = cache.bypass
        if reason is None:
            count = cache._known.signature.count(args, kwargs)
            progress.update(functools.partial(output_sizes, output, count, cache.settings))
            return
        if is_last:
            raise BypassError(reason, cache.reasons[reason]).as_error(cache.name)


def _ready(
    cache: Any, root: Any, batch: Any, inputs: Callable[[Any], Any] | None, *, is_first: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a batch of samples; raises if calls cannot be cached now."""
    args, kwargs = arguments_of(batch, inputs)
    if is_first:
        _check_arguments(cache.name, root, cache.method, batch, args, kwargs)
    stops = of_module(cache.keeper, root, is_without_grad=True)
    if stops := [stop for stop in stops if stop.reason != "lazy"]:  # the first call creates lazy parameters
        raise BypassError.all_of(stops).as_error(cache.name)
    return _moved((args, kwargs), root)  # type: ignore[no-any-return]


def _called(cache: Any, root: Any) -> Callable[..., Any]:
    """The called object: a module, a function, or another method."""
    is_whole = isinstance(root, types.FunctionType) or (
        isinstance(root, nn.Module) and cache.method == "forward"
    )
    return root if is_whole else getattr(root, cache.method)  # type: ignore[no-any-return]


def estimate(
    self: Any,
    data: Any,
    batches: int = 4,
    *,
    inputs: Callable[[Any], Any] | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    method: str | None = None,
) -> Estimate:
    """The cost of caching the items of a dataset: bytes in memory and on disk, and time.

    Runs a few batches through the plain forward, compresses their outputs as on disk, and drops them: nothing
    is stored. Random generators keep their state.

    Parameters
    ----------
    data, inputs, batch_size, num_workers, method
        As for `warmup`. The batches taken from an iterator are lost.
    batches : int
        How many batches to examine. If more than one, the time of the first, which also starts workers and
        compiles, does not count.

    Returns
    -------
    Estimate
        The cost of all items. Printing it shows that, whether the budgets suffice, and which would.

    Raises
    ------
    NotCachedError
        If calls cannot be cached, such as in training mode with dropout.
    OptionError
        As for `warmup`.

    Examples
    --------
    >>> from torchcache2 import torchcache
    >>> backbone = torchcache(nn.Linear(4, 2)).eval().requires_grad_(False)
    >>> found = backbone.cache_instance.estimate(torch.rand(1_000_000, 4))
    >>> found.items, found.memory_bytes, found.fits
    (1000000, 51000000, True)
    """
    if type(batches) is not int or batches < 1:
        raise OptionError(f"batches={batches!r}: expected an int of at least 1")
    self, root, share = _begun(self, method, data, batch_size, num_workers)
    forward = Forward(_called(self, root))
    looks, start = Looks(), time.perf_counter()
    with torch.no_grad(), _random_as_before(self, share):
        for batch in islice(share.batches, batches):
            args, kwargs = _ready(self, root, batch, inputs, is_first=not looks)
            output = self._known.runner.run(forward, args, kwargs)  # counts as the cache's own call
            seconds, count = time.perf_counter() - start, self._known.signature.count(args, kwargs)
            try:
                looks.add(count, seconds, output_sizes(output, count, self.settings))
            except (UnstorableError, OutputError) as error:
                raise NotCachedError(f"{self.name}: its output cannot be stored: {error}") from None
            start = time.perf_counter()
    if looks.items == 0:
        raise OptionError(_EMPTY)
    mine, total = share.items, share.total
    if mine is None and isinstance(share.batches, Sized):
        mine = total = max(looks.items, len(share.batches) * looks.items // len(looks))
    return looks.estimate(self.engine.tiers, mine, total, advice=ADVICE, option=OPTION)


def _begun(
    cache: Any, method: str | None, data: Any, batch_size: int, num_workers: int
) -> tuple[Any, Any, Share]:
    """The cache of a method, its object, and this rank's batches; raises if nothing would be kept."""
    cache = cache.of(method)
    if cache.engine.is_closed:
        raise NotCachedError(f"{cache.name}: its cache is closed, so nothing would be kept")
    return cache, cache.living_root(), share_of(data, place(), batch_size, num_workers)


@contextlib.contextmanager
def _random_as_before(cache: Any, share: Share) -> Iterator[None]:
    """Restore random generators at the end."""
    generator = getattr(share.batches, "generator", None)
    generators = [generator] if isinstance(generator, torch.Generator) else []
    random = RandomState([*cache.keeper.generators, *generators])
    try:
        yield
    finally:
        random.restore()


def arguments_of(batch: Any, inputs: Callable[[Any], Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        raise OptionError(f"a batch of samples is {shown(batch)}: {_ADVICE.format(1)}")
    return ((), dict(given)) if isinstance(given, Mapping) else ((given,), {})


def _check_arguments(
    name: str, root: Any, method: str, batch: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise if the arguments do not fit the method; skipped if hooks before a forward may change them."""
    if getattr(root, PRE_HOOKS, None) and method == "forward":
        return
    signature = inspect.signature(getattr(root, method, root))
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        example = next(iter(batch), 1) if isinstance(batch, Mapping) else 1
        advice = _ADVICE.format(example)
        raise OptionError(
            f"{name}{signature} does not take a batch of samples, {shown(batch)}: {error}; {advice}"
        ) from None


def _moved(arguments: Any, root: Any) -> Any:
    """The arguments, with CPU tensors moved to the device of the module's first weight."""
    lazy = getattr(root, "__dict__", {}).get(LAZY_ATTRIBUTE)
    device = next((weight.device for weight in weights_of(root)), _CPU) if lazy is None else lazy.device()
    if device.type in ("cpu", "meta"):
        return arguments

    def moved(leaf: Any) -> Any:
        return (
            leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) and leaf.device == _CPU else leaf
        )

    return mapped(moved, arguments)


class Share(NamedTuple):
    """The batches of this rank, and the number of items on this rank and on all. None: unknown."""

    batches: Iterable[Any]
    items: int | None
    total: int | None


def share_of(data: Any, where: Place, batch_size: int, num_workers: int) -> Share:
    """A rank's batches of a dataset, a loader, or any other iterable of batches.

    Other iterables, and loaders that already divide data among ranks, such as by a `DistributedSampler`, are
    used as they are. Raises `OptionError` for anything else, and for empty data.
    """
    is_one = isinstance(data, (str, bytes, Mapping))
    if isinstance(data, DataLoader):
        share = _of_loader(data, where)
    elif isinstance(data, IterableDataset):
        stream = _Turns(data, where) if where.world_size > 1 else data
        loader: Any = DataLoader(stream, batch_size, num_workers=num_workers)
        share = Share(loader, *_counts(data, where))
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_one:
        turns = range(len(data))[where.rank :: where.world_size]
        loader = DataLoader(data, batch_size, sampler=turns, num_workers=num_workers)
        share = Share(loader, len(turns), len(data))
    elif isinstance(data, Iterable) and not is_one:
        share = Share(data, None, None)
    else:
        raise OptionError(
            f"data is of type {type(data).__name__}: expected a dataset (with __getitem__ and __len__, or an "
            "IterableDataset), a DataLoader, or an iterable of batches, such as iter([batch])"
        )
    if share.total == 0:
        raise OptionError("data is empty: there is nothing to warm up with. Is it the right split or folder?")
    return share


def _of_loader(loader: DataLoader[Any], where: Place) -> Share:
    dataset, sampler = loader.dataset, loader.sampler
    if any(hasattr(part, name) for part in (dataset, sampler, loader.batch_sampler) for name in _SHARED_OUT):
        items = len(sampler) if isinstance(sampler, Sized) else None
        return Share(loader, items, None if items is None else items * where.world_size)
    if isinstance(dataset, IterableDataset):
        stream = _Turns(dataset, where) if where.world_size > 1 else dataset
        return Share(_with(loader, dataset=stream), *_counts(dataset, where))
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        # The composition of batches may matter, such as for padding: all ranks must make the same batches.
        if isinstance(loader.batch_sampler, Sized):
            random = RandomState([])
            made = list(islice(loader.batch_sampler, len(loader.batch_sampler)))
            random.restore()  # what it drew, it draws once more in the caller's own loop
            own = made[where.rank :: where.world_size]
            return Share(_with(loader, batch_sampler=own), sum(map(len, own)), sum(map(len, made)))
        return Share(_with(loader, batch_sampler=_Turns(loader.batch_sampler, where)), None, None)
    if isinstance(sampler, (SequentialSampler, RandomSampler)):
        indices: Any = range(len(dataset))  # type: ignore[arg-type]
    else:
        count = len(sampler) if isinstance(sampler, Sized) else None
        indices = sorted(set(islice(sampler, count)))  # sorted, as ranks may draw different orders
    mine = indices[where.rank :: where.world_size]
    if loader.batch_size is None:  # the dataset's samples are batches
        return Share(_with(loader, sampler=mine), None, None)
    batches = BatchSampler(mine, loader.batch_size, drop_last=False)
    return Share(_with(loader, batch_sampler=batches), len(mine), len(indices))


def _with(loader: DataLoader[Any], **fields: Any) -> DataLoader[Any]:
    """A copy of a loader, of any class, with other samplers, which torch sets only in constructors."""
    copied = copy.copy(loader)
    vars(copied).update(fields, _iterator=None)
    return copied


def _counts(stream: Any, where: Place) -> tuple[int | None, int | None]:
    """How many samples of a stream this rank has, and how many there are."""
    if not isinstance(stream, Sized):
        return None, None
    return len(range(where.rank, len(stream), where.world_size)), len(stream)


class _Turns(IterableDataset[Any]):
    """Every so many elements of something: those that are this rank's turn."""

    def __init__(self, elements: Iterable[Any], where: Place) -> None:
        self._elements, self._where = elements, where

    def __iter__(self) -> Iterator[Any]:
        return islice(self._elements, self._where.rank, None, self._where.world_size)
