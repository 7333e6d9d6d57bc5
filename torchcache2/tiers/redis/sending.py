"""`Sender`: sends rows that wait to the servers, in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.core.rows import Rows
from torchcache2.files.errors import UnserialisableError
from torchcache2.tiers.redis.clients import Clients
from torchcache2.tiers.redis.names import row_names
from torchcache2.tiers.redis.pipelines import LOST
from torchcache2.tiers.redis.record import Records
from torchcache2.tiers.unwritten import Pending

_PIECE = 4 << 20  # bytes of rows that are sent before the replies are waited for


class Sender:
    """Has servers keep rows, as values that `records` makes of them."""

    def __init__(self, clients: Clients, records: Records) -> None:
        self._clients = clients
        self._records = records

    def send(self, pending: Pending, is_dropped: Callable[[], bool]) -> bool:
        """Send rows; whether a server has kept any.

        `is_dropped()` says whether they have been forgotten meanwhile. What was sent is then deleted again:
        whoever has dropped the namespace may have looked for its rows before they came.
        """
        sent: list[Keys] = []
        kept = False
        for keys, values in self._pieces(pending):
            if is_dropped():
                break
            sent.append(keys)
            pairs = zip(row_names(keys), values, strict=True)
            replies = self._clients.run([(b"SET", name, value) for name, value in pairs], keys.words)
            kept = kept or any(reply is not LOST and not isinstance(reply, Exception) for reply in replies)
        if sent and is_dropped():
            for keys in sent:
                self._clients.run([(b"UNLINK", name) for name in row_names(keys)], keys.words)
        return kept

    def _pieces(self, pending: Pending) -> Iterator[tuple[Keys, list[bytes]]]:
        """Keys and values to be sent together."""
        gathered: list[Keys] = []
        values: list[bytes] = []
        size = 0
        for keys, rows in pending.rows():
            step = max(1, _PIECE // max(1, rows.schema.row_bytes))
            for start in range(0, len(keys), step):
                some = keys.take(np.arange(start, min(len(keys), start + step)))
                columns = [column[start : start + len(some)] for column in rows.columns]
                try:
                    values += self._records.encode(some, Rows(rows.schema, columns, len(some)))
                except UnserialisableError as error:
                    self._clients.tell("schema", "an output is not sent to a Redis server: %s", str(error))
                    break
                gathered.append(some)
                size += len(some) * rows.schema.row_bytes
                if size >= _PIECE:
                    yield _joined(gathered), values
                    gathered, values, size = [], [], 0
        if gathered:
            yield _joined(gathered), values


def _joined(keys: list[Keys]) -> Keys:
    return Keys(keys[0].namespace, np.concatenate([some.data for some in keys]))
