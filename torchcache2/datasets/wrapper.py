"""`Wrapper`: a dataset that appears as another one, and notices when that is changed through it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from torchcache2.core.logs import logger
from torchcache2.datasets.fetch import Fetcher
from torchcache2.datasets.fingerprint import length_of
from torchcache2.datasets.plan import Plan
from torchcache2.datasets.source import Source

_OF_PROCESS = ("_source", "_fetcher")
_OWN = ("_plan", "_is_closed", *_OF_PROCESS)  # attributes; all others are the dataset's


class own_batches:  # noqa: N801
    """Makes a ``__getitems__`` that a wrapper with a ``__getattr__`` does not have.

    A `DataLoader` prefers it to the wrapper's ``__getitem__``, and what that does to samples would be lost.
    """

    def __init__(self, function: Callable[..., list[Any]]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, dataset: Any, kind: Any = None) -> Callable[..., list[Any]]:
        name = sys._getframe(1).f_code.co_name
        if dataset is not None and name in ("__getattr__", "__getattribute__"):
            raise AttributeError("__getitems__ is not passed on to wrappers, which have a __getitem__")
        bound: Callable[..., list[Any]] = self._function.__get__(dataset, kind)
        return bound


class Wrapper(Dataset[Any]):
    """What a `CachedDataset` has of its dataset. A pickle holds the plan, and what users have set."""

    _plan: Plan
    _source: Source
    _fetcher: Fetcher | None
    _is_closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._source = self._plan.source()
        self._fetcher = None if self._is_closed else self._plan.fetcher(self._source)

    def __len__(self) -> int:
        length = length_of(self._plan.dataset)
        return len(self._plan.dataset) if length is None else length  # this says why there is none

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_torchcache")) or name in _OWN:  # also while a pickle is read
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._plan.dataset, name)
        if name.startswith("set_") and callable(value):
            return functools.partial(self._change, value)
        return value

    def _change(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the dataset, such as ``set_epoch``, and cache no more if that changes it."""
        if self._fetcher is None:
            return method(*args, **kwargs)
        before = self._plan.seen()
        result = method(*args, **kwargs)
        if self._plan.seen() != before:
            logger.warning(
                "%s: %s has changed the dataset, so it is cached no more. Give what depends on the epoch as "
                "transform=, which runs after the cache",
                self._plan.title,
                method.__name__,
            )
            self.close()
        return result

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or not hasattr(self._plan.dataset, name):
            super().__setattr__(name, value)
        elif get_worker_info() is not None:  # such as a file that a worker_init_fn opens
            self._change(setattr, self._plan.dataset, name, value)
        else:
            raise AttributeError(
                f"{name} is an attribute of the dataset that is cached, which must not be changed: what is "
                "kept are samples without the change. Set it before CachedDataset(dataset) is made"
            )

    def close(self) -> None:
        """Let go of the samples in memory; from now on this process loads all that it is asked for.

        What waits to be written is on disk when this returns.
        """
        self._is_closed = True
        fetcher, self._fetcher = self._fetcher, None
        if fetcher is not None:
            fetcher.levels.close()
