"""`SteppedOutcomes`: how the output of a batch comes about if all ranks of a process group call in step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from torchcache2.core.groups import group_of
from torchcache2.core.keys import Bytes2D, Keys, Positions
from torchcache2.core.process import Place, place
from torchcache2.core.rows import Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.batch import Batch, Hits, Misses, NotRunError, NotStoredError
from torchcache2.engine.collective.apart import apart, is_apart
from torchcache2.engine.collective.channel import Channel
from torchcache2.engine.collective.exchange import Exchange
from torchcache2.engine.collective.header import Flag
from torchcache2.engine.collective.holdings import Holdings
from torchcache2.engine.collective.known import is_known
from torchcache2.engine.collective.part import Received, StandBy
from torchcache2.engine.collective.registry import shared
from torchcache2.engine.outcomes import Outcomes
from torchcache2.engine.stack import TierStack
from torchcache2.engine.values.outputs import found, joined

__all__ = ["SteppedOutcomes"]

_CPU = torch.device("cpu")
_NO_KEYS: Bytes2D = np.empty((0, 16), np.uint8)


class SteppedOutcomes(Outcomes):
    """What a `Cache` does with a batch, together with the other ranks if they call in step."""

    def __init__(self, settings: CacheSettings, tiers: TierStack) -> None:
        super().__init__(settings, tiers)
        self._holdings = Holdings(tiers) if settings.distributed == "collective" else None

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
        exchange = self._exchange()
        if exchange is None:
            yield
            return
        begin = exchange.steps
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception) and not is_known(error, exchange, begin):
                self._stand_by(error)
            raise
        while self._serve(exchange):
            pass

    def _serve(self, exchange: Exchange) -> bool:
        """Answer in one step of the others; whether there may be more of them."""
        assert self._holdings is not None
        part = StandBy(self._called(), self._holdings, Flag.DONE, device=_CPU)
        return self._counted(exchange, exchange.step(part)) is not None

    def _stand_by(self, error: BaseException | None = None) -> AbstractContextManager[None]:
        """Take part in a step without keys: this rank passes its call by, or raises an error.

        Returns the context in which the call is made.
        """
        exchange = self._exchange()
        if exchange is None:
            return contextlib.nullcontext()
        assert self._holdings is not None
        part = StandBy(self._called(), self._holdings, Flag.BYPASS, device=_CPU, error=error)
        received = self._counted(exchange, exchange.step(part))
        return contextlib.nullcontext() if received is None else received.context()

    def _exchange(self) -> Exchange | None:
        """What the ranks take steps with; None if this process makes its calls alone."""
        if self._holdings is None or is_apart() or get_worker_info() is not None:
            return None
        group = group_of(self.settings.process_group)
        return None if group is None else shared(group, lambda: Exchange(Channel(group)))

    def _place(self) -> Place:
        """Which rank this is, of those that share out the items of a warmup."""
        if self._holdings is None:
            return place()
        exchange = self._exchange()
        return Place(0, 1) if exchange is None else Place(exchange.channel.rank, exchange.channel.size)

    def _outcome(self, batch: Batch) -> Any:
        exchange = self._exchange()
        if exchange is None:
            return super()._outcome(batch)
        if self._closed:
            with self._stand_by():
                return batch.compute_all()
        assert self._holdings is not None
        part = _BatchPart(self, batch, self._holdings)
        received = self._counted(exchange, exchange.step(part))
        assert received is not None  # this rank has not left
        if received.refusal is not None:
            raise received.refusal
        with received.context():
            return part.output(received)

    def _counted(self, exchange: Exchange, received: Received | None) -> Received | None:
        seconds, exchange.seconds = exchange.seconds, 0.0
        rows = (0, 0) if received is None else (received.from_others, received.to_others)
        self._counters.exchange(received=rows[0], sent=rows[1], seconds=seconds)
        return received

    def _rows(self, keys: Keys) -> Sequence[tuple[Positions, Rows]]:
        return super()._rows(keys) if self._holdings is None else self._holdings.get(keys)

    def _drop(self, namespace: bytes) -> None:
        if self._holdings is None:
            super()._drop(namespace)
        else:
            self._holdings.drop(namespace)
            self._holdings.dropped[namespace] = None  # the other ranks are told in the next step

    def _called(self) -> str:
        """What the ranks call: equal in all of them, if they are in step."""
        return self._tiers.name or type(self).__name__


class _BatchPart:
    """The part of a rank in a step that calls with a batch; see `Part`."""

    def __init__(self, cache: SteppedOutcomes, batch: Batch, holdings: Holdings) -> None:
        self.caller = cache._called()
        self.namespace, self.group = batch.keys.namespace, batch.keys.group
        self.holdings = holdings
        self.device = batch.device
        self.is_sharded = batch.is_sharded
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
        return flags | Flag.WHOLE if self._batch.is_whole() else flags

    def find(self) -> Bytes2D:
        """The distinct keys that this rank does not have."""
        self._hits = self._cache._find(self._batch)
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
        return self._cache.description(self.namespace)

    def note(self) -> str:
        """Whether items do not depend on their batch, as far as that is known."""
        return self._batch.checks.note(has_run=self._has_run)

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
        asked = np.union1d(mine, hits.checked) if len(hits.checked) else mine
        self._has_run = True
        output, rows = batch.compute(asked)
        batch.misses += len(mine)
        if len(hits.checked):
            self._is_checked = True
            self._wrong = cache._mismatch(batch, hits, asked, rows)
            rows = rows.take(torch.from_numpy(np.searchsorted(asked, mine)))
        if self._wrong is None:
            cache._keep(self._keys.take(wanted), rows)
        if len(mine) == len(batch.keys):
            self._whole = output if batch.dtype is None else batch.output(rows)
        return rows

    def output(self, received: Received) -> Any:
        """The output of the batch, after a step has brought what this rank did not have."""
        batch, cache, hits, parts = self._batch, self._cache, self._hits, received.parts
        if hits is None:
            return cache._not_stacked(batch.compute_all())
        if received.refused is not None:
            reason, text = received.refused
            raise NotStoredError(reason, text, batch.compute_all())
        if batch.is_checked and not self._has_run and parts and not batch.checks.is_known(received.notes):
            # No rank has probed a batch like this one, so rows of others may depend on their batches.
            received.lacking, parts = np.arange(len(self._keys)), []
        if len(received.lacking) or received.must_run or not len(batch.keys):
            rows = self.compute(received.lacking)
            if len(received.lacking):
                parts = [*parts, (received.lacking, rows)]
        elif len(hits.checked) and not self._is_checked:
            cache._checked(lambda: self.compute(received.lacking))
        if self._wrong is not None:
            raise cache._distrusted(batch, self._wrong)
        if self._whole is not None:
            return self._whole
        # The rows of others are views of the memory in which they were received, so they are copied.
        parts = [(positions, found(rows)) for positions, rows in parts]
        copied = joined(parts, len(self._keys), device=batch.device) if parts else None
        if parts and copied is None:
            return cache._not_stacked(batch.compute_all())
        return cache._put_together(batch, hits, self._misses, copied)
