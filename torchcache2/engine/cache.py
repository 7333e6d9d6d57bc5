"""`Cache`, the engine: looks keys up in the tiers, has the misses computed once, and keeps them.

All caches of one budget share a `TierStack`; each keeps the rows of its namespace there.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcache2.core.errors import OptionError, OutputError
from torchcache2.core.keys import Keys, Positions
from torchcache2.core.logs import ToldOnce, shown
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import is_out_of_memory, size_text
from torchcache2.core.version import __version__
from torchcache2.engine.batch import Batch, Checks, Compute, NotStoredError, WrongRowsError
from torchcache2.engine.collective.exchange import apart, is_told
from torchcache2.engine.outcomes import Outcomes
from torchcache2.engine.running import (
    Compiler,
    Forward,
    OwnMemoryError,
    device_of,
    is_of_forward,
    outside,
    transparent,
)
from torchcache2.engine.stack import TierStack
from torchcache2.engine.stats import CacheStats
from torchcache2.identity.marks import ADDED_ATTRIBUTE

__all__ = ["Cache", "now"]

_CPU = torch.device("cpu")
_NOWHERE: Positions = np.empty(0, np.int64)


def now() -> str:
    """The time, UTC, in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


class Cache(Outcomes):
    """Finds rows of one namespace, and has the others computed.

    Safe under threads. Two threads that miss the same key at once both compute it.

    Parameters
    ----------
    namespace : bytes
        16 bytes that say who computes, such as a digest of model name and version.
    settings : CacheSettings, optional
        Options.
    tiers : TierStack, optional
        Tiers to share with other caches.

    Examples
    --------
    >>> cache = Cache(b"squares, 2026-11", CacheSettings(max_memory_cache_size="1MB"))
    >>> keys = Keys(cache.namespace, np.arange(48, dtype=np.uint8).reshape(3, 16))
    >>> cache.fetch(keys, lambda positions: positions.double() ** 2)
    tensor([0., 1., 4.], dtype=torch.float64)
    >>> cache.fetch(keys.take(np.array([2, 0])), lambda positions: 1 / 0)
    tensor([4., 0.], dtype=torch.float64)
    """

    __module__ = "torchcache2"

    def __init__(
        self, namespace: bytes, settings: CacheSettings | None = None, *, tiers: TierStack | None = None
    ) -> None:
        if not isinstance(namespace, bytes) or len(namespace) != 16:
            raise OptionError(f"namespace={shown(namespace)}: expected 16 bytes, such as a 128-bit digest")
        self.namespace = namespace
        settings = settings if settings is not None else CacheSettings()
        super().__init__(settings, tiers if tiers is not None else TierStack(settings))
        self._told = ToldOnce()
        self._tiers.join(self)

    @transparent
    def fetch(self, keys: Keys, compute: Compute, *, device: torch.device = _CPU) -> Any:
        """The output for a batch: rows that are found, and the others computed.

        Parameters
        ----------
        keys : Keys
            The keys of the batch, n items.
        compute : callable
            ``compute(positions)`` returns the pytree for the items at `positions` (int64 tensor of
            shape ``(k,)``, ascending), its tensors of shape ``(k, ...)``. With ``miss_batch="pad"``
            the last position may be there several times. An exception leaves the cache as it was.
        device : torch.device
            The device of the call, on which outputs are returned that were computed there.

        Returns
        -------
        pytree
            As `compute` would return it for all positions, tensors of shape ``(n, ...)``.

        Raises
        ------
        OutputError
            If a computed tensor's first dimension is not the number of positions.
        """
        return outside(self._fetch, keys, compute, device)

    def _fetch(self, compiler: Compiler, keys: Keys, compute: Compute, device: torch.device) -> Any:
        forward = Forward(compute, compiler)
        try:
            with self._relieved():
                return self.output(keys, forward, device)
        except NotStoredError as stop:
            if isinstance(stop.error, OutputError):
                raise stop.error from None
            why = "; items depend on their batch, or on what their keys do not cover"
            self.count_bypass(stop.reason, len(keys), stop.text + why * isinstance(stop, WrongRowsError))
            return stop.output
        except OwnMemoryError:
            pass
        with self._relieved():
            return forward(torch.from_numpy(np.arange(len(keys))))

    def output(
        self,
        keys: Keys,
        compute: Compute,
        device: torch.device,
        dtypes: Callable[[], Collection[torch.dtype]] = tuple,
        since: float | None = None,
        checks: Checks | None = None,
        is_whole: Callable[[], bool] = lambda: False,
        is_sharded: bool = False,
    ) -> Any:
        """What `fetch` returns, for a `compute` that calls a `Forward`.

        ``dtypes()`` are those of the tensors that `compute` reads: comparisons tolerate what the coarsest of
        them rounds. The cost of caching is counted from the time `since` on (of `time.perf_counter`), by
        default from now on. `checks` say whether the rows of this batch are checked. ``is_whole()`` says
        whether `compute` runs for the whole batch whatever it is asked for, and `is_sharded`, whether it
        waits for the other ranks. `NotStoredError` if the output of `compute` must not, or cannot, be stored;
        `OwnMemoryError` if there is no memory for the cache's own work.
        """
        start = time.perf_counter() if since is None else since
        batch = Batch(keys, compute, device, self.settings, dtypes, checks)
        batch.is_whole, batch.is_sharded = is_whole, is_sharded
        try:
            output = self._outcome(batch)
        except Exception as error:
            # No rank may go on alone if a step of all ranks has ended with the error.
            if not is_out_of_memory(error) or is_told(error) or is_of_forward(error):
                raise
            self._do_without(len(keys), error)
            raise OwnMemoryError(error) from None
        self._counters.count(
            hits=len(keys) - batch.misses,
            misses=batch.misses,
            computed=batch.computed,
            seconds=batch.seconds,
            spent=time.perf_counter() - start - batch.seconds,
        )
        return output

    def _do_without(self, items: int, error: Exception) -> None:
        """Count items that are computed past the cache because there is no memory for its own work."""
        self._counters.count(hits=0, misses=items, computed=items, seconds=0.0, spent=0.0)
        text = "%s: there is no memory for the cache's own work, so the items are only computed: %s"
        self._told("own memory", text, self._name(), str(error))

    @contextlib.contextmanager
    def _relieved(self) -> Iterator[None]:
        """Around calls of the forward: if a device has no memory for one, the rows that are there go."""
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            freed = self._tiers.give_back(device_of(error))
            if freed:
                torch.cuda.empty_cache()
                self._told(
                    "memory",
                    "%s: the forward has found no memory on its device, so the cache has given back all that "
                    "its rows took there, %s. To keep fewer of them, lower max_memory_cache_size; "
                    "memory_cache_device='cpu' keeps them on the host",
                    *(self._name(), size_text(freed)),
                )
            raise

    def count_bypass(self, reason: str, items: int, text: str) -> None:
        """Count items that were computed and not stored; warns once for each reason."""
        self._counters.bypass(reason, items)
        self._told(reason, "%s: not cached (%s): %s", self._name(), reason, text)

    def stats(self) -> CacheStats:
        """What this cache has done so far."""
        return self._counters.stats(**self._tiers.stats())

    @property
    def cache_dir(self) -> Path | None:
        """The folder where rows are kept; None if they are kept in memory only."""
        directory = self._tiers.directory
        return None if directory is None else Path(directory.path)

    def description(self, namespace: bytes) -> dict[str, Any]:
        """What a namespace of this cache stands for, as JSON, for people and `explain`."""
        return {"class": None, "library": __version__, "torch": str(torch.__version__), "created": now()}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context, calls of this rank are answered without the others.

        It is for calls that not all ranks make, such as a validation on rank 0, if
        ``distributed="collective"``: rows that this rank has are found, what it lacks it computes, and nobody
        waits for anybody. It holds for all modules that this thread calls meanwhile.

        Examples
        --------
        >>> from torchcache2 import torchcache
        >>> backbone = torchcache(distributed="collective")(torch.nn.Linear(4, 2)).requires_grad_(False)
        >>> with backbone.cache_instance.alone():
        ...     features = backbone(torch.rand(3, 4))
        >>> backbone.cache_instance.stats().received
        0
        """
        with apart():
            yield

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop: a rank that is done with it goes on answering until all others are, too.

        It is for loops in which ranks call a module with ``distributed="collective"`` different numbers of
        times, such as the extraction of features. All ranks enter it. If the loop raises in one rank, the
        others raise `RankError`. With other options it does nothing.

        Raises
        ------
        RankError
            If another rank fails, or ends, before it is done.
        """
        with contextlib.nullcontext() if self.collective is None else self.collective.join():
            yield

    def flush(self) -> None:
        """Return when everything that was computed is as durable as the tiers make it."""
        self._tiers.flush()

    def clear(self) -> None:
        """Forget every row of this cache's namespace, on disk too."""
        self._drop(self.namespace)

    def close(self) -> None:
        """Stop caching and let go of the rows in memory; calls compute everything from then on.

        What waits to be written is on disk when this returns.
        """
        if not self._closed:
            self._closed = True
            self._tiers.forget(self.namespace)
            self._tiers.leave(self)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Cache, (self.namespace, self.settings)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.namespace.hex()}>"


setattr(Cache, ADDED_ATTRIBUTE, True)
