"""`SteppedOutcomes`: how the output of a batch comes about if all ranks of a process group call in step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from torchcache2.core.groups import group_of
from torchcache2.core.keys import Bytes2D, Positions
from torchcache2.core.process import Place
from torchcache2.core.rows import Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.batch import Batch, Hits, Misses, NotRunError, NotStoredError
from torchcache2.engine.collective.apart import is_apart
from torchcache2.engine.collective.channel import Channel
from torchcache2.engine.collective.exchange import Exchange
from torchcache2.engine.collective.header import Flag
from torchcache2.engine.collective.holdings import Holdings
from torchcache2.engine.collective.known import is_known
from torchcache2.engine.collective.part import Part, Received, StandBy
from torchcache2.engine.collective.registry import shared
from torchcache2.engine.stack import TierStack
from torchcache2.engine.stats import Counters
from torchcache2.engine.values.outputs import found, joined

if TYPE_CHECKING:
    from torchcache2.engine.cache import Cache

__all__ = ["Collective"]

_CPU = torch.device("cpu")
_NO_KEYS: Bytes2D = np.empty((0, 16), np.uint8)


class Collective:
    """What a cache with ``distributed="collective"`` has: its part in the steps of all ranks."""

    def __init__(self, settings: CacheSettings, tiers: TierStack, counters: Counters, name: str) -> None:
        self.holdings = Holdings(tiers)
        self.name = tiers.name or name  # of what the ranks call: equal in all of them, if they are in step
        self._settings, self._counters = settings, counters

    def exchange(self) -> Exchange | None:
        """What the ranks take steps with; None if this process makes its calls alone."""
        if is_apart() or get_worker_info() is not None:
            return None
        group = group_of(self._settings.process_group)
        return None if group is None else shared(group, lambda: Exchange(Channel(group)))

    def place(self) -> Place:
        """Which rank this is, of those that share out the items of a warmup."""
        exchange = self.exchange()
        return Place(0, 1) if exchange is None else Place(exchange.channel.rank, exchange.channel.size)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace; the other ranks are told in the next step."""
        self.holdings.drop(namespace)
        self.holdings.dropped[namespace] = None

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop: see `Cache.join`."""
        exchange = self.exchange()
        if exchange is None:
            yield
            return
        begin = exchange.steps
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not is_known(error, exchange, begin):
                self.stand_by(error)
            raise
        part = StandBy(self.name, self.holdings, Flag.DONE, device=_CPU)
        while self._step(exchange, part) is not None:
            part = StandBy(self.name, self.holdings, Flag.DONE, device=_CPU)

    def stand_by(self, error: BaseException | None = None) -> AbstractContextManager[None]:
        """Take part in a step without keys: this rank passes its call by, or raises an error.

        Returns the context in which the call is made.
        """
        exchange = self.exchange()
        if exchange is None:
            return contextlib.nullcontext()
        part = StandBy(self.name, self.holdings, Flag.BYPASS, device=_CPU, error=error)
        received = self._step(exchange, part)
        return contextlib.nullcontext() if received is None else received.context()

    def output(self, exchange: Exchange, cache: Cache, batch: Batch) -> Any:
        """The output of a batch of a cache, in one step of all ranks."""
        part = _BatchPart(self.name, self.holdings, cache, batch)
        received = self._step(exchange, part)
        assert received is not None  # this rank has not left
        if received.refusal is not None:
            raise received.refusal
        with received.context():
            return part.output(received)

    def _step(self, exchange: Exchange, part: Part) -> Received | None:
        received = exchange.step(part)
        seconds, exchange.seconds = exchange.seconds, 0.0
        rows = received or Received()
        self._counters.exchange(received=rows.from_others, sent=rows.to_others, seconds=seconds)
        return received


class _BatchPart:
    """The part of a rank in a step that calls with a batch; see `Part`."""

    def __init__(self, name: str, holdings: Holdings, cache: Cache, batch: Batch) -> None:
        self.caller = name
        self.namespace, self.group = batch.keys.namespace, batch.keys.group
        self.holdings = holdings
        self.device = batch.source.device
        self.is_sharded = batch.source.is_sharded
        self._cache = cache
        self._batch = batch
        self._hits: Hits | None = None
        self._must_run = False  # whether the forward of a sharded module has to run, whatever is received
        self._has_run = self._is_checked = False
        self._wrong: str | None = None  # how found rows differ from computed ones
        self._whole: Any = None  # the output of the whole batch, if all of it was computed at once

    @property
    def flags(self) -> Flag:
        """What is known of this rank after `find`."""
        if self._hits is None:
            return Flag.BYPASS
        flags = Flag.SHARDED if self.is_sharded else Flag(0)
        if self._must_run:
            flags |= Flag.RUN
        return flags | Flag.WHOLE if self._batch.source.runs_whole_batch() else flags

    def find(self) -> Bytes2D:
        """The distinct keys that this rank does not have."""
        self._hits = self._cache.find(self._batch)
        if self._hits is None:  # rows of several shapes
            return _NO_KEYS
        self._misses = Misses.of(self._batch.keys, self._hits)
        self._keys = self._batch.keys.take(self._misses.distinct)
        if self.is_sharded:
            is_all = len(self._keys) == 0
            self._must_run = len(self._hits.checked) > 0 or (is_all and not self.is_enough(Received()))
        return self._keys.data

    def description(self) -> Mapping[str, Any]:
        """What the namespace stands for, as JSON."""
        return self._batch.source.description(self.namespace)

    def note(self) -> str:
        """Whether items do not depend on their batch, as far as that is known."""
        return self._batch.source.checks.note(has_run=self._has_run)

    def is_enough(self, received: Received) -> bool:
        """Whether the output can be made of what is there, without a forward; it is kept.

        Rows may not stack, or the output may have values that differ from batch to batch.
        """
        self._batch.may_run = False
        try:
            self._whole = self.output(received)
            return True
        except (
            NotRunError,
            Exception,
        ):  # it is raised again when the output is made
            self._batch.misses = self._batch.computed = 0
            return False
        finally:
            self._batch.may_run = True

    def compute(self, wanted: Positions) -> Rows:
        """The rows of some of these keys, computed with the hits that are to be checked, and stored."""
        assert self._hits is not None
        batch, cache, hits = self._batch, self._cache, self._hits
        mine = self._misses.distinct[wanted]
        self._has_run = True
        output, rows, self._wrong = cache.compute(batch, hits, mine)
        self._is_checked = self._is_checked or len(hits.checked) > 0
        if len(mine) == len(batch.keys):
            self._whole = output if batch.dtype is None else batch.output(rows)
        return rows

    def output(self, received: Received) -> Any:
        """The output of the batch, after a step has brought what this rank did not have."""
        batch, cache, hits, parts = self._batch, self._cache, self._hits, received.parts
        if hits is None:
            return cache.not_stacked(batch)
        if received.refused is not None:
            reason, text = received.refused
            raise NotStoredError(reason, text, batch.compute_all())
        if (
            batch.is_checked
            and not self._has_run
            and parts
            and not batch.source.checks.is_known(received.notes)
        ):
            # No rank has probed a batch like this one, so rows of others may depend on their batches.
            received.lacking, parts = np.arange(len(self._keys)), []
        if len(received.lacking) or received.must_run or not len(batch.keys):
            rows = self.compute(received.lacking)
            if len(received.lacking):
                parts = [*parts, (received.lacking, rows)]
        elif len(hits.checked) and not self._is_checked:
            cache.checked(lambda: self.compute(received.lacking))
        if self._wrong is not None:
            raise cache.distrusted(batch, self._wrong)
        if self._whole is not None:
            return self._whole
        # The rows of others are views of the memory in which they were received, so they are copied.
        parts = [(positions, found(rows)) for positions, rows in parts]
        copied = joined(parts, len(self._keys), device=batch.source.device) if parts else None
        if parts and copied is None:
            return cache.not_stacked(batch)
        return cache.put_together(batch, hits, self._misses, copied)
