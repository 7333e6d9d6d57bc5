"""`Batch`: the items of one call: hits, misses, and calls of the forward for the misses."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OutputError
from torchcache2.core.keys import Keys, Positions
from torchcache2.core.rows import Rows, rounded
from torchcache2.core.settings import CacheSettings
from torchcache2.core.values import UnstorableError
from torchcache2.engine.values.outputs import Lists, output_of, rows_of

Compute = Callable[[Tensor], Any]
_AGAIN = ContextVar("torchcache2_again", default=False)


def computed_again(compute: Callable[..., Any], *args: Any) -> Any:
    """Compute items to check rows, so inner cached modules compute too.

    Otherwise outputs computed from an inner module's rows would not check those rows.
    """
    before = _AGAIN.get()
    try:  # no context manager: an interrupt that is kept, as in a notebook, would keep it open
        _AGAIN.set(True)
        return compute(*args)
    finally:
        _AGAIN.set(before)


def is_computed_again() -> bool:
    """Whether `computed_again` runs in this thread."""
    return _AGAIN.get()


class RefusedError(Exception):
    """Raised when a call must not be cached.

    `reason` is a word for statistics, and `text` a sentence. `error` is the exception behind it, if any.
    """

    def __init__(self, reason: str, text: str, error: Exception | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.text = text
        self.error = error


class NotStoredError(RefusedError):
    """Raised when an output must not be stored; carries the output of the whole batch."""

    def __init__(self, reason: str, text: str, output: Any, error: Exception | None = None) -> None:
        super().__init__(reason, text, error)
        self.output = output


class WrongRowsError(NotStoredError):
    """Raised when found rows differ from the computed ones."""


class WholeBatch:
    """The result of a computation that computed all items although only some were requested."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Checks:
    """Decides when to compute a whole batch, to check its rows. This base class never does.

    Attributes
    ----------
    computes_parts : bool
        Whether to compute parts of the batch by themselves, too.
    is_just_check : bool
        Whether all items were found, so that they are computed for nothing else.
    seconds, of_parts : float
        Time spent on checks: in all, and on parts of the batch.
    unchecked : int
        Found items that were due to be checked, but whose forward could not run.
    """

    computes_parts = is_just_check = False
    seconds = of_parts = 0.0
    unchecked = 0

    def is_due(self, found: int) -> bool:
        """Whether to compute the whole batch; `found` of its items were found."""
        return False

    def give_up(self, found: int) -> None:
        """Record that the forward cannot run to check `found` rows."""
        self.unchecked += found

    def computed_whole(self) -> None:
        """Record that one forward has computed the rows of the whole batch."""

    def settle(self, batch: Batch, seconds: float) -> None:
        """Record that a batch took so many seconds in all."""


class Source(Protocol):
    """Computes the items of a batch."""

    @property
    def checks(self) -> Checks:
        """Whether to check the rows of this batch."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the call: outputs computed there are returned there."""
        ...

    @property
    def lists(self) -> Lists | None:
        """Finds lists in the output with an entry for each item; None if there are none."""
        ...

    def compute(self, positions: Tensor) -> Any:
        """The output for the items at some positions (int64, CPU, shape ``(k,)``), or a `WholeBatch`.

        The output is a pytree whose tensors have shape ``(k, ...)``. Positions are ascending; with
        ``miss_batch="pad"`` the last one may be repeated.
        """
        ...

    def dtypes(self) -> Collection[torch.dtype]:
        """The dtypes that the forward reads: comparisons tolerate the rounding of the coarsest."""
        ...

    def description(self, namespace: bytes) -> Mapping[str, Any]:
        """The description of the namespace as JSON, for people and `explain`."""
        ...

    def is_outdated(self) -> bool:
        """Whether rows that equal the computed ones may be wrong all the same; asked at each check."""
        ...

    def distrust(self) -> None:
        """Record that a row was wrong: the module may have changed unnoticed."""
        ...


class FunctionSource:
    """A source that is a function of positions."""

    lists: Lists | None = None

    def __init__(
        self,
        compute: Compute,
        device: torch.device,
        description: Callable[[bytes], Mapping[str, Any]] = lambda namespace: {},
    ) -> None:
        self.compute, self.device, self.description = compute, device, description
        self.checks = Checks()

    def dtypes(self) -> Collection[torch.dtype]:
        """Unknown, as a function may read anything."""
        return ()

    def is_outdated(self) -> bool:
        """False: a function is not watched for changes."""
        return False

    def distrust(self) -> None:
        """Does nothing: a function is not watched for changes."""


class Hits(NamedTuple):
    """The items of a batch that the tiers have.

    Attributes
    ----------
    positions : ndarray of int64, shape (h,)
        Where the items are in the batch, ascending.
    rows : Rows, optional
        Their h rows; None if there are none.
    checked : ndarray of int64, shape (c,)
        Positions whose items are computed again, to be compared.
    """

    positions: Positions
    rows: Rows | None
    checked: Positions


class Misses(NamedTuple):
    """The items of a batch that the tiers lack.

    Attributes
    ----------
    positions : ndarray of int64, shape (m,)
        Where the items are in the batch, ascending.
    distinct : ndarray of int64, shape (k,)
        First position of each distinct key: these items are computed.
    inverse : ndarray of int64, shape (m,), optional
        For each miss, the index in `distinct` of its key; None if all keys differ.
    """

    positions: Positions
    distinct: Positions
    inverse: Positions | None

    @classmethod
    def of(cls, keys: Keys, hits: Hits) -> Misses:
        """All items of a batch except the hits."""
        missing = np.ones(len(keys), bool)
        missing[hits.positions] = False
        positions = np.flatnonzero(missing)
        duplicates = keys.take(positions).first_positions()
        if duplicates is None:
            return cls(positions, positions, None)
        return cls(positions, positions[duplicates[0]], duplicates[1])


class Batch:
    """Lets a source compute items of a batch, and counts them.

    Attributes
    ----------
    misses : int
        Items that were computed because they were not found.
    computed : int
        Items that the forward has computed, padding included; repeated items count again.
    seconds : float
        Time spent in the forward.
    whole : Rows, optional
        The rows of all n items, if the forward computed the whole batch instead of parts.
    is_checked : bool
        Whether the whole batch is computed, to compare all found rows.
    is_compared : bool
        Whether any found rows are compared.
    """

    def __init__(self, keys: Keys, source: Source, settings: CacheSettings) -> None:
        self.keys, self.source = keys, source
        self.dtype = settings.cache_dtype
        self.misses = self.computed = 0
        self.seconds = 0.0
        self.whole: Rows | None = None
        self.is_checked = self.is_compared = False
        self._last: Rows | None = None  # the last computed rows
        self._pads = settings.miss_batch == "pad"

    def compute(self, positions: Positions) -> tuple[Any, Rows]:
        """Compute the items at some positions.

        Parameters
        ----------
        positions : ndarray of int64, shape (k,)
            Ascending.

        Returns
        -------
        output : pytree
            The forward's output. Its tensors have shape ``(p, ...)``, where p > k with padding, or if the
            forward can run only for the whole batch.
        rows : Rows
            The k rows of the items at `positions`, in that order.

        Raises
        ------
        NotStoredError
            If the output has no rows; it carries the output of the whole batch.
        """
        if self._last is not None:  # the forward may reuse these rows' memory
            self._last.columns = tuple([column.clone() for column in self._last.columns])
        count, padded = len(positions), self._padded(positions)
        output = self._timed(padded)
        is_whole = isinstance(output, WholeBatch)
        if is_whole:
            output = output.output
            self.computed += len(self.keys) - len(padded)
            padded = np.arange(len(self.keys))
        try:
            source = self.source
            rows = rows_of(output, len(padded), source.lists, device=source.device, dtype=self.dtype)
        except (UnstorableError, OutputError) as error:
            if len(padded) < len(self.keys):
                output = self._timed(np.arange(len(self.keys)))
            raise NotStoredError("output", str(error), output, error) from None
        if is_whole:
            self.whole = rows
        if count < len(padded):
            is_all = len(padded) == len(self.keys)
            rows = rows.take(torch.from_numpy(positions)) if is_all else rows.head(count)
        self._last = rows
        return output, rows

    def compute_all(self) -> Any:
        """The output of the whole batch, tensors of shape ``(n, ...)``, computed without the cache."""
        self.misses = len(self.keys)
        output = self._timed(np.arange(len(self.keys)))
        return output if self.dtype is None else rounded(output, self.dtype)

    def output(self, rows: Rows) -> Any:
        """Build the output from the n rows of the whole batch; tensors have shape ``(n, ...)``."""
        try:
            return output_of(rows, device=self.source.device)
        # Rows from different batches may disagree about a value of the whole batch; or a node's class may
        # have changed since, and refuse its children.
        except Exception:
            return self.compute_all()

    def _padded(self, positions: Positions) -> Positions:
        """The positions to compute: with ``miss_batch="pad"`` a power of two of them, or the whole batch.

        Padding repeats the last position; the positions of the whole batch are in order.
        """
        count = len(positions)
        if not self._pads or count == 0:
            return positions
        size = 1 << (count - 1).bit_length()
        if size >= len(self.keys):
            return np.arange(len(self.keys))
        return np.concatenate([positions, np.repeat(positions[-1:], size - count)])

    def _timed(self, positions: Positions) -> Any:
        start = time.perf_counter()
        try:
            compute, items = self.source.compute, torch.from_numpy(positions)
            return computed_again(compute, items) if self.is_compared else compute(items)
        finally:
            self.seconds += time.perf_counter() - start
            self.computed += len(positions)
