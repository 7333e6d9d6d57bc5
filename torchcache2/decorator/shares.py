"""What a rank takes of a dataset or loader: ranks take turns, so that together they have all of it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from torchcache2.core.errors import OptionError
from torchcache2.core.process import Place

__all__ = ["Share", "share_of"]

_SHARED_OUT = ("num_replicas", "num_processes")  # attributes of what gives each rank its own part already


class Share(NamedTuple):
    """The batches of this rank, and how many items there are: here, and on all ranks. None: not known."""

    batches: Iterable[Any]
    items: int | None
    total: int | None


def share_of(data: Any, where: Place, batch_size: int, num_workers: int, *, is_even: bool = False) -> Share:
    """The batches that a rank takes of a dataset, a loader, or any other iterable of batches.

    The last kind, and a loader that gives each rank a part of its own, such as one with a
    `DistributedSampler`, are taken as they are. If shares are to be even, some samples are there twice, so
    that each rank has the same number of them; of streams and of batches of samplers they may still differ
    by one. Raises `OptionError` of anything else, and if it is empty.
    """
    for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if type(value) is not int or value < least:
            raise OptionError(f"{name}={value!r}: expected an int of at least {least}")
    if isinstance(data, Mapping):
        raise OptionError(
            f"data is of type {type(data).__name__}, which is no dataset: give one of its values, or "
            "iter([data]) if it is a batch of samples"
        )
    is_text = isinstance(data, (str, bytes))
    if isinstance(data, DataLoader):
        share = _of_loader(data, where, is_even)
    elif isinstance(data, IterableDataset):
        stream = _Turns(data, where) if where.world_size > 1 else data
        loader: Any = DataLoader(stream, batch_size, num_workers=num_workers, collate_fn=_collated)
        share = Share(loader, *_counts(data, where))
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not is_text:
        turns = _turns(range(len(data)), where, is_even)
        loader = DataLoader(data, batch_size, sampler=turns, num_workers=num_workers, collate_fn=_collated)
        share = Share(loader, len(turns), len(data))
    elif isinstance(data, Iterable) and not is_text:
        share = Share(data, None, None)
    else:
        raise OptionError(
            f"data is of type {type(data).__name__}: expected a dataset (with __getitem__ and __len__, or an "
            "IterableDataset), a DataLoader, or an iterable of batches"
        )
    if share.total == 0:
        raise OptionError("data is empty: there is nothing to warm up with. Is it the right split or folder?")
    return share


def _turns(indices: Any, where: Place, is_even: bool) -> Any:
    """Which of some indices are this rank's, a range or a list."""
    mine = indices[where.rank :: where.world_size]
    is_short = is_even and len(mine) * where.world_size < len(indices)
    return [*mine, indices[0]] if is_short else mine


def _of_loader(loader: DataLoader[Any], where: Place, is_even: bool) -> Share:
    dataset, sampler = loader.dataset, loader.sampler
    if any(hasattr(part, name) for part in (dataset, sampler, loader.batch_sampler) for name in _SHARED_OUT):
        items = len(sampler) if isinstance(sampler, Sized) else None
        return Share(loader, items, None if items is None else items * where.world_size)
    if isinstance(dataset, IterableDataset):
        stream = _Turns(dataset, where) if where.world_size > 1 else dataset
        return Share(_with(loader, dataset=stream), *_counts(dataset, where))
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        # What is in a batch may matter, such as for padding; each rank has to make the same batches.
        return Share(_with(loader, batch_sampler=_Turns(loader.batch_sampler, where)), None, None)
    if isinstance(sampler, (SequentialSampler, RandomSampler)):
        indices: Any = range(len(dataset))  # type: ignore[arg-type]
    else:
        count = len(sampler) if isinstance(sampler, Sized) else None
        indices = sorted(set(islice(sampler, count)))  # ranks may draw them in different orders
    mine = _turns(indices, where, is_even)
    if loader.batch_size is None:  # what the dataset calls a sample is a batch
        return Share(_with(loader, sampler=mine), None, None)
    batches = BatchSampler(mine, loader.batch_size, drop_last=False)
    return Share(_with(loader, batch_sampler=batches), len(mine), len(indices))


def _with(loader: DataLoader[Any], **fields: Any) -> DataLoader[Any]:
    """The same loader, of whatever class, with other samplers; torch sets these in its constructor only."""
    copied = copy.copy(loader)
    vars(copied).update(fields, _iterator=None)
    return copied


def _counts(stream: Any, where: Place) -> tuple[int | None, int | None]:
    """How many samples of a stream are this rank's, and how many there are."""
    if not isinstance(stream, Sized):
        return None, None
    return len(range(where.rank, len(stream), where.world_size)), len(stream)


def _collated(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        raise OptionError(
            f"samples cannot be put into batches: {error}; give a DataLoader with a collate_fn of your own"
        ) from None


class _Turns(IterableDataset[Any]):
    """Every so many elements of something: those that are this rank's turn."""

    def __init__(self, elements: Iterable[Any], where: Place) -> None:
        self._elements, self._where = elements, where

    def __iter__(self) -> Iterator[Any]:
        return islice(self._elements, self._where.rank, None, self._where.world_size)
