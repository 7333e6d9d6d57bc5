"""`RedisTier`: rows in Redis servers, sent asynchronously.

Rows can be read as soon as they are put. They are sent to the servers when there are enough of them, after a
second, at `flush` and `close`, and at exit.

Thread-safe; any number of processes on any machines may use the same servers. A server may forget any row at
any time, and may serve other programs too.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from torchcache2.core.errors import UnserialisableError
from torchcache2.core.keys import Flags, Keys
from torchcache2.core.memory import with_ordinary_tensors
from torchcache2.core.places import Servers
from torchcache2.core.process import ProcessLock, holds
from torchcache2.core.rows import Parts, Rows, Schema, merged
from torchcache2.files.codec import codec as codec_of
from torchcache2.files.segment import empty_columns, rows_of
from torchcache2.tiers.base import Found, Signals, Tier, TierClaim, TierStats
from torchcache2.tiers.redis.claims import RedisClaims
from torchcache2.tiers.redis.client import Clients, Command, failed
from torchcache2.tiers.redis.record import MOST_ROW_BYTES, Records, pattern, row_names, split
from torchcache2.tiers.unwritten import OwnRows, Pending, Serialisable, Slabs
from torchcache2.tiers.writer import Pace, Writer

_QUEUED = 64 << 20
_SENT_AFTER = 1.0  # seconds
_PIECE = 4 << 20  # bytes of rows sent before waiting for replies


class _Pace(Pace):
    """Sends rows once there are `buffer` of a namespace, and no later than its delay."""

    share = 0.0  # nothing is left behind by each sending, as a file would be

    def __init__(self, buffer: int, **options: float) -> None:
        self._buffer = buffer
        super().__init__(**options)  # type: ignore[arg-type]

    def is_enough(self, pending: Pending) -> bool:
        return pending.count >= self._buffer or super().is_enough(pending)


class RedisTier(Tier):
    """Rows in Redis servers, each of which keeps a share of them.

    Parameters
    ----------
    servers : Servers
    codec : {"none", "brotli", "blosc2"}
    quality : int
        The quality of the codec.
    claims : bool
        Whether processes that use the same servers compute each row once.
    queue : int
        Bytes of rows that may wait to be sent; `put` blocks while there are more.
    delay : float
        Seconds after which rows are sent, however few.
    signals : Signals, optional
        Signals between the processes of a job.

    Notes
    -----
    A server that refuses the password is a mere fault here, as `check_place` has checked it before.

    A forked child begins with an empty queue, as its parent sends the rows. An interrupt in the middle of an
    update empties the queue of a namespace.
    """

    name = "remote"
    is_lasting = True

    def __init__(
        self,
        servers: Servers,
        *,
        codec: str = "none",
        quality: int = 1,
        claims: bool = True,
        queue: int = _QUEUED,
        delay: float = _SENT_AFTER,
        signals: Signals | None = None,
    ) -> None:
        self.servers = servers
        self._signals = Signals() if signals is None else signals
        self._records = Records(codec_of(codec, quality))
        self._clients = Clients(servers, self._signals.tell)
        message = "such outputs are not sent to a Redis server: %s"
        self._serialisable = Serialisable(self._clients.tell, message)
        self._slabs = Slabs()
        self._faults = 0
        self._queue_bytes, self._delay = queue, delay
        self._lock = ProcessLock(threading.RLock)  # reentrant: the garbage collector may call
        self._dropped = self._signals.drops()
        self._ends = self._closed = False
        self._queue: Writer | None = None
        self._numbers = itertools.count()
        self._where: dict[bytes, dict[bytes, tuple[Pending, int]]] = {}  # unsent rows by namespace and key
        self._after: dict[int, list[Callable[[], None]]] = {}  # by the number of the segment
        self._claims = RedisClaims(self._clients, self._once_sent) if claims else None

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of these keys that are queued here or on the servers, in fresh memory."""
        try:
            if self._closed or len(keys) == 0:
                return Found([])
            unsent, wanted, parts = dict[Pending, list[tuple[int, int]]](), list[int](), Parts()
            for position, place in enumerate(self._unsent(keys)):
                if place is None:
                    wanted.append(position)
                else:
                    unsent.setdefault(place[0], []).append((position, place[1]))
            for pending, pairs in unsent.items():
                positions, rows = np.array(pairs, np.int64).T
                for schema, which in pending.schemas(rows):
                    columns = empty_columns(schema, len(which))
                    pending.fill(columns, rows[which], np.arange(len(which)))
                    parts.append((positions[which], rows_of(schema, columns, len(which))))
            if wanted:
                asked = np.array(wanted)
                parts += [(asked[where], rows) for where, rows in self._received(keys.take(asked))]
            return Found(merged(parts))
        except Exception as error:  # such as a lack of memory; a fault is a miss
            self._fault(error)
            return Found([])

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row now, on a server or queued here."""
        here = np.zeros(len(keys), bool)
        try:
            if self._closed:
                return here
            here = np.array([place is not None for place in self._unsent(keys)])
            asked = np.flatnonzero(~here)
            if len(asked):
                keys = keys.take(asked)
                here[asked] = self._clients.exist(row_names(keys), keys.words)
        except Exception as error:
            self._fault(error)
        return here

    @with_ordinary_tensors
    def put(self, keys: Keys, rows: Rows) -> int:
        """Queue rows under distinct keys to be sent; waits only if the queue is full.

        Does not check whether servers have them: a row is put after a miss, so its server lost it, or has a
        damaged value.
        """
        if len(keys) == 0 or self._closed or not self._takes(rows.schema):
            return 0
        try:
            allowed = self._clients.allows_writes(keys.words)
            if not allowed.all():
                places = np.flatnonzero(allowed)
                if len(places) == 0:
                    return 0
                keys, rows = keys.take(places), rows.take(torch.from_numpy(places))
            kept, queue = self._keep(keys, OwnRows(rows, self._slabs, is_added=True))
            if kept:
                queue.wait_for_room()
            return kept
        except Exception as error:
            self._fault(error)
            return 0

    def claims(self, keys: Keys) -> TierClaim | None:
        """A claim among all processes that use the servers; None if this thread holds claims."""
        return None if self._claims is None or self._closed else self._claims.of(keys)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, on all servers."""
        if self._is_busy_here():
            self.later(self.drop, namespace)
            return
        # First, as a row on its way could arrive after the search of its server.
        with self._lock():
            queue = self._begin()
            gone = self._drop_unsent(namespace)
        queue.wait_for(gone)
        self._clients.delete(pattern(namespace))

    def watch(self) -> None:
        """Have the queue of this process pull rows from `above` from now on."""
        with self._lock():
            self._begin().watch()

    def flush(self) -> None:
        """Return once all rows put so far are on the servers, or forgotten because of a fault."""
        if self._is_busy_here():
            return  # this thread would wait for itself; the rows are sent soon
        if self.above is not None:
            self.above.gather(at_end=self._ends)
        self._send_all()

    def _send_all(self) -> None:
        """Return once the rows of this process are sent."""
        with self._lock():
            queue = self._begin()
        queue.flush()

    def close(self) -> None:
        """Flush, and close every connection. Afterwards the tier finds and keeps nothing."""
        if self._closed:
            return
        if self._is_busy_here():
            self.later(self.close)
            return
        self._ends = True
        self.flush()
        with self._lock():
            queue, self._closed = self._begin(), True
        queue.end()
        if self._claims is not None:
            self._claims.close()
        self._clients.close()

    def stats(self) -> TierStats:
        """The content of the servers, including that of other programs."""
        self._send_all()  # a closed tier has nothing to send, and its servers answer nothing
        rows = sum(reply for reply in self._clients.each(b"DBSIZE") if isinstance(reply, int))
        size = evictions = 0
        for reply in self._clients.each(b"INFO"):
            if isinstance(reply, bytes):
                size += _number(reply, b"used_memory")
                evictions += _number(reply, b"evicted_keys")
        return TierStats(rows, size, evictions, self._clients.corrupt, self._clients.faults + self._faults)

    def counts(self) -> dict[str, int]:
        """The fields of `CacheStats` about this tier."""
        return super().counts() | ({} if self._claims is None else self._claims.tally.counts())

    def count(self, namespace: bytes) -> int:
        """How many rows of a namespace there are."""
        self._send_all()
        pages = self._clients.scan(pattern(namespace))
        length = len(pattern(namespace)) - 1 + 16  # other programs may use such names
        ends = [name[-16:] for page in pages for name in page if len(name) == length]
        return len(set(ends))

    # The queue of this process's unsent rows.

    def _is_busy_here(self) -> bool:
        """Whether the garbage collector called us from this thread's own work in this tier."""
        return holds(self._lock()) or (self._queue is not None and self._queue.writes_here())

    def _begin(self) -> Writer:
        """The queue, empty in a forked process; forgets what others have dropped. Call with the lock."""
        if self._queue is None or self._queue.pid != os.getpid():
            self._where, self._after = {}, {}
            self._queue = Writer(
                self._lock(),
                self._send,
                self._sent,
                _Pace(
                    self.servers.buffer,
                    target=self._queue_bytes // 8,
                    limit=self._queue_bytes,
                    delay=self._delay,
                ),
                at_exit=self.close,
                signals=self._signals,
                pull=None if self.above is None else self.above.pull,
            )
        if self._dropped != (drops := self._signals.drops()):
            self._dropped = drops
            for namespace in list(self._where):
                self._drop_unsent(namespace)
        return self._queue

    def _keep(self, keys: Keys, own: OwnRows) -> tuple[int, Writer]:
        """Queue rows that are not queued yet; returns how many, and the queue."""
        with self._lock():
            queue = self._begin()
            absent = np.flatnonzero([place is None for place in self._unsent(keys)])
            if self._closed or len(absent) == 0:
                return 0, queue
            if len(absent) < len(keys):
                keys, own = keys.take(absent), own.take(absent)
            try:
                pending = queue.open(keys.namespace, None, self._numbers)
                before, first = pending.nbytes, pending.add(keys, own)
                where = self._where.setdefault(keys.namespace, {})
                where.update((key, (pending, first + row)) for row, key in enumerate(split(keys.data)))
                queue.added(pending, None, pending.nbytes - before)
            except BaseException:
                self._drop_unsent(keys.namespace)  # the queue may be half updated
                raise
        return len(keys), queue

    def _unsent(self, keys: Keys) -> list[tuple[Pending, int] | None]:
        """The unsent segment and the row in it of each key."""
        with self._lock():
            self._begin()
            where = self._where.get(keys.namespace)
            return list(map(where.get, split(keys.data))) if where else [None] * len(keys)

    def _drop_unsent(self, namespace: bytes) -> list[Pending]:
        """Forget the queued rows of a namespace; returns their segments. Call with the lock."""
        self._where.pop(namespace, None)
        gone = [] if self._queue is None else self._queue.drop(namespace)
        for pending in gone:
            self._call_after(pending)
        return gone

    def _once_sent(self, keys: Keys, function: Callable[[Keys], None]) -> None:
        """Call a function with all of these keys, and with those of unsent rows only once these are sent."""
        with self._lock():
            places = self._unsent(keys)
            numbers = np.array([-1 if place is None else place[0].number for place in places])
            waits = numbers >= 0
            for number in np.unique(numbers[waits]).tolist():
                some = keys.take(np.flatnonzero(numbers == number))
                self._after.setdefault(number, []).append(partial(function, some))
            if waits.any():
                self._begin().hurry()  # others may be waiting
        if not waits.all():
            function(keys.take(np.flatnonzero(~waits)))

    def _sent(self, pending: Pending) -> None:
        """Find rows no longer here, as they are on the servers, or given up."""
        with self._lock():
            where = self._where.get(pending.namespace, {})
            for data, _ in pending.added():
                for key in split(data):
                    if where.get(key, (None,))[0] is pending:
                        del where[key]
        self._call_after(pending)

    def _call_after(self, pending: Pending) -> None:
        for function in self._after.pop(pending.number, ()):
            function()

    # What is sent to the servers, and read from them.

    def _takes(self, schema: Schema) -> bool:
        """Whether rows of a schema can be sent at all."""
        if schema.row_bytes > MOST_ROW_BYTES:
            message = "rows of more than %d bytes are not sent to a Redis server"
            self._clients.tell("large", message, MOST_ROW_BYTES)
            return False
        return self._serialisable(schema)

    def _received(self, keys: Keys) -> Parts:
        """The rows that servers have; a damaged value counts as a miss."""
        parts, damaged = self._records.decode(keys, self._clients.mget(row_names(keys), keys.words))
        if damaged:
            self._clients.corrupt += len(damaged)
            message = "a Redis server (%s) has damaged values: they are computed again, and replaced"
            self._clients.tell("corrupt", message, str(self.servers))
        return parts

    def _send(self, pending: Pending) -> bool:
        """Send rows; returns whether any was kept. Deletes rows again that were dropped meanwhile.

        The dropping process may have searched the servers before they arrived.
        """
        sent: list[Keys] = []
        is_kept = False
        try:
            for piece in _pieces(pending):
                with self._signals.publishing():
                    is_kept |= not self._is_dropped(pending) and self._send_piece(piece, sent)
            if self._is_dropped(pending):
                for keys in sent:
                    self._clients.run([(b"UNLINK", name) for name in row_names(keys)], keys.words)
        except Exception as error:
            self._fault(error)
        self._sent(pending)
        return is_kept

    def _is_dropped(self, pending: Pending) -> bool:
        with self._lock():
            self._begin()  # another process may have dropped rows
        return pending.dropped

    def _send_piece(self, piece: list[tuple[Keys, Rows]], sent: list[Keys]) -> bool:
        """Send rows, adding their keys to `sent`; returns whether any was kept."""
        commands, words = list[Command](), []
        for keys, rows in piece:
            try:
                values = self._records.encode(keys, rows)
            except UnserialisableError as error:
                self._clients.tell("schema", "an output is not sent to a Redis server: %s", str(error))
                continue
            commands += [(b"SET", *pair) for pair in zip(row_names(keys), values, strict=True)]
            words.append(keys.words)
            sent.append(keys)
        return bool(words) and not all(map(failed, self._clients.run(commands, np.concatenate(words))))

    def _fault(self, error: Exception) -> None:
        self._faults += 1
        self._clients.tell("fault", "rows in a Redis server are computed again: %s", repr(error))


def _pieces(pending: Pending) -> Iterator[list[tuple[Keys, Rows]]]:
    """The rows of a segment, in pieces whose encoded values take little memory."""
    piece, size = list[tuple[Keys, Rows]](), 0
    for keys, rows in pending.rows():
        step = max(1, _PIECE // max(1, rows.schema.row_bytes))
        for start in range(0, len(rows), step):
            some = np.arange(start, min(len(rows), start + step))
            columns = [column[start : start + step] for column in rows.columns]
            piece.append((keys.take(some), Rows(rows.schema, columns, len(some))))
            size += len(some) * rows.schema.row_bytes
            if size >= _PIECE:
                yield piece
                piece, size = [], 0
    if piece:
        yield piece


def _number(info: bytes, name: bytes) -> int:
    """A number in the reply to INFO; 0 if it is missing."""
    for line in info.splitlines():
        if line.startswith(name + b":"):
            return int(line[len(name) + 1 :])
    return 0
