"""`Cache`, the engine: finds rows of a batch; claims, computes and keeps the missing ones; puts all together.

All caches of one budget share a `TierStack`; each keeps the rows of its namespace there. For a batch, the
cache looks its keys up in the tiers (`find`), and claims the missing ones, so that other processes wait for
them. The forward computes them, together with hits to verify. The tiers keep the computed rows, and the
output has hits and computed rows in batch order.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OptionError, OutputError
from torchcache2.core.keys import Keys, Positions
from torchcache2.core.logs import WarnOnce, logger, shown
from torchcache2.core.rows import Parts, Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.core.sizes import is_out_of_memory, size_text
from torchcache2.engine.batch import (
    Batch,
    FunctionSource,
    Hits,
    Misses,
    NotStoredError,
    Source,
    WrongRowsError,
)
from torchcache2.engine.running import (
    Compiler,
    Forward,
    OwnMemoryError,
    device_of,
    is_of_forward,
    outside,
    transparent,
)
from torchcache2.engine.stack import Describer, TierStack
from torchcache2.engine.stats import CacheStats, Counters
from torchcache2.engine.values.outputs import found, joined, stored
from torchcache2.engine.verify import differences
from torchcache2.identity.marks import ADDED_ATTRIBUTE, __version__
from torchcache2.tiers.base import Claim

_CPU = torch.device("cpu")
_NOWHERE: Positions = np.empty(0, np.int64)


def now() -> str:
    """The time, UTC, in ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")


class Cache:
    """Finds rows of one namespace, and computes the others.

    Safe under threads. Two threads that miss the same key at once both compute it.

    Parameters
    ----------
    namespace : bytes
        16 bytes that identify who computes, such as a digest of model name and version.
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
        self.settings = settings if settings is not None else CacheSettings()
        self.tiers = tiers if tiers is not None else TierStack(self.settings)
        self.counters = Counters()
        self.tell = WarnOnce()
        self.name = repr(self)  # in messages
        self.is_closed = False
        self.face: Callable[[], Describer | None] = lambda: None  # describes namespaces better; weak
        self.must_stack = False  # refuse rows that do not stack: items depend on their batch
        self._random_shares = np.random.default_rng()
        self.tiers.join(self)

    @transparent
    def fetch(self, keys: Keys, compute: Callable[[Tensor], Any], *, device: torch.device = _CPU) -> Any:
        """The output for a batch: found rows, and the other items computed.

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

    def _fetch(
        self, compiler: Compiler, keys: Keys, compute: Callable[[Tensor], Any], device: torch.device
    ) -> Any:
        forward = Forward(compute, compiler)
        try:
            return self.output(keys, FunctionSource(forward, device, self.description))
        except NotStoredError as stop:
            if isinstance(stop.error, OutputError):
                raise stop.error from None
            why = "; items depend on their batch, or on what their keys do not cover"
            text = stop.text + why * isinstance(stop, WrongRowsError)
            self.count_bypass(stop.reason, len(keys), text)
            return stop.output
        except OwnMemoryError:
            pass
        except torch.cuda.OutOfMemoryError as error:
            self.relieve(error)
            raise
        return forward(torch.from_numpy(np.arange(len(keys))))

    def output(self, keys: Keys, source: Source, since: float | None = None) -> Any:
        """The output of a batch whose misses a `source` computes; see `fetch`.

        The cost of caching counts from the time `since` (of `time.perf_counter`); default: now.

        Raises
        ------
        NotStoredError
            If the output must not, or cannot, be stored.
        OwnMemoryError
            If there is no memory for the cache's own work.
        """
        start = time.perf_counter() if since is None else since
        batch, checks = Batch(keys, source, self.settings), source.checks
        try:
            output = self._output(batch)
        except Exception as error:
            if not is_out_of_memory(error) or is_of_forward(error):
                raise
            self.do_without(len(keys), error)
            raise OwnMemoryError from None
        seconds = time.perf_counter() - start
        self.counters.count(
            hits=len(keys) - batch.misses,
            misses=batch.misses,
            computed=batch.computed,
            seconds=batch.seconds,
            spent=seconds - batch.seconds,
        )
        if checks.seconds or checks.unchecked:
            self.counters.add(seconds_checking=checks.seconds, unchecked=checks.unchecked)
        checks.settle(batch, seconds)
        return output

    def _output(self, batch: Batch) -> Any:
        """The output of a batch: find, claim, compute, keep, put together."""
        if self.is_closed:
            return batch.compute_all()
        hits = self.find(batch)
        if hits is None:
            return self.not_stacked(batch)
        start, found = time.perf_counter(), len(hits.positions)
        if hits.rows is None or found < len(batch.keys):
            output = self._computed(batch, hits)
        else:
            if len(hits.checked):
                self.checked(batch, hits)
            output = batch.output(hits.rows)
        if batch.is_checked:
            batch.source.checks.seconds += (time.perf_counter() - start) * found / len(batch.keys)
        return output

    def find(self, batch: Batch) -> Hits | None:
        """The rows that the tiers have; None if rows of different schemas do not stack."""
        parts = [(positions, found(rows)) for positions, rows in self.tiers.get(batch.keys).parts]
        positions, rows = parts[0] if parts else (_NOWHERE, None)
        if len(parts) > 1:
            positions = _union(len(batch.keys), *[where for where, _ in parts])
            ranked = [(np.searchsorted(positions, where), rows) for where, rows in parts]
            rows = joined(ranked, len(positions), device=batch.source.device)
            if rows is None:
                return None
        checked, share = _NOWHERE, self.settings.verify
        batch.is_checked = batch.source.checks.is_due(len(positions))
        if batch.is_checked:  # all items are computed, so compare all found rows
            checked = positions
        elif share > 0.0:  # our own generator: the caller's must not advance
            checked = positions[self._random_shares.random(len(positions)) < share]
        batch.is_compared = len(checked) > 0
        return Hits(positions, rows, checked)

    def _computed(self, batch: Batch, hits: Hits) -> Any:
        """The output of a batch with misses: computes claimed items, waits for others."""
        misses = Misses.of(batch.keys, hits)
        claim = self.tiers.claim(batch.keys.take(misses.distinct))
        parts: Parts = []
        try:
            # A check computes the whole batch, without waiting: rows of other processes would not be
            # compared.
            wanted = np.arange(len(misses.distinct)) if batch.is_checked else claim.mine
            # If others compute all misses, compute none; but an empty batch needs an output, too.
            if len(wanted) or len(hits.checked) or not len(claim.others):
                output, rows = self.compute(batch, hits, misses.distinct[wanted])
                if len(wanted) == len(batch.keys):
                    return output if batch.dtype is None else batch.output(rows)
                if len(wanted) or not len(claim.others):  # else these were only hits to check
                    parts.append((wanted, rows))
            if len(wanted) < len(misses.distinct):
                parts += self._of_others(batch, misses.distinct, claim)
        finally:
            claim.release()
        together: Rows | None = parts[0][1]
        if len(parts) > 1:
            together = joined(parts, len(misses.distinct), device=batch.source.device)
        return (
            self.not_stacked(batch) if together is None else self.put_together(batch, hits, misses, together)
        )

    def compute(self, batch: Batch, hits: Hits, mine: Positions) -> tuple[Any, Rows]:
        """Compute and keep the rows of items at some positions; also compute hits to check them.

        Returns the whole batch's output, if all of it was computed, and the rows. `WrongRowsError` if found
        rows differ from computed ones.
        """
        checked, count = hits.checked, len(batch.keys)
        asked = _union(count, mine, checked) if len(checked) else mine
        output, rows = batch.compute(asked)
        batch.misses += len(mine)
        is_whole = len(asked) == count or batch.whole is not None
        output = output if is_whole else None
        if len(checked):
            wrong = self._mismatch(batch, hits, asked, rows)
            rows = rows.take(torch.from_numpy(np.searchsorted(asked, mine)))
            if wrong is not None:
                raise self.distrusted(batch, wrong, output)
        if is_whole and len(checked) == len(hits.positions):
            batch.source.checks.computed_whole()
        self.keep(batch, mine, rows)
        return output, rows

    def _of_others(self, batch: Batch, distinct: Positions, claim: Claim) -> Parts:
        """Rows of misses that other processes have claimed; computes those that they give up."""
        parts: Parts = []
        while len(claim.others):
            if batch.whole is not None:  # the forward computed the whole batch anyway
                batch.misses += len(claim.others)
                parts.append((claim.others, batch.whole.take(torch.from_numpy(distinct[claim.others]))))
                break
            left, there = claim.wait(), claim.appeared
            is_gone = np.ones(len(there), bool)  # rows may be damaged, or forgotten again
            for positions, rows in self.tiers.get(batch.keys.take(distinct[there])).parts:
                parts.append((there[positions], found(rows)))
                is_gone[positions] = False
            left = _union(len(distinct), left, there[is_gone])
            if len(left):
                _, rows = batch.compute(distinct[left])
                batch.misses += len(left)
                self.keep(batch, distinct[left], rows)
                parts.append((left, rows))
        return parts

    def put_together(self, batch: Batch, hits: Hits, misses: Misses, rows: Rows) -> Any:
        """The output in batch order, from hits and from the rows of distinct misses."""
        if misses.inverse is not None:
            rows = rows.take(torch.from_numpy(misses.inverse))
        if hits.rows is None:
            return batch.output(rows)
        parts = [(hits.positions, hits.rows), (misses.positions, rows)]
        together = joined(parts, len(batch.keys), device=batch.source.device)
        return self.not_stacked(batch) if together is None else batch.output(together)

    def not_stacked(self, batch: Batch) -> Any:
        """Compute a batch whose rows have different schemas; `NotStoredError` if that is refused."""
        output = batch.compute_all()
        if self.must_stack:
            raise NotStoredError("stack", "items have outputs of another shape in another batch", output)
        return output

    def checked(self, batch: Batch, hits: Hits) -> None:
        """Compute items of a found batch to check their rows; skip that if the forward cannot run now."""
        try:
            self.compute(batch, hits, _NOWHERE)
        except NotStoredError:
            raise
        except Exception as error:
            batch.source.checks.give_up(len(hits.checked))
            logger.debug("%s: rows that were found are not checked: %r", self.name, error)

    def _mismatch(self, batch: Batch, hits: Hits, asked: Positions, rows: Rows) -> str | None:
        """How the hits to check differ from the `rows` computed at the positions `asked`; None if equal."""
        assert hits.rows is not None
        before = hits.rows.take(torch.from_numpy(np.searchsorted(hits.positions, hits.checked)))
        again = rows.take(torch.from_numpy(np.searchsorted(asked, hits.checked)))
        apart = differences(before, again, batch.source.dtypes())
        mismatched, worst = int(np.count_nonzero(apart)), apart.argmax()
        self.counters.add(verified=len(apart), mismatched=mismatched)
        if not mismatched:
            return "the weights were changed by another process" if batch.source.is_outdated() else None
        return (
            f"{mismatched} of {len(apart)} rows that were found differ from what the forward computes now, "
            f"most at position {hits.checked[worst]} of the batch, by {apart[worst]:.3g}"
        )

    def distrusted(self, batch: Batch, text: str, output: Any = None) -> WrongRowsError:
        """Drop the namespace: one row was wrong, so none can be trusted. Returns the error to raise.

        `output` is the whole batch's; if it is None, the forward computes it.
        """
        try:
            if output is None:
                output = batch.compute_all()
        finally:
            batch.source.distrust()
            self.drop(batch.keys.namespace)
        return WrongRowsError("batch", text, output)

    def keep(self, batch: Batch, positions: Positions, rows: Rows) -> None:
        """Put the rows of the items at some positions into the tiers."""
        for where, part in stored(rows):
            keys = batch.keys if len(where) == len(batch.keys) else batch.keys.take(positions[where])
            self.tiers.put(batch.source, keys, part)
        if self.is_closed:  # closed by another thread meanwhile
            self.tiers.forget(batch.keys.namespace)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, on disk too."""
        self.tiers.drop(namespace)

    def do_without(self, items: int, error: Exception) -> None:
        """Count items computed without the cache because it had no memory for its own work."""
        self.counters.add(misses=items)
        text = "%s: not enough memory for the cache, so these items are computed without it: %s"
        self.tell("own memory", text, self.name, str(error))

    def relieve(self, error: torch.cuda.OutOfMemoryError) -> None:
        """Free the rows on a device whose memory was too small for the forward."""
        freed = self.tiers.give_back(device_of(error))
        if freed:
            torch.cuda.empty_cache()
            self.tell(
                "memory",
                "%s: the forward ran out of memory on its device, so the cache freed all its rows there, "
                "%s. To keep fewer of them, lower max_memory_cache_size; "
                "memory_cache_device='cpu' keeps them on the host",
                *(self.name, size_text(freed)),
            )

    def count_bypass(self, reason: str, items: int, text: str) -> None:
        """Count items that were computed and not stored; warns once for each reason."""
        self.counters.bypass(reason, items)
        self.tell(reason, "%s: not cached (%s): %s", self.name, reason, text)

    def stats(self) -> CacheStats:
        """Statistics of this cache so far."""
        return self.counters.stats(**self.tiers.stats())

    @property
    def cache_dir(self) -> Path | None:
        """The folder of the rows; None if they are in memory only."""
        directory = self.tiers.directory
        return None if directory is None else Path(directory.path)

    def description(self, namespace: bytes) -> Mapping[str, Any]:
        """A description of the namespace as JSON, for people and `explain`."""
        face = self.face()
        return self.document() if face is None else face.description(namespace)

    def document(self) -> dict[str, Any]:
        """The description when nothing is known about who computes."""
        return {"class": None, "library": __version__, "torch": str(torch.__version__), "created": now()}

    def flush(self) -> None:
        """Return once all rows computed by this process are as durable as the tiers make them."""
        self.tiers.flush()

    def clear(self) -> None:
        """Forget every row of this cache's namespace, on disk too, unless others use them there."""
        self.tiers.drop_ours(self.namespace)

    def close(self, *, forgets: bool = True) -> None:
        """Stop caching and free the rows in memory; later calls compute everything.

        Waiting rows are on disk when this returns.
        """
        if not self.is_closed:
            self.is_closed = True
            if forgets:
                self.tiers.forget(self.namespace)
            self.tiers.leave(self)

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


def _union(count: int, *positions: Positions) -> Positions:
    """All of some positions below `count`, ascending; `np.union1d` imports `np.ma`, which takes 20 ms."""
    found = np.zeros(count, bool)
    for some in positions:
        found[some] = True
    return np.flatnonzero(found)


setattr(Cache, ADDED_ATTRIBUTE, True)
