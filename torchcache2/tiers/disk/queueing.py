"""`Queueing`: takes rows that were put, and has them wait in segments to be."""

from __future__ import annotations

import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.core.schema import Schema
from torchcache2.files.errors import UnserialisableError
from torchcache2.files.layout import schema_text
from torchcache2.tiers.disk.catalog import Located
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.known import Known
from torchcache2.tiers.disk.unwritten import OwnRows, Slabs
from torchcache2.tiers.disk.writer import Writer

__all__ = ["Queueing"]

_MOST_SCHEMAS = 1000


class Queueing:
    """Takes the rows of one tier.

    Parameters
    ----------
    known : Known
    health : Health
    budget : int
        Bytes of the whole directory.
    """

    def __init__(self, known: Known, health: Health, budget: int) -> None:
        self._known = known
        self._health = health
        self._budget = budget
        self._serialisable: dict[Schema, bool] = {}
        self._slabs = Slabs()

    def takes(self, namespace: bytes, schema: Schema) -> bool:
        """Whether rows of a namespace and schema can be written at all."""
        if not self._health.may_write(namespace) or self._known.closed:
            return False
        if schema.row_bytes > self._budget:
            return False
        known = self._serialisable.get(schema)
        if known is None:
            try:
                schema_text(schema)
                known = True
            except UnserialisableError as error:
                self._health.tell("schema", "such outputs stay in memory, not on disk: %s", str(error))
                known = False
            if len(self._serialisable) > _MOST_SCHEMAS:
                self._serialisable.clear()
            self._serialisable[schema] = known
        return known

    def keep(self, keys: Keys, rows: Rows) -> int:
        """Have rows wait to be written, those that are not here yet; returns how many those are."""
        own = OwnRows(rows, self._slabs)
        with self._known.lock():
            self._known.begin()
            if self._known.closed or self._known.writer is None:
                return 0
            try:
                located = self._known.namespace(keys.namespace)
                if not self._health.writes:  # what is there is of a newer format
                    return 0
                absent = np.flatnonzero(located.find(keys.words) < 0)
                if len(absent) < len(keys):
                    keys, own = keys.take(absent), own.take(absent)
                self._queue_rows(self._known.writer, located, keys, own)
            except BaseException:
                self._known.start_anew(keys.namespace)
                raise
        return len(keys)

    def _queue_rows(self, writer: Writer, located: Located, keys: Keys, own: OwnRows) -> None:
        """Have rows join segments to be, none of them much larger than it should."""
        family = own.schema.family
        step = max(1, writer.target // max(1, own.schema.row_bytes))
        for start in range(0, len(keys), step):
            some, piece = keys, own
            if step < len(keys):
                some = keys.take(np.arange(start, min(len(keys), start + step)))
                piece = own.part(start, start + len(some))
            pending = writer.open(keys.namespace, family, self._known.number)
            before = pending.nbytes
            located.add(some.data, pending, pending.add(some, piece))
            writer.added(pending, family, pending.nbytes - before)
