"""How ranks in step find, compute and send rows, so that each item is computed once.

A call of a cache with ``distributed="collective"`` is a *step* that all ranks of a process group take
together, in rounds. In a round, each rank sends one message to all (`Channel.gather`). As all ranks see the
same messages, all decide alike.

1. **ask**: each rank looks in its own tiers, and sends the keys that it lacks (`Ask`). If a rank asks to drop
   a namespace, all drop it, and repeat the round. If no rank asks for anything, the step ends here.
   **parts**, only if ranks call with different namespaces for the first time: a description of each rank's
   namespace, as JSON. The first rank then warns of the differences.
2. **have**: one rank per shared memory reads the rows that others ask for, and offers them (`Offer`). From
   this each rank derives the same plan: which rank sends each row, and which computes those that no rank has.
3. **tell**, only if rows are computed: the ranks that computed rows offer them.
4. One all-to-all exchange of bytes, only if rows must be sent: see `Asked`.
   **run**, only for sharded modules: a byte, 1 if this rank must run its forward; then all run theirs. If a
   rank bypasses, or must run in any case, all know this after round 1, and skip the other rounds.

If a rank raises between two rounds, it still takes part in the next one, to report the failure. Then all
ranks raise: that rank its exception, and the others a `RankError`.

An `Exchange` takes the steps of a process group. Each cache in step has a `Collective`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch.utils.data import get_worker_info

from torchcache2.core.errors import RankError
from torchcache2.core.keys import Bytes2D, Keys, Positions
from torchcache2.core.logs import listed, logger
from torchcache2.core.process import Place, computed_once, group_of
from torchcache2.core.rows import Parts, Rows
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.batch import Batch, Hits, Misses, NotRunError, NotStoredError, RefusedError
from torchcache2.engine.collective.channel import Channel
from torchcache2.engine.collective.plan import Asked, planned
from torchcache2.engine.collective.wire import NO_KEYS, Ask, Flag, Offer, Schemas
from torchcache2.engine.stack import TierStack
from torchcache2.engine.stats import Counters
from torchcache2.engine.values.outputs import found, joined, stored
from torchcache2.identity.encoding import digest
from torchcache2.identity.fingerprint import Fingerprint, differences, from_document
from torchcache2.tiers.make import job_of
from torchcache2.tiers.meeting import machine

if TYPE_CHECKING:  # not all builds of torch have it
    from torch.distributed import ProcessGroup


_CPU = torch.device("cpu")
_USUAL = Flag.SHARDED | Flag.CUDA  # flags that request nothing
_PLACE = 16  # bytes at the end of each `Ask`
_NOWHERE: Positions = np.empty(0, np.int64)
_MOST_COMPARED = 8  # then stop comparing, as modules may change at every step
_TOLD = "_torchcache2_told"
_APART = ContextVar("torchcache2_apart", default=False)


class apart:  # noqa: N801
    """In this context, cached modules answer this thread without the other ranks."""

    def __enter__(self) -> None:
        self._token = _APART.set(True)

    def __exit__(self, *error: object) -> None:
        _APART.reset(self._token)


def is_apart() -> bool:
    """Whether this thread is in an `apart` context."""
    return _APART.get()


def is_told(error: BaseException) -> bool:
    """Whether a step has ended with this error in all ranks."""
    return hasattr(error, _TOLD)


class Holdings:
    """The rows of one rank: those of its tiers, and replicas of rows that other ranks own.

    Replicas use room of the memory tier that nothing else needs. They never go to a slower tier, are evicted
    before any other row, and are dropped with their namespace.

    Attributes
    ----------
    dropped : dict of bytes
        Namespaces dropped here, in order, until the other ranks have dropped them, too.
    had_all : bool
        Whether the whole last batch was found: then the next one may be, too.
    """

    def __init__(self, tiers: TierStack) -> None:
        self._tiers = tiers
        self._own = os.urandom(_PLACE)
        self.dropped: dict[bytes, None] = {}
        self.had_all = False

    @computed_once
    def place(self) -> bytes:
        """16 bytes, equal for ranks that share memory."""
        job = job_of(self._tiers.settings, self._tiers.name) if self._tiers.tiers[0].is_shared else None
        return self._own if job is None else digest([job, machine().encode()])

    def get(self, keys: Keys) -> Parts:
        """The rows in the tiers or among the replicas: one part for each schema."""
        return self.owned(keys)

    def has_all(self, keys: Keys) -> bool:
        """Whether the fastest tier has a row or a replica of each key now."""
        return bool(self._tiers.tiers[0].has(keys).all())

    def owned(self, keys: Keys) -> Parts:
        """The rows in the tiers."""
        return list(self._tiers.get(keys).parts)

    def put_replicas(self, keys: Keys, rows: Rows) -> int:
        """Keep rows that another rank owns, if there is room; returns how many were kept."""
        return 0

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace."""
        self._tiers.drop(namespace)


@dataclasses.dataclass
class Received:
    """The result of a step for this rank.

    Attributes
    ----------
    parts : list of (ndarray of int64, Rows)
        Computed and received rows, with their positions among the keys that this rank asked for.
    lacking : ndarray of int64
        Positions of keys without a row: this rank computes them now.
    refused : tuple of str, optional
        Another rank's reason why the output must not be stored: a word and a sentence.
    refusal : RefusedError, optional
        Why this rank has not stored what it computed.
    all_pass : bool
        Whether all ranks bypass, so that all call the modules within.
    notes : list of str
        What the ranks know about such calls; see `Part.note`.
    from_others, to_others : int
        How many rows this rank has received and sent.
    must_run : bool
        Whether this rank must run its forward even if it lacks nothing, since other ranks wait in theirs.
    """

    parts: Parts = dataclasses.field(default_factory=list)
    lacking: Positions = dataclasses.field(default_factory=lambda: _NOWHERE)
    refused: tuple[str, str] | None = None
    refusal: RefusedError | None = None
    all_pass: bool = False
    notes: Sequence[str] = ()
    from_others: int = 0
    to_others: int = 0
    must_run: bool = False

    def context(self) -> AbstractContextManager[None]:
        """The context of the forward: `apart`, unless all ranks run it and so call the modules within."""
        return contextlib.nullcontext() if self.all_pass or self.must_run else apart()


class Part:
    """What one rank does in one step; the other ranks are told of an exception in any method.

    This class asks for nothing: the rank bypasses, raises, or has left.
    """

    namespace = bytes(16)
    group = b""  # of the keys
    device = _CPU  # where rows are used

    def __init__(self, name: str, holdings: Holdings, flags: int, error: Exception | None = None) -> None:
        self.name = name  # of the module or function, for messages
        self.holdings = holdings
        self.flags = flags  # `Flag`s of this rank, known after `find`
        self._error = error

    def find(self) -> Bytes2D:
        """The distinct keys to ask for; called again if rows were dropped meanwhile."""
        if self._error is not None:
            raise self._error
        return NO_KEYS

    def read(self) -> None:
        """Called while the message is on its way to the other ranks."""

    def description(self) -> Mapping[str, Any]:
        """What the namespace stands for, as JSON."""
        return {}

    def note(self) -> str:
        """What this rank knows about such calls, for ranks that do not know it yet."""
        return ""

    def is_enough(self, received: Received) -> bool:
        """Whether the output can be made without a forward."""
        return True

    def compute(self, wanted: Positions) -> Rows:
        """Compute and store the rows of some of these keys."""
        raise NotImplementedError


class Exchange:
    """Takes steps with the other ranks of a process group.

    Only one thread of a rank may take a step at a time. An interrupt in a step closes the channel, so that
    the other ranks do not wait.

    Attributes
    ----------
    channel : Channel
        The channel between the ranks of the group.
    steps : int
        How many were taken.
    """

    # Class state, as process groups are global in torch, too. All caches of a group share one exchange: with
    # two, ranks that call different modules would wait in different ones.
    _of_group: ClassVar[WeakKeyDictionary[ProcessGroup, Exchange]] = WeakKeyDictionary()
    _making: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.steps = 0
        self._schemas = Schemas()
        self._compared: set[tuple[bytes, ...]] = set()  # the same on all ranks
        self._holdings: WeakSet[Holdings] = WeakSet()  # of all caches called so far
        self._called: WeakValueDictionary[str, Holdings] = WeakValueDictionary()  # the last one by name
        self._pid, self._thread = os.getpid(), threading.Lock()
        self._do_all_know = False

    @classmethod
    def of(cls, group: ProcessGroup) -> Exchange:
        """The exchange of a group in this process; it lives as long as the group."""
        found = cls._of_group.get(group)
        if found is None:
            with cls._making:
                found = cls._of_group.get(group) or cls._of_group.setdefault(group, cls(Channel(group)))
        return found

    def step(self, part: Part) -> Received | None:
        """Take a step with all ranks; returns its result, None if all ranks have left.

        Raises
        ------
        RankError
            If another rank has failed, ended, not arrived, or calls something else.
        Exception
            What this rank's own part raised, once all ranks know.
        """
        if os.getpid() != self._pid:
            raise RankError(
                "this process was forked from a rank, and cannot speak for it: call the module in the rank "
                "itself"
            )
        if not self._thread.acquire(blocking=False):
            raise RankError(
                "two threads of this rank call modules with distributed='collective' at once: the ranks "
                "cannot know in which order to answer. Call them from one thread, or give each its own "
                "process_group"
            )
        self._do_all_know = False
        try:
            with apart():  # not all ranks compute, so only some call the modules within
                return self._taken(part)
        except BaseException:
            if not self._do_all_know:  # do not leave the others waiting in this step
                self.channel.close()
            raise
        finally:
            self._thread.release()

    def _taken(self, part: Part) -> Received | None:
        self.steps += 1
        asks = self._ask(part)
        if not asks:
            return Received()
        active = [ask for ask in asks if not ask.flags & Flag.DONE]
        if not active:
            return None
        if part.flags & Flag.DONE:  # the others may call another module
            part.holdings = self._called.get(active[0].caller, part.holdings)
        if all(ask.flags & Flag.BYPASS for ask in active):
            return Received(all_pass=True)
        if _any(asks, Flag.SHARDED) and _any(asks, Flag.RUN | Flag.BYPASS):
            return Received(lacking=np.arange(len(asks[self.channel.rank].keys)), must_run=True)
        return self._answered(part, asks) if any(len(ask.keys) for ask in asks) else Received()

    def _ask(self, part: Part) -> list[Ask]:
        """Round 1: the requests of all ranks; empty if no rank needs anything."""
        holdings = part.holdings
        self._called[part.name] = holdings
        self._holdings.add(holdings)
        while True:
            failure: Exception | None = None
            try:
                keys, flags = part.find(), part.flags
            except Exception as error:
                failure, keys, flags = error, NO_KEYS, Flag.FAILED
            if self.channel.sends_from(part.device):
                flags |= Flag.CUDA
            dropped = next(iter(holdings.dropped), b"")
            text = "" if failure is None else _text_of(failure)
            who = part.name, part.namespace, dropped, text
            mine = Ask(self.steps, flags, *who, keys, holdings.place).to_bytes()
            said = self.channel.gather("ask", mine, part.read)
            if not (len(keys) or dropped or flags & ~_USUAL):
                same = mine[:-_PLACE]
                if sum([data.startswith(same) for data in said if len(data) == len(mine)]) == len(said):
                    return []
            asks = _read(Ask.of, said)
            self._check_failures([(ask.flags, ask.error) for ask in asks], failure)
            self._check_in_step(asks)
            holdings.dropped.pop(dropped, None)
            all_dropped = {ask.dropped for ask in asks if ask.dropped}
            if not all_dropped:
                self._compare(part, asks)
                return asks
            for one in list(self._holdings):
                for namespace in all_dropped:
                    one.drop(namespace)

    def _check_in_step(self, asks: Sequence[Ask]) -> None:
        """Raise `RankError` if the ranks' requests do not fit together."""
        active = [(rank, ask) for rank, ask in enumerate(asks) if not ask.flags & Flag.DONE]
        text = ""
        if len(active) < len(asks) and _any(asks, Flag.SHARDED):
            text = "a rank has left join(), but the forward of a sharded module waits for it"
        for rank, other in active[1:]:
            first, one = active[0]
            if one.caller != other.caller:
                text = (
                    f"the ranks are out of step: rank {first} calls {one.caller}, and rank {rank} calls "
                    f"{other.caller}. With distributed='collective' all ranks call the same modules in the "
                    "same order; for calls of some ranks only there are cache_instance.alone() and join()"
                )
            # A bypassing rank does not say whether its module is sharded.
            elif (one.flags ^ other.flags) & Flag.SHARDED and not _any([one, other], Flag.BYPASS):
                text = f"{one.caller} is sharded on some ranks, and whole on others"
        if text:
            raise self._known(RankError(text))

    def _compare(self, part: Part, asks: Sequence[Ask]) -> None:
        """Warn, in the first rank, if ranks have different namespaces, as these share no rows."""
        ranks = [rank for rank, ask in enumerate(asks) if not ask.flags & (Flag.BYPASS | Flag.DONE)]
        namespaces = tuple(asks[rank].namespace for rank in ranks)
        is_new = namespaces not in self._compared and len(self._compared) < _MOST_COMPARED
        if len(set(namespaces)) < 2 or not is_new:
            return
        self._compared.add(namespaces)
        try:
            description = json.dumps(part.description()).encode()
        except Exception:
            description = b"{}"
        said = self.channel.gather("parts", description)
        first, other = ranks[0], ranks[[name != namespaces[0] for name in namespaces].index(True)]
        if self.channel.rank == first:
            now, before = (from_document("", json.loads(said[rank])) for rank in (other, first))
            lines = differences(now or Fingerprint(b"", {}), before or Fingerprint(b"", {}))
            shown = listed(lines) if lines else "unknown differences"
            logger.warning(
                "%s: rank %d and rank %d share no rows, as they call modules that differ: %s. Keep values "
                "that differ between ranks, such as the device, out of the module",
                *(part.name, first, other, shown),
            )

    def _answered(self, part: Part, asks: Sequence[Ask]) -> Received:
        """Rounds 2 to 4, and "run"."""
        rank, received = self.channel.rank, Received()
        asked = Asked(asks, rank, self._schemas)
        readers = asked.readers()
        whole = np.array([ask.flags & Flag.WHOLE != 0 for ask in asks])
        is_sharded = _any(asks, Flag.SHARDED)

        def noted(offer: Offer) -> Offer:
            return offer._replace(reason=part.note()) if whole.any() else offer

        def held() -> Offer:
            parts: Parts = []
            for numbers, keys in asked.keys_at(np.flatnonzero(readers[:, rank])):
                parts += [(numbers[where], rows) for where, rows in part.holdings.owned(keys)]
            return noted(asked.offer(parts, readers[:, rank]))

        def computed() -> Offer:
            wanted = np.flatnonzero(is_computed[asked.mine] & (source[asked.mine] == rank))
            if len(wanted):
                try:
                    rows = part.compute(wanted)
                except RefusedError as stop:
                    received.refusal = stop
                    return Offer(Flag.NOT_STORED, stop.reason, stop.text)
                received.parts += [(wanted[where], one) for where, one in stored(rows)]
            parts = [(asked.mine[where], one) for where, one in received.parts]
            return noted(asked.offer(parts, told[:, rank]))

        offers = self._offered("have", held)
        asked.hear(offers, readers)
        is_held = asked.number > 0
        asked.source = source = planned(asked.words, asked.by & (not is_sharded), is_held, whole, self.steps)
        is_computed = (source >= 0) & ~is_held.any(axis=1)
        if is_computed.any():
            is_told = is_computed & (asked.by.sum(axis=1) > 1)
            told = is_told[:, None] & (source[:, None] == np.arange(len(asks)))
            offers = self._offered("tell", computed)
            asked.hear(offers, told)
        if asked.number[np.arange(len(source)), source].any():
            self._receive(asked, asks, part, received)
        received.notes = [offer.reason for offer in offers if not offer.flags]
        received.lacking = _others(len(asked.mine), received.parts)
        if is_sharded:
            must_run = len(received.lacking) > 0 or not part.is_enough(received)
            received.must_run = any(data[0] for data in self.channel.gather("run", bytes([must_run])))
        sources = np.unique(source[asked.mine[received.lacking]]).tolist()
        for offer in [offers[one] for one in sources if one not in (-1, rank)]:
            if offer.flags & Flag.NOT_STORED:
                received.refused = offer.reason, offer.text
        return received

    def _offered(self, kind: str, make: Callable[[], Offer]) -> list[Offer]:
        """A round of offers; returns those of all ranks, and raises if one has failed."""
        failure: Exception | None = None
        try:
            offer = make()
        except Exception as error:
            failure, offer = error, Offer(Flag.FAILED, text=_text_of(error))
        offers = _read(Offer.of, self.channel.gather(kind, offer.to_bytes()))
        self._check_failures([(one.flags, one.text) for one in offers], failure)
        return offers

    def _receive(self, asked: Asked, asks: Sequence[Ask], part: Part, received: Received) -> None:
        """Round 4: the rows that other ranks send to this one."""
        positions = np.zeros(len(asked.data), np.int64)
        positions[asked.mine] = np.arange(len(asked.mine))
        device = part.device if all(ask.flags & Flag.CUDA for ask in asks) else _CPU
        for source, numbers, rows in asked.swap(self.channel, device):
            received.parts.append((positions[numbers], rows))
            received.from_others += len(numbers)
            if asks[source].place != part.holdings.place:
                part.holdings.put_replicas(Keys(part.namespace, asked.data[numbers], part.group), rows)
        received.to_others = asked.rows_sent

    def _check_failures(self, said: Sequence[tuple[int, str]], own: Exception | None) -> None:
        """Raise if a rank has failed: in that rank its own exception, in the others `RankError`."""
        for rank, (flags, text) in enumerate(said):
            if flags & Flag.FAILED:
                text = f"rank {rank} has failed, so all ranks stop: {text}"
                raise self._known(RankError(text, rank) if own is None else own)

    def _known(self, error: Exception) -> Exception:
        """Record that this step ends with an error in all ranks; returns the error."""
        self._do_all_know = True
        with contextlib.suppress(AttributeError, TypeError):
            # A mark on the error, as keeping the error would keep the call's tensors, by its traceback.
            setattr(error, _TOLD, (id(self), self.steps))
        return error

    def has_told(self, error: BaseException | None, since: int) -> bool:
        """Whether a step after number `since` ended with this error, or with one of its causes."""
        while error is not None:
            of, step = getattr(error, _TOLD, (0, 0))
            if of == id(self) and step > since:
                return True
            error = error.__cause__ or error.__context__
        return False


def _read(of: Callable[[bytes], Any], said: Sequence[bytes]) -> list[Any]:
    """Decode the messages of all ranks; `RankError` if one has another version of this library."""
    read = []
    for rank, data in enumerate(said):
        try:
            read.append(of(data))
        except (ValueError, TypeError) as error:
            text = f"the message of rank {rank} cannot be read: {error}. All ranks need the same torchcache2"
            raise RankError(text, rank) from None
    return read


def _any(asks: Sequence[Ask], flag: int) -> bool:
    return any(ask.flags & flag for ask in asks)


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _others(count: int, parts: Parts) -> Positions:
    """Which of `count` keys no part has."""
    is_there = np.zeros(count, bool)
    for positions, _ in parts:
        is_there[positions] = True
    return np.flatnonzero(~is_there)


class Collective:
    """One cache with ``distributed="collective"``, as it takes part in the steps of all ranks."""

    def __init__(self, settings: CacheSettings, tiers: TierStack, counters: Counters, name: str) -> None:
        self.holdings = Holdings(tiers)
        self.name = tiers.name or name  # of the called module: equal in all ranks in step
        self._settings, self._counters = settings, counters

    def exchange(self) -> Exchange | None:
        """The exchange for this cache's steps; None if this process makes its calls alone."""
        if is_apart() or get_worker_info() is not None:
            return None
        group = group_of(self._settings.process_group)
        return None if group is None else Exchange.of(group)

    def place(self) -> Place:
        """The number of this rank, and of all ranks, to divide the items of a warmup."""
        exchange = self.exchange()
        return Place(0, 1) if exchange is None else Place(exchange.channel.rank, exchange.channel.size)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace; the next step tells the other ranks."""
        self.holdings.drop(namespace)
        self.holdings.dropped[namespace] = None

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Encloses a loop: see `Cache.join`."""
        exchange = self.exchange()
        if exchange is None:
            yield
            return
        begin = exchange.steps
        try:
            yield
        except Exception as error:
            if not exchange.has_told(error, begin):
                self.stand_by(error)
            raise
        while self._step(exchange, Part(self.name, self.holdings, Flag.DONE)) is not None:
            pass

    def stand_by(self, error: Exception | None = None) -> AbstractContextManager[None]:
        """Take part in a step without keys: this rank bypasses, or raises an error.

        Returns the context in which the call is made.
        """
        exchange = self.exchange()
        if exchange is None:
            return contextlib.nullcontext()
        received = self._step(exchange, Part(self.name, self.holdings, Flag.BYPASS, error))
        return contextlib.nullcontext() if received is None else received.context()

    def output(self, exchange: Exchange, cache: Any, batch: Batch) -> Any:
        """The output of a batch of a cache, in one step of all ranks."""
        part = _BatchPart(self.name, self.holdings, cache, batch)
        received = self._step(exchange, part)
        assert received is not None  # this rank has not left `join`
        if received.refusal is not None:
            raise received.refusal
        with received.context():
            return part.output(received)

    def _step(self, exchange: Exchange, part: Part) -> Received | None:
        before = exchange.channel.seconds
        received = exchange.step(part)
        rows = received or Received()
        seconds = exchange.channel.seconds - before
        self._counters.add(received=rows.from_others, sent=rows.to_others, exchange_seconds=seconds)
        return received


class _BatchPart(Part):
    """The part of a rank that calls with a batch."""

    def __init__(self, name: str, holdings: Holdings, cache: Any, batch: Batch) -> None:
        super().__init__(name, holdings, 0)
        self.namespace, self.group, self.device = batch.keys.namespace, batch.keys.group, batch.source.device
        self._cache, self._batch, self._source = cache, batch, batch.source
        self._hits: Hits | None = None
        self._has_run = self._is_read_later = False
        self._wrong: str | None = None  # how found rows differ from computed ones
        self._whole: Any = None  # the output of the whole batch, if all of it was computed at once

    def find(self) -> Bytes2D:
        """The distinct keys that this rank lacks."""
        batch = self._batch
        self.flags = Flag.WHOLE * self._source.runs_whole_batch() | Flag.SHARDED * self._source.is_sharded
        may_have_all = self.holdings.had_all and len(batch.keys) > 0 and not self._source.is_sharded
        self._is_read_later = may_have_all and self.holdings.has_all(batch.keys)
        if self._is_read_later:
            return NO_KEYS
        hits = self._look()
        self.holdings.had_all = hits is not None and len(hits.positions) == len(batch.keys)
        if hits is None:  # rows of several shapes
            self.flags = Flag.BYPASS
            return NO_KEYS
        if self._source.is_sharded:
            is_all = len(self._keys) == 0
            must_run = len(hits.checked) > 0 or (is_all and not self.is_enough(Received()))
            self.flags |= Flag.RUN * must_run
        return self._keys.data

    def _look(self) -> Hits | None:
        hits: Hits | None = self._cache.find(self._batch)
        self._hits = hits
        if hits is not None and not (self._is_read_later and hits.is_all(len(self._batch.keys))):
            self._misses = Misses.of(self._batch.keys, hits)
            self._keys = self._batch.keys.take(self._misses.distinct)
        return hits

    def description(self) -> Mapping[str, Any]:
        """What the namespace stands for, as JSON."""
        return self._source.description(self.namespace)

    def read(self) -> None:
        """Read the rows whose keys `find` only looked up; some may be gone meanwhile."""
        if self._is_read_later:
            try:
                self._look()
            except Exception as error:  # raised after the step: the other ranks do not depend on it
                self._error = error

    def note(self) -> str:
        """What is known about whether items depend on their batch."""
        return self._source.checks.note(has_run=self._has_run)

    def is_enough(self, received: Received) -> bool:
        """Whether the output can be made without a forward; keeps the output.

        Rows of different shapes do not stack, and an output may have values that change with the batch.
        """
        batch, batch.may_run = self._batch, False
        try:
            self._whole = self.output(received)
            return True
        except (NotRunError, Exception):  # making the output raises it again
            batch.misses = batch.computed = 0
            return False
        finally:
            batch.may_run = True

    def compute(self, wanted: Positions) -> Rows:
        """Compute and store the rows of some of these keys, and compute the hits to check."""
        assert self._hits is not None
        self._has_run = True
        batch, mine = self._batch, self._misses.distinct[wanted]
        rows: Rows
        output, rows, self._wrong = self._cache.compute(batch, self._hits, mine)
        if len(mine) == len(batch.keys):
            self._whole = output if batch.dtype is None else batch.output(rows)
        return rows

    def output(self, received: Received) -> Any:
        """The output of the batch, after a step has provided the missing rows."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this part: a cycle that would keep tensors
        batch, cache, hits, parts = self._batch, self._cache, self._hits, received.parts
        if hits is None:
            return cache.not_stacked(batch)
        if hits.is_all(len(batch.keys)) and not received.must_run:
            assert hits.rows is not None
            return batch.output(hits.rows)
        if received.refused is not None:
            raise NotStoredError(*received.refused, batch.compute_all())
        if (
            batch.is_checked
            and not self._has_run
            and parts
            and not self._source.checks.is_known(received.notes)
        ):
            # No rank has probed such a batch, so rows of other ranks may depend on their batches.
            received.lacking, parts = np.arange(len(self._keys)), []
        if self._is_read_later:
            received.lacking = np.arange(len(self._keys))
        if len(received.lacking) or received.must_run or not len(batch.keys):
            rows = self.compute(received.lacking)
            if len(received.lacking):
                parts = [*parts, (received.lacking, rows)]
        elif len(hits.checked) and not self._has_run:
            cache.checked(lambda: self.compute(received.lacking))
        if self._wrong is not None:
            raise cache.distrusted(batch, self._wrong)
        if self._whole is not None:
            return self._whole
        parts = [(positions, found(rows)) for positions, rows in parts]
        together = parts[0][1] if parts else None
        if len(parts) > 1 or (parts and not _is_output(*parts[0])):
            together = joined(parts, len(self._keys), device=self._source.device)
            if together is None:
                return cache.not_stacked(batch)
        return cache.put_together(batch, hits, self._misses, together)


def _is_output(positions: Positions, rows: Rows) -> bool:
    """Whether the only part is in order, and owns its memory: rows of other ranks lie in one block."""
    is_in_order = len(positions) < 2 or bool((positions[1:] > positions[:-1]).all())
    return is_in_order and all(column.untyped_storage().nbytes() == column.nbytes for column in rows.columns)
