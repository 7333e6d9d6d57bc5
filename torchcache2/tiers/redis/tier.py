"""`RedisTier`: rows in Redis servers, sent asynchronously.

Rows can be read as soon as they are put. They are sent to the servers when there are enough of them, after a
second, at `flush` and `close`, and at exit.

Thread-safe; any number of processes on any machines may use the same servers. A server may forget any row at
any time, and may serve other programs too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from torchcache2.core.keys import Flags, Keys
from torchcache2.core.memory import with_ordinary_tensors
from torchcache2.core.places import Servers
from torchcache2.core.rows import Parts, Rows, Schema, merged
from torchcache2.files.codec import codec as codec_of
from torchcache2.files.errors import UnserialisableError
from torchcache2.tiers.base import Found, Signals, Tier, TierClaim, TierStats
from torchcache2.tiers.redis.claims import RedisClaims
from torchcache2.tiers.redis.client import Clients, Command, failed
from torchcache2.tiers.redis.outbox import Batch, Outbox, pieces
from torchcache2.tiers.redis.record import MOST_ROW_BYTES, Records, pattern, row_names
from torchcache2.tiers.unwritten import OwnRows, Serialisable, Slabs

_QUEUED = 64 << 20
_SENT_AFTER = 1.0  # seconds
_NO_WORDS = np.empty((0, 2), np.uint64)


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
    most_seconds : callable, optional
        As for `DiskTier`: only as many rows may wait in a process as it can send in that many seconds.
    signals : Signals, optional
        Signals between the processes of a job.

    Notes
    -----
    A server that refuses the password is a mere fault here, as `check_place` has checked it before.
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
        most_seconds: Callable[[], float | None] | None = None,
        signals: Signals | None = None,
    ) -> None:
        self.servers = servers
        signals = Signals() if signals is None else signals
        self._records = Records(codec_of(codec, quality))
        self._clients = Clients(servers, signals.tell)
        message = "such outputs are not sent to a Redis server: %s"
        self._serialisable = Serialisable(self._clients.tell, message)
        self._slabs = Slabs()
        self._faults = 0
        self._outbox = Outbox(
            self._send,
            signals,
            queue=queue,
            buffer=servers.buffer,
            delay=delay,
            most_seconds=most_seconds,
            at_exit=self.close,
        )
        self._claims = RedisClaims(self._clients, self._outbox) if claims else None

    @with_ordinary_tensors
    def get(self, keys: Keys) -> Found:
        """The rows of these keys that are queued here or on the servers, in fresh memory."""
        try:
            if self._outbox.closed or len(keys) == 0:
                return Found([])
            parts = self._outbox.find(keys)
            missing = np.ones(len(keys), bool)
            for positions, _ in parts:
                missing[positions] = False
            if missing.any():
                wanted = np.flatnonzero(missing)
                parts += [(wanted[where], rows) for where, rows in self._received(keys.take(wanted))]
            return Found(merged(parts))
        except Exception as error:  # such as a lack of memory; a fault is a miss
            self._fault(error)
            return Found([])

    def has(self, keys: Keys) -> Flags:
        """Whether each key has a row now, on a server or queued here."""
        here = np.zeros(len(keys), bool)
        try:
            if self._outbox.closed:
                return here
            here = self._outbox.has(keys)
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
        if len(keys) == 0 or self._outbox.closed or not self._takes(rows.schema):
            return 0
        try:
            allowed = self._clients.allows_writes(keys.words)
            if not allowed.all():
                places = np.flatnonzero(allowed)
                if len(places) == 0:
                    return 0
                keys, rows = keys.take(places), rows.take(torch.from_numpy(places))
            return self._outbox.keep(keys, OwnRows(rows, self._slabs))
        except Exception as error:
            self._fault(error)
            return 0

    def claims(self, keys: Keys) -> TierClaim | None:
        """A claim among all processes that use the servers; None if this thread holds claims."""
        return None if self._claims is None or self._outbox.closed else self._claims.of(keys)

    def drop(self, namespace: bytes) -> None:
        """Forget every row of a namespace, on all servers."""
        if self.is_busy_here():
            self.later(self.drop, namespace)
            return
        # First, as a row on its way could arrive after the search of its server.
        self._outbox.drop(namespace)
        self._clients.delete(pattern(namespace))

    def flush(self) -> None:
        """Return once all rows put so far are on the servers, or forgotten because of a fault."""
        if self.is_busy_here():
            return  # this thread would wait for itself; the rows are sent soon
        self._outbox.flush()

    def close(self) -> None:
        """Flush, and close every connection. Afterwards the tier finds and keeps nothing."""
        if self._outbox.closed:
            return
        if self.is_busy_here():
            self.later(self.close)
            return
        self._outbox.flush()
        self._outbox.close()
        if self._claims is not None:
            self._claims.close()
        self._clients.close()

    def stats(self) -> TierStats:
        """The content of the servers, including that of other programs."""
        self.flush()  # a closed tier has nothing to flush, and its servers answer nothing
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
        self.flush()
        pages = self._clients.scan(pattern(namespace))
        length = len(pattern(namespace)) - 1 + 16  # other programs may use such names
        ends = [name[-16:] for page in pages for name in page if len(name) == length]
        return len(set(ends))

    def is_busy_here(self) -> bool:
        """Whether the garbage collector called us from this thread's own work in this tier."""
        return self._outbox.is_busy_here()

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

    def _send(self, batches: Sequence[Batch], look: Callable[[], None]) -> bool:
        """Send rows; returns whether any was kept. Deletes rows again that were dropped meanwhile.

        The dropping process may have searched the servers before they arrived.
        """
        sent: list[tuple[Batch, Keys]] = []
        is_kept = False
        try:
            for piece in pieces(batches):
                is_kept |= self._send_piece(piece, look, sent)
            look()
            for batch, keys in sent:
                if batch.dropped:
                    self._clients.run([(b"UNLINK", name) for name in row_names(keys)], keys.words)
        except Exception as error:
            self._fault(error)
        return is_kept

    def _send_piece(
        self, piece: list[tuple[Batch, Keys, Rows]], look: Callable[[], None], sent: list[tuple[Batch, Keys]]
    ) -> bool:
        """Send rows that were not dropped, adding them to `sent`; returns whether any was kept."""
        commands, words = list[Command](), [_NO_WORDS]
        look()
        for batch, keys, rows in piece:
            if batch.dropped:
                continue
            try:
                values = self._records.encode(keys, rows)
            except UnserialisableError as error:
                self._clients.tell("schema", "an output is not sent to a Redis server: %s", str(error))
                continue
            commands += [(b"SET", *pair) for pair in zip(row_names(keys), values, strict=True)]
            words.append(keys.words)
            sent.append((batch, keys))
        return not all(map(failed, self._clients.run(commands, np.concatenate(words))))

    def _fault(self, error: Exception) -> None:
        self._faults += 1
        self._clients.tell("fault", "rows in a Redis server are computed again: %s", repr(error))


def _number(info: bytes, name: bytes) -> int:
    """A number in the reply to INFO; 0 if it is missing."""
    for line in info.splitlines():
        if line.startswith(name + b":"):
            return int(line[len(name) + 1 :])
    return 0
